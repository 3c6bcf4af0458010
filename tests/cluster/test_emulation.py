"""Specifications: good ones become values, bad ones are named with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnilearn.cluster.emulation import LEVELS, Worker, parse
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError


def cpus(spec: str, nproc: int | None = None, cores: float = 2.0, mode: str = "sync") -> list[float]:
    return [worker.cpu or 0 for worker in parse(spec, nproc, cores, mode).workers]  # type: ignore[arg-type]


def test_hl8_on_two_cores_is_what_the_facts_used() -> None:
    assert cpus("HL8") == pytest.approx([0.225, 0.225, 0.15, 1.2])
    assert cpus("hl8", nproc=4) == cpus("HL8")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("name", ["HL1", "HL2", "HL4", "HL8"])
@pytest.mark.parametrize("cores", [1, 2, 16, 96.0])
def test_levels_take_nine_tenths_in_the_papers_ratios(name: str, mode: str, cores: float) -> None:
    shares = cpus(name, cores=cores, mode=mode)
    assert sum(shares) == pytest.approx(0.9 * cores, abs=1e-4)
    table = LEVELS[mode][name]
    assert [share / shares[0] for share in shares] == pytest.approx([t / table[0] for t in table], rel=1e-3)


def test_other_short_forms() -> None:
    assert cpus("HL8-async") == cpus("HL8", mode="async")
    assert cpus("6,6,4,32") == cpus("HL8")
    assert cpus(" 1, 3 ") == pytest.approx([0.45, 1.35])
    assert cpus("cpu=0.5,1.2") == [0.5, 1.2]
    assert [worker.mps for worker in parse("mps=12,12,8,64", 4, 2.0).workers] == [12, 12, 8, 64]


def test_the_description_is_for_people() -> None:
    assert str(parse("HL8", None, 2.0)) == "HL8: 0.225, 0.225, 0.15, 1.2 cores"
    limits = Worker(cpu=0.5, memory=2 * 10**9, bandwidth=10**8, latency=0.005, device="cpu")
    assert str(limits) == "0.5 cores + 2GB + 100Mbit + 5ms latency + on cpu"


@pytest.mark.parametrize(
    ("spec", "nproc", "names"),
    [
        ("HL3", None, ["HL3", "HL8"]),
        ("HL8-fast", None, ["HL8-fast"]),
        ("HL8", 3, ["4 workers", "--nproc is 3"]),
        ("1,2", 4, ["2 workers", "--nproc is 4"]),
        ("cpu=1,2", None, ["3 cores", "has 2"]),
        ("cpu=-1,1", None, ["-1"]),
        ("cpu=", None, ["''"]),
        ("0,1", None, ["0", "above zero"]),
        ("-1,2", None, ["-1"]),
        ("nan,1", None, ["nan"]),
        ("1,inf", None, ["inf"]),
        ("1,,2", None, ["''"]),
        ("1,two", None, ["two"]),
        ("1,1000", None, ["0.001798", "milder"]),
        ("mps=80,80", None, ["160"]),
        ("gpu=1", None, ["gpu=1", "mps="]),
        ("", None, ["HL8"]),
        ("nowhere.toml", None, ["nowhere.toml", "No such file"]),
        (",".join(["1"] * 300), None, ["0.006 cores", "fewer workers"]),
        ("1e308,1e308", None, ["1e308", "at most"]),
        ("x" * 300, None, ["is not understood"]),
    ],
)
def test_bad_specifications_are_named(spec: str, nproc: int | None, names: list[str]) -> None:
    with pytest.raises(OmniLearnError) as caught:
        parse(spec, nproc, 2.0)
    assert isinstance(caught.value, InfeasibleError | UsageError)
    for name in names:
        assert name in str(caught.value)


WORKERS = "[[worker]]\ncpu = 0.5\n[[worker]]\ncpu = 1.0\n"


def read(tmp_path: Path, text: str, nproc: int | None = None):  # type: ignore[no-untyped-def]
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return parse(str(path), nproc, 2.0)


def test_a_file_with_everything(tmp_path: Path) -> None:
    emulation = read(
        tmp_path,
        """
        [[worker]]
        cpu = 0.5
        memory = "1.5GiB"
        bandwidth = "100Mbit"
        latency = "5ms"
        device = "cpu"
        [[worker]]
        mps = 25
        device = "cuda"
        [[change]]
        at_step = 50
        worker = 1
        cpu = 1.0
        [[change]]
        at_second = 2.5
        worker = 0
        bandwidth = "20Mbit/s"
        memory = 1000000000
        [[change]]
        at_step = 20
        cpu = [0.1, 0.2]
        """,
    )
    assert emulation.workers == (
        Worker(0.5, 3 * 2**29, 10**8, 0.005, None, "cpu"),
        Worker(mps=25, device="cuda"),
    )
    assert [change.when for change in emulation.changes] == ["2.5 s", "step 20", "step 50"]
    assert emulation.changes[0].values == ((0, Worker(memory=10**9, bandwidth=20 * 10**6)),)
    assert emulation.changes[1].values == ((0, Worker(cpu=0.1)), (1, Worker(cpu=0.2)))


def test_a_climb_through_the_levels(tmp_path: Path) -> None:
    climb = "".join(f'[[change]]\nat_step = {k}\nlevel = "{name}"\n' for k, name in enumerate(LEVELS["sync"]))
    emulation = read(tmp_path, "[[worker]]\ncpu = 0.45\n" * 4 + climb, 4)
    assert [change.values[3][1].cpu for change in emulation.changes] == pytest.approx([0.45, 0.6, 0.9, 1.2])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("not toml at all", ["not valid TOML"]),
        ("", ["no worker"]),
        ("[worker]\ncpu = 1", ["double brackets"]),
        ("[[worker]]\ncores = 1", ["'cores'", "cpu"]),
        ("[[machine]]\ncpu = 1", ["'machine'"]),
        ("[[worker]]\ncpu = -1", ["worker 0", "-1"]),
        ("[[worker]]\ncpu = true", ["True"]),
        ("[[worker]]\ncpu = 3", ["3 cores", "has 2"]),
        ('[[worker]]\nmemory = "lots"', ["lots", "2GB"]),
        ('[[worker]]\nmemory = "0GB"', ["0GB"]),
        ("[[worker]]\nmemory = 0.5", ["less than a byte"]),
        ('[[worker]]\nbandwidth = "100MB"', ["100MB", "100Mbit"]),
        ('[[worker]]\nlatency = "-5ms"', ["-5ms"]),
        ('[[worker]]\ndevice = "tpu"', ["tpu"]),
        ("[[worker]]\nmps = 120", ["120"]),
        ('[[worker]]\nmps = 20\ndevice = "cpu"', ["needs a card"]),
        (WORKERS + "[[change]]\nworker = 0\ncpu = 1", ["at_step or at_second"]),
        (WORKERS + "[[change]]\nat_step = 1\nat_second = 1\nworker = 0\ncpu = 1", ["at_step or at_second"]),
        (WORKERS + "[[change]]\nat_step = 1.5\nworker = 0\ncpu = 1", ["1.5", "whole"]),
        (WORKERS + "[[change]]\nat_second = -1\nworker = 0\ncpu = 1", ["-1"]),
        (WORKERS + '[[change]]\nat_second = "soon"\nworker = 0\ncpu = 1', ["soon"]),
        (WORKERS + "[[change]]\nat_step = 1\nworker = 2\ncpu = 1", ["worker = 2", "0 to 1"]),
        (WORKERS + "[[change]]\nat_step = 1\nworker = 0", ["nothing changes"]),
        (WORKERS + "[[change]]\nat_step = 1\ncpu = 1.0", ["for whom"]),
        (WORKERS + "[[change]]\nat_step = 1\ncpu = [1.0]", ["1 shares for 2"]),
        (WORKERS + '[[change]]\nat_step = 1\nlevel = "HL8"', ["4 shares for 2"]),
        (WORKERS + '[[change]]\nat_step = 1\nlevel = "HL9"', ["HL9"]),
        (WORKERS + "[[change]]\nat_step = 1\nworker = 0\nmps = 5", ["'mps'"]),
        (WORKERS + "[[change]]\nat_step = 7\nworker = 0\ncpu = 1.5", ["2.5 cores", "step 7"]),
        (
            WORKERS + "[[change]]\nat_step = 7\nworker = 0\ncpu = 1.5\n"
            "[[change]]\nat_second = 1\nworker = 1\ncpu = 0.3",
            ["2.5 cores", "if changes by step and by second come together"],
        ),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, names: list[str]) -> None:
    with pytest.raises((InfeasibleError, UsageError)) as caught:
        read(tmp_path, text)
    for name in names:
        assert name in str(caught.value)


def test_a_level_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "HL8").write_text("no emulation at all")
    (tmp_path / "mine").write_text(WORKERS)
    monkeypatch.chdir(tmp_path)
    assert parse("HL8", None, 2.0).nproc == 4
    assert parse("mine", None, 2.0).nproc == 2
    assert parse("./mine", None, 2.0).nproc == 2


def test_a_file_for_another_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 workers, but --nproc is 3"):
        read(tmp_path, WORKERS, 3)
