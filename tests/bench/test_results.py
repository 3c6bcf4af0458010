"""The results page says what the records say, and the one that is committed is made of those that are committed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omnilearn.bench.results import read, render
from omnilearn.bench.sections import SECTIONS
from omnilearn.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs"


def record(bench: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "A CPU", "cores": 2, "gpu": [], "python": "3.11", "torch": "2.13", "system": "Linux"}
    return {
        "schema": 1, "bench": bench, "command": f"omnilearn bench {bench}", "version": "0.1", "machine": machine,
        "date": "2026-11-15T05:00:00+00:00", "rows": rows, "summary": summary,
    }  # fmt: skip


def contest(speedup: float) -> dict[str, Any]:
    own = {
        "speedup_vs_uniform": speedup, "speedup_vs_uniform_spread": [speedup - 1, speedup + 1], "vs_best_subset": 1.01,
        "fraction_of_oracle": 0.98, "vs_best_single": 1.5, "steps_to_90": None, "oracle": [0, 0, 0, 64],
        "others": {"static": {"fraction_of_oracle": 0.7}},
    }  # fmt: skip
    return {"workloads": {"chatty": own}}


def test_the_committed_page_is_made_of_the_committed_records() -> None:
    records = [(path.name, read(path)) for path in sorted((DOCS / "results").glob("*.json"))]
    assert (DOCS / "results.md").read_text(encoding="utf-8") == render(records), "run make results"


def test_sync_beside_the_papers() -> None:
    row = {"level": "HL8", "contestant": "optimal", "step_ms": 12.345}
    page = render([("s.json", record("sync", [row], {"levels": {"HL1": contest(1.0), "HL8": contest(4.0)}}))])
    assert "Less time than uniform: 0% to 75%, 38% on average (the papers: 14–85% less time, 26% on average)" in page
    assert "| HL8 | chatty | 4 | 3–5 | 75% | 0.98 | 1.01 | 1.5 | – | 0/0/0/64 |" in page
    assert "| HL8 | optimal | 12.3 |" in page
    assert "`omnilearn bench sync` on 2026-11-15: A CPU, 2 cores" in page


@pytest.mark.parametrize(
    ("level", "devices", "title", "claim"),
    [
        ("mps=12,12,8,50", None, "on unequal cards", "4.5 times as fast on two T4 and two P4"),
        ("gpu_and_cpu.toml", None, "on a card beside a CPU", "4 times as fast for ResNet-50"),
        ("a.toml", ["cuda", "cuda"], "on unequal cards", "4.5 times as fast on two T4 and two P4"),
        ("a.toml", ["cuda", "cpu"], "on a card beside a CPU", "4 times as fast for ResNet-50"),
        ("2,2,1,11", ["cpu", "cpu"], "on another cluster", "on CPU clusters"),
    ],
)
def test_each_cluster_beside_the_claim_for_its_kind(
    level: str, devices: list[str] | None, title: str, claim: str
) -> None:
    summary = {"levels": {level: contest(2.0)}} | ({"devices": devices} if devices else {})
    page = render([("s.json", record("sync", [{"a": 1}], summary))])
    assert f"## Synchronous training {title}\n" in page
    assert "Less time than uniform: 50% (the papers: " in page
    assert claim in page.split("\n## ")[1]


def test_what_was_interrupted_says_so() -> None:
    whole = record("sync", [{"a": 1}], {"levels": {"HL8": contest(2.0)}})
    cut = record("sync", [{"a": 1}], {"levels": {"HL8": contest(2.0)}, "unfinished": True})
    assert "**Unfinished**" not in render([("s.json", whole)])
    assert "**Unfinished**" in render([("s.json", cut)])


def test_order_does_not_matter(tmp_path: Path) -> None:
    sync = ("s.json", record("sync", [{"a": 1}], {"levels": {"HL8": contest(2.0)}}))
    links = ("n.json", record("network", [{"a": 1}], {"links": {"HL2 1Gbit": contest(2.0)}}))
    assert render([sync, links]) == render([links, sync])
    assert "No results yet" in render([])


def test_records_of_a_kind_stand_together() -> None:
    levels, other = ({"levels": {level: contest(2.0)}} for level in ("HL8", "2,2,1,11"))
    names = {"a.json": levels, "b.json": other, "c.json": levels}
    page = render((name, record("sync", [{"a": 1}], summary)) for name, summary in names.items())
    heads = [line for line in page.splitlines() if line.startswith("#")]
    first, second = "Synchronous training at the papers' levels", "Synchronous training on another cluster"
    assert heads == ["# Results", f"## {first}", "### a", "### c", f"## {second}", "### b"]
    assert f"- [{first}](#synchronous-training-at-the-papers-levels): 2 records\n" in page
    assert f"- [{second}](#synchronous-training-on-another-cluster): 1 record\n" in page


@pytest.mark.parametrize("accuracy", [0.008, 0.7])
def test_accuracies_are_compared_once_something_is_learnt(accuracy: float) -> None:
    own = dict.fromkeys(
        ("staleness_p95_vs_plain", "accuracy_gain_vs_plain", "accuracy_gain_equal_samples", "accuracy_gap_to_sync",
         "samples_per_s_vs_plain", "samples_per_s_vs_sync"), 1.25,
    )  # fmt: skip
    outcome = {**own, "accuracy_gain_spread": [0.1, 0.2], "rules": {}}
    row = {"level": "HL8", "contestant": "plain", "accuracy_equal_samples": accuracy}
    page = render([("a.json", record("async", [row], {"levels": {"HL8": {"digits": outcome}}}))])
    assert ("points of accuracy over plain" in page) == (accuracy > 0.1)
    assert ("too few steps to compare accuracies" in page) == (accuracy < 0.1)


def test_every_benchmark_has_a_section() -> None:
    from omnilearn.bench.command import BENCHMARKS

    assert set(BENCHMARKS) <= set(SECTIONS)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 99}'])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match=r"r\.json"):
        read(tmp_path / "r.json")


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(record("sync", [{"a": 1}], {"levels": {"HL8": contest(2.0)}})))
    command = [sys.executable, "-m", "omnilearn.bench.results"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("# Results\n")
    done = subprocess.run([*command, "nothing.json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "nothing.json" in done.stderr
    assert "Traceback" not in done.stderr
