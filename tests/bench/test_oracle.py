"""The pieces of the contests that need no processes: lines, neighbours, sets, traces, steps until near."""

from __future__ import annotations

import doctest

import numpy as np
import pytest

from omnilearn.bench import dynamic, memory, oracle, sync
from omnilearn.bench.contestants import Block
from omnilearn.bench.gang import Trace, joined
from omnilearn.bench.oracle import Curve, Search, fit, neighbours, over
from omnilearn.bench.sections import SECTIONS
from omnilearn.bench.sync import imbalance, steps_to, waiting, worst


@pytest.mark.parametrize("module", [oracle, sync, dynamic])
def test_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_a_line_never_falls_and_is_never_negative() -> None:
    assert fit([(8, 1.0), (8, 3.0), (8, 2.0)]) == (0.0, 0.25)
    alpha, beta = fit([(10, 1.0), (20, 2.2)])  # steeper than proportional
    assert alpha == 0
    assert beta == pytest.approx(0.105)
    alpha, beta = fit([(10, 2.0), (20, 1.0)])  # falling
    assert alpha > 0
    assert beta > 0


def curve() -> Curve:
    return Curve(np.array([0.1, 0.1, 0.2]), np.array([0.01, 0.02, 0.04]), np.zeros(4), [])


def test_splits_over_sets_of_workers() -> None:
    split = over(curve(), 60, 1, (0, 2))
    assert split is not None
    assert split[1] == 0
    assert sum(split) == 60
    assert abs((0.1 + 0.01 * split[0]) - (0.2 + 0.04 * split[2])) < 0.05
    assert over(curve(), 5, 3, (0, 1)) is None
    assert len(list(oracle._sets(4, [0, 1, 2, 3]))) == 15
    assert list(oracle._sets(10, list(range(10))))[2] == (0, 1, 2)


def test_neighbours_are_splits_too() -> None:
    near = list(neighbours((40, 0, 10, 50), 1))
    assert len(near) == len(set(near)) == 6
    assert (40, 0, 10, 50) not in near
    for split in near:
        assert sum(split) == 100
        assert split[1] == 0
        assert min(split[0], split[2], split[3]) >= 1
    assert list(neighbours((0, 0, 0, 64), 1)) == []
    assert all(min(split[0], split[1]) >= 2 for split in neighbours((2, 6), 2))


def test_the_best_of_what_was_tried() -> None:
    found = Search(curve(), {(60, 0, 0): [3.0, 3.2], (40, 20, 0): [2.0, 2.1, 9.0], (30, 20, 10): [2.5]})
    assert found.best() == (40, 20, 0)
    assert found.best(lambda workers: workers == 1) == (60, 0, 0)
    assert found.best(lambda workers: workers > 3) is None
    assert found.fastest(2) == [(40, 20, 0), (30, 20, 10)]


def test_a_step_lasts_until_its_last_worker() -> None:
    a = Block(begin=10.0, ends={0: 11.0, 1: 12.0, 2: 13.0}, samples={0: 3, 1: 3, 2: 8}, busy={1: 0.5}, wait={1: 0.5})
    # The second worker is slow to end its last step before it is parked.
    b = Block(begin=10.5, ends={0: 11.5, 1: 13.2}, samples={0: 5, 1: 5}, busy={1: 1.0}, wait={1: 0.0})
    idle = Block(begin=99.0, end=99.0)
    a.end = b.end = 13.5
    trace = Trace.of([a, b, idle])
    assert trace.seconds.tolist() == pytest.approx([1.0, 1.7, 0.0])
    assert trace.batches == [(3, 5, 0), (3, 5, 0), (8, 0, 0)]
    assert trace.total == pytest.approx(3.0)
    assert imbalance(trace) == pytest.approx(1 / 0.75)
    assert waiting(trace) == pytest.approx(0.25)
    assert trace.after(1).first == 1
    assert joined([trace, trace.after(2)]).batches[-1] == (8, 0, 0)
    assert imbalance(trace.after(2)) is None


def test_steps_to() -> None:
    for stay in (False, True):
        assert steps_to([1, 1, 1], 1.0, stay=stay) == 0
        assert steps_to([5, 5, 5, 1, 1, 1], 1.0, stay=stay) == 3
        assert steps_to([5, 1, 1, 5, 1, 1, 1], 1.0, stay=stay) == 1  # one slow step is nothing
        assert steps_to([5, 5, 5, 5], 1.0, stay=stay) is None
        assert steps_to([1, 1], 1.0, stay=stay) is None
    assert steps_to([5, 5, 1, 1, 5, 5, 1, 1, 1], 1.0) == 2
    assert steps_to([5, 5, 1, 1, 5, 5, 1, 1, 1], 1.0, stay=True) == 6
    assert steps_to([1, 1, 1, 5, 5, 5], 1.0, stay=True) is None


def test_a_level_is_as_good_as_its_worst_workload() -> None:
    def outcome(speedup: float, fraction: float, steps: float | None) -> dict[str, float | None]:
        return {
            "speedup_vs_uniform": speedup,
            "fraction_of_oracle": fraction,
            "vs_best_subset": 1.0,
            "steps_to_90": steps,
        }

    level = worst({"a": outcome(3, 0.9, 4), "b": outcome(2, 0.95, 8)})
    assert (level["speedup_vs_uniform"], level["fraction_of_oracle"], level["steps_to_90"]) == (2, 0.9, 8)
    assert set(level["workloads"]) == {"a", "b"}
    assert worst({"a": outcome(3, 0.9, None), "b": outcome(2, 0.95, 8)})["steps_to_90"] is None


def test_what_micro_batches_gain_over_capping() -> None:
    def run(step: float, mine: int) -> Trace:
        shares = (64 - mine, mine)
        return Trace(0, np.full(4, step), [shares] * 4, np.full((4, 2), np.nan), np.full((4, 2), np.nan), 4 * step)

    traces = {
        memory.ENOUGH: [run(0.4, 32), run(0.8, 32)],
        memory.CAPPED: [run(0.6, 11), run(1.2, 11)],
        memory.MICRO: [run(0.5, 30), run(1.0, 33)],
    }
    outcome, rows = memory.judge("gpt2", 64, traces, {"need_mb": 10.0, "room_mb": 3.5, "fits": 12})
    assert outcome["gain_over_capping"] == pytest.approx(1.2)
    assert outcome["of_enough_memory"] == pytest.approx(0.8)
    assert outcome["shares"] == {"enough memory": "32/32", "capped": "53/11", "micro-batches": "31/33"}
    assert [row["contestant"] for row in rows] == ["enough memory", "capped", "micro-batches"]
    summary = {"emulate": "1,1", "worker": 1, "workloads": {"gpt2": outcome}}
    assert "| gpt2 | 10 | 3.5 | 12 | 1.2 |" in "\n".join(SECTIONS["memory"][1]({"summary": summary, "rows": rows}))


def test_the_luckiest_of_a_search_is_not_the_oracle() -> None:
    """Three splits timed in turns; the first one has a lucky turn, the second one is typically the fastest."""
    turns = {(8, 8): iter([1.0, 5.0, 5.0, 5.0]), (9, 7): iter([2.0, 2.0, 9.0, 2.0]), (7, 9): iter([3.0] * 4)}
    made: list[tuple[int, ...]] = []

    class Timed:
        def block(self, name: str, steps: int, split: tuple[int, ...]) -> Trace:
            made.append(split)
            seconds = np.array([50.0, 50.0, *[next(turns[split])] * (steps - 2)])  # cold at first
            return Trace(0, seconds, [split] * steps, np.ones((steps, 2)), np.ones((steps, 2)), 1.0)

    assert dynamic._best(Timed(), list(turns), 10) == (9, 7)  # type: ignore[arg-type]
    assert {made.count(split) for split in turns} == {dynamic.FINALS}
    assert made[:3] == made[3:6][::-1], "back and forth"


def test_the_fastest_over_all_workers_is_among_the_finalists() -> None:
    found = Search(curve())
    for k in range(8):
        found.tried[k + 20, 40 - k, 0] = [1.0 + k]
    assert len(dynamic._finalists(found, 3)) == dynamic.FINALISTS  # nothing was tried with all
    found.tried[20, 20, 20], found.tried[30, 20, 10] = [10.0], [9.0]
    assert dynamic._finalists(found, 3) == [*found.fastest(dynamic.FINALISTS), (30, 20, 10)]
    found.tried[30, 20, 10] = [0.5]
    assert dynamic._finalists(found, 3) == found.fastest(dynamic.FINALISTS)
