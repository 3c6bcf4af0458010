"""A benchmark's page: written by the command, with a bar for each row and all of its numbers, as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.observe.test_report import parsed

from omnilearn import cli
from omnilearn.bench.page import page
from omnilearn.bench.record import Record


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the cheapest benchmark: what events cost."""
    path = tmp_path / "out" / "events.html"
    assert cli.main(["bench", "events", "--quick", "--blocks", "2", "--report", str(path)]) == 0
    tags = parsed(path.read_text())
    assert "omnilearn bench events" in tags.text
    assert "first steps, written as they come" in tags.text
    assert "written: " in capsys.readouterr().err


def test_bars_in_groups_with_their_spread() -> None:
    rows = [
        {"level": level, "contestant": name, "step_ms": ms, "lower": ms - 1, "upper": ms + 2, "batches": "4/4"}
        for level in ("HL1", "HL8")
        for name, ms in (("ddp", 40.0), ("<b>optimal", 10.0))
    ]
    other = [{"measured": "a", "value": None}]
    text = page(Record("sync", [*rows, *other], {"speed_up": 4.0, "deep": {"er": 1}}))
    tags = parsed(text)
    assert re.findall(r"<h3>(HL\d)</h3>", text) == ["HL1", "HL8"]
    bars = [float(attrs["width"] or 0) for tag, attrs in tags.seen if tag == "rect" and attrs["class"] == "compute"]
    assert len(bars) == 2 * 2 * 2  # levels, contestants, widths of the screen
    assert bars[0] == pytest.approx(4 * bars[1], rel=0.01)
    assert sum(attrs.get("class") == "ink" for _, attrs in tags.seen) == 8
    assert "<b>optimal" in tags.text
    assert "speed up" in tags.text
