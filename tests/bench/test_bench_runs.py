"""``omnilearn bench overhead`` and ``sync``, run for real on this machine: shape and sanity, no times."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from omnilearn import cli
from omnilearn.bench.gang import Gang, GangError
from omnilearn.bench.load import Load
from omnilearn.bench.results import render
from omnilearn.bench.service import named_policy
from omnilearn.bench.workloads import workload
from omnilearn.cluster import cgroup, netns
from omnilearn.cluster.owner import PREFIX
from omnilearn.control import Optimal, Proportional


def bench(*words: str, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnilearn", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def measured(tmp_path: Path, name: str, *words: str) -> dict[str, Any]:
    path = tmp_path / f"{name}.json"
    done = bench(name, "--quick", *words, "--json", str(path))
    assert done.returncode == 0, done.stderr
    read: dict[str, Any] = json.loads(path.read_text())
    assert set(read) == {"schema", "bench", "command", "version", "date", "machine", "summary", "rows"}
    assert read["bench"] == name
    assert f"bench {name}: [" in done.stderr  # progress goes there
    assert f"bench {name}" not in done.stdout
    first = read["rows"][0]
    assert (first.get("contestant") or first["variant"]) in done.stdout
    return read


@pytest.mark.parametrize(("framework", "package", "goal"), [("pytorch", "torch", 1.01), ("tensorflow", "keras", 1.05)])
def test_overhead(framework: str, package: str, goal: float, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{framework} is not installed")
    options = ("--framework", framework, "--model", "chatty", "--blocks", "2", "--steps", "4")
    read = measured(tmp_path, "overhead", *options)
    summary = read["summary"]
    lower, upper = summary["ratio_spread"]
    assert 0.1 < lower <= summary["ratio"] <= upper < 10
    assert summary["ratio"] == summary["models"]["chatty"]["optimal"]["ratio"]
    assert summary["goal"] == goal
    assert "unfinished" not in summary
    by_name = {row["contestant"]: row for row in read["rows"]}
    assert set(by_name) == {"ddp", "uniform", "optimal"}
    assert by_name["ddp"]["ratio"] == by_name["ddp"]["ratio_of_totals"] == 1
    assert by_name["ddp"]["batches"] == by_name["uniform"]["batches"] == "32/32"


def test_sync(tmp_path: Path) -> None:
    read = measured(tmp_path, "sync", "--levels", "HL8", "--model", "chatty", "--rounds", "1")
    level = read["summary"]["levels"]["HL8"]
    own = level["workloads"]["chatty"]
    worst = ("speedup_vs_uniform", "fraction_of_oracle", "vs_best_subset")
    assert [level[key] for key in worst] == [own[key] for key in worst]  # the worst of one
    for key in (*worst, "ddp_vs_itself"):
        lower, upper = own[f"{key}_spread"]
        assert 0 < lower <= own[key] <= upper
    assert sum(own["oracle"]) == workload("chatty").global_batch
    assert own["splits_tried"] >= 4
    assert any("park" in plan for plan in own["plans"])
    assert own["sets_left_out"] > 0
    # FACTS: a tenth of uniform's time on the fastest worker alone. Both the search and the policy find that.
    assert own["oracle"] == [0, 0, 0, 64]
    assert own["best_subset"] == own["oracle"]
    rows = {row["contestant"]: row for row in read["rows"]}
    assert {"ddp", "ddp again", "static", "optimal", "oracle"} <= set(rows)
    assert rows["optimal"]["batches"] == "0/0/0/64"
    assert rows["optimal"]["parked"] == "0,1,2"
    assert rows["ddp"]["batches"] == rows["ddp again"]["batches"] == "16/16/16/16"
    assert rows["ddp"]["waiting"] > rows["oracle"]["waiting"]
    assert level["speedup_vs_uniform"] > 1.5


@pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable())
def test_overlap(tmp_path: Path) -> None:
    read = measured(tmp_path, "overlap", "--rates", "3Gbit")
    rows = {row["contestant"]: row for row in read["rows"]}
    assert set(rows) == {"at the step", "early"}
    assert rows["at the step"]["ratio"] == 1
    assert read["summary"]["step_time_ratio"] == rows["early"]["ratio"] > 0
    assert "| 3Gbit | early |" in render([("overlap.json", read)])


@pytest.mark.skipif(bool(netns.unavailable()), reason=netns.unavailable())
def test_network(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    read = measured(tmp_path, "network", "--model", "digits", "--batch", "32", "--rates", "1Gbit", "--rounds", "1")
    link = read["summary"]["links"]["HL2 1Gbit"]
    assert sum(link["workloads"]["digits"]["best_subset"]) == 32
    assert link["vs_best_subset"] == read["summary"]["vs_best_subset"] > 0
    assert read["summary"]["latency"] in ("1ms", "left out: this kernel has no netem")
    assert f"Latency of the links: {read['summary']['latency']}." in render([("network.json", read)])


def test_ablation(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    read = measured(tmp_path, "ablation", "--epochs", "1", "--accuracy", "0.05")
    rows = {row["variant"]: row for row in read["rows"]}
    assert set(rows) == set(read["summary"]["variants"])
    for row in rows.values():
        assert row["final_lower"] <= row["final_accuracy"] <= row["final_upper"]
        assert row["seconds_to_accuracy"] is None or row["lower"] <= row["seconds_to_accuracy"] <= row["upper"]
    assert rows["uniform DDP"]["batches"] == "32/32/32/32"
    assert rows["no weighting"]["batches"] == rows["same split, weighted"]["batches"]
    assert "What each part is worth" in render([("ablation.json", read)])


def test_a_climb(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ("--model", "digits", "--batch", "32", "--levels", "HL1,HL8", "--steps", "5")
    read = measured(tmp_path, "dynamic", *words)
    assert read["summary"]["climb"] == ["HL1", "HL8"]
    stages = [(row["contestant"], row["stage"]) for row in read["rows"]]
    assert stages == [(who, stage) for who in ("ddp", "optimal") for stage in ("1: HL1", "2: HL8")]
    own = read["summary"]["workloads"]["digits"]
    assert read["summary"]["speedup_vs_uniform"] == own["speedup_vs_uniform"] > 0
    assert set(own["steps_to_90_by_stage"]) == {"1: HL1", "2: HL8"}
    assert own["fraction_of_oracle"] == own["oracle_total_s"]["median"] / own["total_s"]["optimal"]["median"]
    assert all(sum(map(int, row["batches"].split("/"))) == 32 for row in read["rows"])


def test_policies_by_names_that_can_be_sent() -> None:
    assert named_policy("optimal") == "optimal"
    assert named_policy("optimal from uniform") == Optimal(first="uniform")
    assert named_policy("proportional every 20") == Proportional(every=20)


def test_other_work_on_one_device(tmp_path: Path) -> None:
    """Shape only: the machine's cores are shared with whoever else is here."""
    words = ("--emulate", "1,1", "--load", "0", "--model", "even", "--batch", "32", "--steps", "6")
    read = measured(tmp_path, "dynamic", *words)
    assert read["summary"]["climb"] == ["free", "loaded", "free"]
    stages = [(row["contestant"], row["stage"]) for row in read["rows"]]
    assert [stage for who, stage in stages if who == "optimal"] == ["1: free", "2: loaded", "3: free"]
    assert {who for who, _ in stages} == {"ddp", "static", "optimal"}
    assert all(row["step_ms"] > 0 for row in read["rows"])
    assert "busy with other work" in render([("dynamic.json", read)])
    assert all(isinstance(plans, list) for plans in read["summary"]["workloads"]["even"]["plans"])


CUDA = pytest.param(
    "cuda:0", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")]
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_load_begins_and_ends_with_its_flag(tmp_path: Path, device: str) -> None:
    flag = tmp_path / "load"
    flag.write_bytes(b"\0\0")
    load = Load(flag, 1, torch.device(device))
    load.start()

    def moves(wanted: bool) -> bool:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            before = load.rounds
            time.sleep(0.2)
            if (load.rounds > before) == wanted:
                return True
        return False

    assert load.rounds == 0
    for flags, wanted in ((b"\0\1", True), (b"\1\0", False), (b"\0\1", True), (b"\0\0", False)):
        flag.write_bytes(flags)
        assert moves(wanted)
    load.over.set()
    load.join(30)
    assert not load.is_alive()


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_sync_with_tensorflow(tmp_path: Path) -> None:
    options = ("--framework", "tensorflow", "--levels", "HL4", "--model", "chatty", "--rounds", "1")
    read = measured(tmp_path, "sync", *options)
    own = read["summary"]["levels"]["HL4"]["workloads"]["chatty"]
    assert read["summary"]["framework"] == "tensorflow"
    assert own["oracle"] == [0, 0, 0, 64]  # as with PyTorch: communication costs more than the others bring
    rows = {row["contestant"]: row for row in read["rows"]}
    assert rows["optimal"]["batches"] == "0/0/0/64"
    assert own["speedup_vs_uniform"] > 1.5


def test_async(tmp_path: Path) -> None:
    read = measured(tmp_path, "async", "--levels", "HL8", "--model", "digits", "--epochs", "1", "--workers", "2")
    own = read["summary"]["levels"]["HL8"]["digits"]
    assert set(own["rules"]) == {"dynamic, scale", "dynamic, discard", "dynamic, bounded"}
    for key in ("staleness_p95_vs_plain", "samples_per_s_vs_plain", "samples_per_s_vs_sync"):
        assert 0 < own[key] < 100
    assert -100 <= own["accuracy_gain_vs_plain"] <= 100
    rows = {row["contestant"]: row for row in read["rows"] if "contestant" in row}
    assert rows["sync"]["max"] == 0 < rows["plain"]["max"]
    by_worker = [int(count) for count in rows["plain"]["updates_by_worker"].split("/")]
    assert by_worker[3] > max(by_worker[:3]), "with equal batches the fast worker makes most updates"
    trips = [row for row in read["rows"] if "ratio" in row]
    assert [row["workers"] for row in trips] == [2]
    assert all(row["ratio"] > 0 < row["sent_vs_needed"] and row["server_cpu_ms"] > 0 for row in trips)
    assert "unfinished" not in read["summary"]
    assert "Asynchronous training" in render([("a.json", read)])


def test_async_on_another_cluster(tmp_path: Path) -> None:
    read = measured(tmp_path, "async", "--emulate", "cpu=0.4,1.2", "--model", "gpt2", "--epochs", "1")
    own = read["summary"]["levels"]["cpu=0.4,1.2"]["gpt2"]
    assert 0 < own["samples_per_s_vs_sync"] < 100
    rows = {row["contestant"]: row for row in read["rows"]}
    slow, fast = map(int, rows["plain"]["updates_by_worker"].split("/"))
    assert 0 < slow < fast
    assert all(0 <= row["accuracy_equal_samples"] <= 1 for row in rows.values())
    page = render([("a.json", read)])
    assert "## Asynchronous training on another cluster" in page
    assert "bare transport" not in page, "nobody asked for round trips"


def test_an_interrupted_async_benchmark_keeps_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "async.json"
    command = [sys.executable, "-m", "omnilearn", "bench", "async", "--quick", "--levels", "HL1", "--workers", "1"]
    process = subprocess.Popen([*command, "--json", str(path)], stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    read = json.loads(path.read_text())
    assert read["summary"]["unfinished"] is True
    assert [row["workers"] for row in read["rows"]] == [1]


def test_a_failing_worker_is_named_and_nothing_is_left() -> None:
    with pytest.raises(GangError, match=r"(?s)rank \d failed at set-up:.*KeyError"), Gang(2, limited=False) as gang:
        gang.all("block", "nobody", doing="set-up")
    with Gang(2, limited=False) as gang:
        os.kill(gang._processes[1].pid, signal.SIGKILL)
        with pytest.raises(GangError, match=r"rank 1 was killed, .* memory .* at a nap"):
            gang.all("forget", doing="a nap")


def is_member(process: psutil.Process) -> bool:
    try:
        return "omnilearn.bench.member" in process.cmdline()
    except psutil.Error:  # it has ended, or is about to become another program
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_nothing(number: int) -> None:
    command = [sys.executable, "-m", "omnilearn", "bench", "sync", "--quick", "--levels", "HL1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        workers: list[psutil.Process] = []
        while len(workers) < 4 and time.monotonic() < deadline:
            workers = [c for c in psutil.Process(process.pid).children() if is_member(c)]
            time.sleep(0.05)
        assert len(workers) == 4
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    assert not [g for g in cgroup.all_groups(PREFIX) if f"-{process.pid}-" in g.name]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sync", "--levels", "HL3"], "unknown name 'HL3'"),
        (["sync", "--model", "light"], "unknown name 'light'"),
        (["sync", "--rounds", "0"], "must be at least 1, got 0"),
        (["dynamic", "--levels", "HL1,HL9"], "unknown name 'HL9'"),
        (["overhead", "--device", "abacus"], "abacus"),
    ],
)
def test_wrong_use(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["overhead", "--steps", "2"], "--steps 2 leaves nothing to measure"),
        (["overhead", "--nproc", "3", "--emulate", "1,1"], "a cluster of 2 workers, but --nproc is 3"),
        (["network", "--rates", "fast"], "--rates 'fast' is not understood"),
        (["ablation", "--accuracy", "97"], "--accuracy must lie between 0 and 1"),
        (["memory", "--room", "2"], "--room must lie between 0 and 1"),
        (["memory", "--emulate", "1,1", "--worker", "2"], "there are workers 0 to 1"),
        (["dynamic", "--load", "4"], "there are workers 0 to 3"),
        (["dynamic", "--steps", "2"], "--steps 2 at each level are too few"),
        (
            ["sync", "--batch", "66"],
            "4 workers cannot share equally as uniform DDP does: give --batch 64 or --batch 68",
        ),
        (["sync", "--batch", "2"], "give --batch 4 or --batch 8"),
        (["network", "--latency", "long"], "--latency 'long' is not understood"),
        (["control", "--json", "/dev/null/r.json"], "cannot write /dev/null/r.json: /dev/null is no folder"),
        (["sync", "--report", "/"], "cannot write /: Is a directory"),
        (["dynamic", "--emulate", "1,1"], "--emulate here needs --load K"),
        (["dynamic", "--load", "0", "--levels", "HL1"], "two different journeys"),
    ],
)
def test_bad_values_are_told_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sync", "--quick"], ["dynamic"], ["network", "--quick"]])
def test_models_that_memory_does_not_hold_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("omnilearn.bench.arguments.ram", lambda: 24 * 10**9)
    monkeypatch.setattr("omnilearn.bench.arguments.has_card", lambda: False)
    assert cli.main(["bench", *words, "--model", "gpt2", "--size", "full"]) == 2
    assert "gpt2 needs at least" in (said := capsys.readouterr().err)
    assert "there are 24 GB here" in said
