"""``omnilearn bench control``, run for real: the shape of what it writes, not its times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnilearn.bench.clusters import CLUSTERS
from omnilearn.bench.control import sampler_mb


def bench(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnilearn", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=cwd)


def test_quick_run(tmp_path: Path) -> None:
    path = tmp_path / "out" / "control.json"
    done = bench("control", "--quick", "--workers", "500", "--json", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    read = json.loads(path.read_text())
    assert set(read) == {"schema", "bench", "command", "version", "date", "machine", "summary", "rows"}
    assert read["bench"] == "control"
    assert read["command"] == "omnilearn bench control --quick --workers 500 --json control.json"
    summary = read["summary"]
    for name in ("allocate_ms", "replan_ms", "sampler_ms_per_4096"):
        lower, upper = summary[f"{name}_spread"]
        assert 0 < lower <= summary[name] <= upper
    assert 0 < summary["sampler_mb_at_100m"] < 80  # an array of 100 million indices would be 800
    names = {cluster.name for cluster in CLUSTERS}
    for key in ("replans_to_97", "fraction_of_oracle"):
        assert set(summary[key]) == names
        assert all(set(values) == {"optimal", "proportional"} for values in summary[key].values())
    assert all(values["optimal"] <= 4 for values in summary["replans_to_97"].values())
    assert summary["replans_to_97"]["GPU + 12 cores"]["proportional"] is None  # it never parks, and never gets there
    assert all(0 < f <= 1.000001 for values in summary["fraction_of_oracle"].values() for f in values.values())
    # Tables on stdout, progress on stderr.
    assert "allocate_ms" in done.stdout
    assert all(name in done.stdout for name in names)
    assert "planning for 500 workers" in done.stderr
    assert "planning for" not in done.stdout


def test_without_a_name_the_help_is_printed() -> None:
    done = bench()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "control" in done.stderr
    assert "examples:" in done.stderr


def test_help() -> None:
    done = bench("--help")
    assert done.returncode == 0
    for word in ("control", "how near the optimum", "--quick", "--json"):
        assert word in done.stdout
    done = bench("control", "--help")
    assert done.returncode == 0
    for word in ("--json PATH", "--quick", "--workers", "--seeds"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "invalid choice: 'speed'"),
        (["control", "--workers", "0"], "must be at least 1, got 0"),
        (["control", "--fast"], "--fast"),
    ],
)
def test_wrong_use(words: list[str], message: str) -> None:
    done = bench(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_sampler_holds_no_epoch() -> None:
    assert sampler_mb() < 80
