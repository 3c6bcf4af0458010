"""The live view, drawn from recorded events: who computes, who waits, who is parked, how far it is, and why."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from omnilearn.observe import EventLog, words
from omnilearn.observe.board import Board
from omnilearn.observe.live import LiveView

CORES = (0.225, 0.225, 0.15, 1.2)


def record(folder: Path, *, batches: tuple[int, ...] = (32,) * 4, reason: str = "uniform", ended: bool = True) -> None:
    logs = [EventLog(folder, rank) for rank in range(4)]
    workers = [{"host": "h", "cores": c, "device": "cpu", "device_name": "some CPU"} for c in CORES]
    parked = [k for k, b in enumerate(batches) if not b]
    logs[0].write("run", mode="sync", options={"global_batch": 128}, workers=workers)
    logs[0].write("plan", step=0, batches=batches, parked=parked, reason=reason, predicted=0.1, instead_of=0.2)
    logs[0].write("epoch", epoch=2, step=22, steps=11)
    for rank, log in enumerate(logs):
        busy = 0.8 if rank == 2 else 0.2
        log.write(
            "steps", step=22, batch=[batches[rank]] * 2, busy=[0.0, busy], wait=[0.0, 0.8 - busy]
        )  # the first of an epoch is not measured
    logs[0].write("metric", epoch=2, seconds=7.25, accuracy=0.912, reached=False)
    for log in logs:
        if ended:
            log.write("end", ok=True)
        log.close()


def shown(folder: Path, width: int = 100, terminal: bool = True, **options: Any) -> str:
    console = Console(width=width, record=True, force_terminal=terminal, file=io.StringIO(), legacy_windows=False)
    view = LiveView(folder, "a run", console=console, **options)
    view._read()
    console.print(view.render())
    return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_one_line_per_worker(tmp_path: Path, width: int) -> None:
    record(tmp_path)
    text = shown(tmp_path, width, epochs=12, target=0.97)
    lines = text.splitlines()
    rows = [line for line in lines if " cores " in line]
    assert len(rows) == 4
    assert [row.split()[:4] for row in rows] == [[str(k), f"{c:g}", "cores", "32"] for k, c in enumerate(CORES)]
    assert all(row.split()[-1] == "40" for row in rows)  # 32 samples in 0.8 s
    bars = [(row.count("█"), row.count("░")) for row in rows]
    assert bars[2][1] == 0
    assert bars[3][1] == pytest.approx(3 * bars[3][0], abs=2)
    assert max(map(len, lines)) <= width
    assert "epoch 3 of at most 12 · step 24 · 160 samples/s · accuracy 0.912 of 0.97" in text
    assert "plan: equal batches for all" in text


def test_parked_workers_are_called_so(tmp_path: Path) -> None:
    record(tmp_path, batches=(0, 0, 0, 128), reason="park: try")
    text = shown(tmp_path, 80)
    rows = [line for line in text.splitlines() if " cores " in line]
    assert [row.split()[-1] for row in rows] == ["parked", "parked", "parked", "160"]
    assert "trying without workers 0, 1 and 2 (a step: 200 → 100 ms expected)" in text


def test_before_the_first_event(tmp_path: Path) -> None:
    assert "starting the workers … 0 s" in shown(tmp_path)
    assert "starting the workers" in shown(tmp_path / "missing")


def test_the_target_is_said_when_reached(tmp_path: Path) -> None:
    record(tmp_path)
    log = EventLog(tmp_path, 0)
    log.write("metric", epoch=3, seconds=9.31, accuracy=0.975, reached=True)
    log.close()
    assert "accuracy 0.975, reached in 9.3 s" in shown(tmp_path, 80, target=0.97)


def test_a_failure_is_shown_instead_of_the_plan(tmp_path: Path) -> None:
    record(tmp_path, ended=False)
    log = EventLog(tmp_path, 2)
    log.write("end", ok=False, error="ValueError: no [bold]such[/] thing")
    log.close()
    assert "failed: rank 2: ValueError: no [bold]such[/] thing" in shown(tmp_path)


def test_plain_lines_without_a_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    record(tmp_path, batches=(13, 11, 0, 104), reason="rebalance")
    with LiveView(tmp_path, "a run", console=Console(file=out, width=80)) as view:
        view.follow(iter([True, False]).__next__)
    first, last = out.getvalue().splitlines()
    assert first == "a run: starting the workers"
    assert "batches 13 11 – 104, waiting 75% 75% – 75%" in last
    assert "\x1b" not in out.getvalue()


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    record(tmp_path)
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80, force_terminal=True, legacy_windows=False)
    view = LiveView(tmp_path, "a run", console=console)
    view._read()
    table = Console(width=80, record=True, file=io.StringIO())
    table.print(view._table())
    text = table.export_text()
    assert "########......" in text
    assert "█" not in text


def test_odd_events_do_not_end_the_view() -> None:
    board = Board()
    base = {"v": 1, "t": 1.0, "rank": 0}
    odd = ({}, {"workers": 3}, {"batches": None}, {"step": "x", "batch": 1}, {"batch": [1], "busy": [1, 2]})
    for kind in ("run", "plan", "steps", "epoch", "end", "metric", "at_least", "feed", "new"):
        board.feed([{**base, "kind": kind, **fields} for fields in odd])
    board.feed([{**base, "kind": "plan", "batches": [4, 0], "parked": [1], "reason": "x"}])
    assert [(w.batch, w.parked) for w in board.workers[:2]] == [(4, False), (0, True)]


def test_a_restart_in_the_same_folder_begins_anew(tmp_path: Path) -> None:
    record(tmp_path)
    record(tmp_path, batches=(64, 64, 0, 0))
    text = shown(tmp_path)
    assert text.count(" cores ") == 4
    assert text.count("parked") == 2


def test_reasons_of_the_policies_are_put_into_words() -> None:
    """Every reason a policy gives today has its words; a new one is shown as it is."""
    import re

    import omnilearn.control

    folder = Path(omnilearn.control.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    given = set(re.findall(r'as_plan\([^"\n\[]*"([^"]+)"', source)) | {"park: kept", "unpark: try", "exchange: try"}
    assert len(given) > 5
    assert given <= set(words.REASONS)
    assert words.reason({"reason": "as {you} like"}) == "as {you} like"
