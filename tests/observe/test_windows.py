"""Steps in few lines: none lost, none counted twice, totals kept, no two plans in one window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnilearn.observe import EventLog, steps
from omnilearn.observe.windows import FIRST, LONGEST, SINGLE, Windows, flat, summary


def run(pace: float, count: int, *, chunk: int = 5, batch: Any = lambda step: 32) -> list[tuple[str, dict[str, Any]]]:
    """What is written of ``count`` steps, one each ``pace`` seconds."""
    windows, out = Windows(0.0), []
    for first in range(0, count, chunk):
        sizes = [batch(step) for step in range(first, first + chunk)]
        fields = {"step": first, "batch": sizes, "busy": [0.001 * (s % 7 + 1) for s in range(first, first + chunk)]}
        out += windows.add({**fields, "wait": [0.5] * chunk, "memory": first}, first * pace)
    return out + windows.rest(count * pace)


def covered(records: list[tuple[str, dict[str, Any]]]) -> list[int]:
    return [
        step for kind, r in records
        for step in range(r["step"], r["step"] + (len(r["batch"]) if kind == "steps" else r["steps"]))
    ]  # fmt: skip


@pytest.mark.parametrize(("pace", "count"), [(0.001, 50_000), (0.1, 20_000), (20.0, 2000)])
def test_every_step_once_and_few_lines(pace: float, count: int) -> None:
    records = run(pace, count)
    assert covered(records) == list(range(count))
    hours = pace * count / 3600
    assert len(records) <= FIRST / 5 + 500 * (1 + 3.5) + hours * 3600 / LONGEST
    singles = [r for kind, r in records if kind == "steps"]
    assert all(len(r["batch"]) <= SINGLE for r in singles)


def test_the_first_steps_and_a_slow_pace_are_kept_one_by_one() -> None:
    assert {kind for kind, _ in run(0.0001, FIRST)} == {"steps"}
    assert {kind for kind, _ in run(0.5, 1000)} == {"steps"}
    assert "window" in {kind for kind, _ in run(0.01, 2000)}


def test_totals_are_kept() -> None:
    whole = [0.001 * (step % 7 + 1) for step in range(5000)]
    total = 0.0
    for kind, record in run(0.01, 5000):
        rows = flat({"v": 1, "kind": kind, "t": 0.0, "rank": 0, **record})
        total += sum(row["measured"] * row["busy"] for row in rows)
    assert total == pytest.approx(sum(whole), rel=1e-4)


def test_a_window_mixes_no_two_plans_but_does_not_break_at_the_tail_of_an_epoch() -> None:
    records = run(0.01, 4000, batch=lambda step: 7 if step % 100 == 99 else 32 if step < 2000 else 48)
    windows = [record for kind, record in records if kind == "window"]
    assert {record["batch"][2] for record in windows} == {32, 48}
    assert all(set(record["batch"][1:4]) in ({32}, {48}) for record in windows)
    assert any(record["batch"][0] == 7 for record in windows)


def test_not_measured_steps_do_not_count() -> None:
    windows = Windows(0.0)
    for first in range(0, 400, 20):
        windows.add({"step": first, "batch": [4] * 20, "busy": [0.0, *[0.2] * 19], "wait": [0.0] * 20}, 0.0)
    ((kind, record),) = windows.rest(1.0)
    assert (kind, record["measured"] / record["steps"], record["busy"][0]) == ("window", 0.95, 0.2)


def test_summary_of_nothing_is_nothing() -> None:
    assert summary([None, float("nan")]) is None
    assert summary([5]) == [5, 5, 5, 5, 5, 5.0]


def test_flat_records_for_pandas(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 3)
    log.write("steps", step=0, batch=[8, 8], busy=[0.0, 0.5], wait=[0.0, 0.1], loss=[None, 2.5], memory=7)
    log.write("steps", step="odd", batch=[8], busy=[1, 2], wait=[])
    for first in range(2, 602, 20):
        log.write("steps", step=first, batch=[8] * 20, busy=[0.5] * 20, wait=[0.1] * 20, loss=[1.0] * 20, memory=9)
    log.write("end", ok=True)
    log.close()
    rows = steps(tmp_path)
    assert rows[0]["busy"] is None
    assert {k: rows[1][k] for k in ("worker", "step", "steps", "batch", "busy", "wait", "loss", "memory")} == {
        "worker": 3, "step": 1, "steps": 1, "batch": 8, "busy": 0.5, "wait": 0.1, "loss": 2.5, "memory": 7,
    }  # fmt: skip
    assert sum(row["steps"] for row in rows) == 602
    assert rows[-1]["busy_median"] == rows[-1]["busy"] == 0.5
    assert all(isinstance(value, (int, float, type(None))) for row in rows for value in row.values())


def test_what_cannot_be_merged_is_written_as_it_is(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    log.write("steps", step=0)
    log.write("steps", step=0, batch=[1], busy=[1, 2])
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert [line.get("busy") for line in lines] == [None, [1, 2]]


def test_other_events_come_after_the_steps_before_them(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    for first in range(0, 1000, 10):
        log.write("steps", step=first, batch=[1] * 10, busy=[0.1] * 10, wait=[0.1] * 10)
    log.write("plan", step=1000)
    log.close()
    *before, plan = [json.loads(line) for line in (tmp_path / "rank-0.jsonl").read_text().splitlines()]
    assert plan["kind"] == "plan"
    assert before[-1]["step"] + before[-1]["steps"] == 1000


def test_a_server_writes_for_its_workers_in_few_lines_too(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    for step in range(2000):
        for worker in range(3):
            log.write("steps", worker=worker, step=step, batch=[8], busy=[0.5], wait=[0.1], staleness=[worker])
    log.close()
    rows = steps(tmp_path)
    assert [sum(row["steps"] for row in rows if row["worker"] == k) for k in range(3)] == [2000] * 3
    assert len(rows) < 3 * (FIRST + 50)
    assert {row["worker"]: row["staleness"] for row in rows} == {0: 0, 1: 1, 2: 2}
