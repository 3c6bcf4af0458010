"""What a worker tells the others of its steps, and what it keeps to itself."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnilearn.cluster.resources import Resources
from omnilearn.control import Problem, Report, State, Uniform
from omnilearn.data import Sampler
from omnilearn.engine.peers import Answers, Peers
from omnilearn.engine.planner import Planner, Sizes, Timing
from omnilearn.observe import EventLog

CORE = Resources(host="here", cores=1.0, device="cpu", device_name="", device_id="", memory=2**30)


class Twin(Peers):
    """One of two peers in this very process: an exchange is over when both have begun it."""

    def __init__(self, rank: int, rows: list[list[np.ndarray]]) -> None:
        self.rank, self.size, self.resources, self._rows = rank, 2, (CORE, CORE), rows

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def exchange(self, row: np.ndarray) -> Answers:
        self._rows[self.rank].append(row)
        number = len(self._rows[self.rank]) - 1
        return lambda: np.stack([rows[number] for rows in self._rows])

    def speed(self) -> float:
        return 1.0


class Times:
    """A clock that says what it was told."""

    def __init__(self) -> None:
        self.steps: deque[Timing | None] = deque()

    def take(self) -> Timing | None:
        return self.steps.popleft() if self.steps else None

    def clear(self) -> None:
        self.steps.clear()


class Listening(Uniform):
    """Keeps every report it gets."""

    def __init__(self) -> None:
        self.reports: list[Report] = []

    def start(self, problem: Problem) -> State:
        return State(super().start(problem).plan, interval=3)

    def update(self, problem: Problem, state: State, report: Report) -> State:
        self.reports.append(report)
        return state


@pytest.fixture
def pair(tmp_path: Path):
    rows: list[list[np.ndarray]] = [[], []]
    problem, policy, clocks = Problem.of(16, workers=2), Listening(), (Times(), Times())
    planners = [
        Planner(Twin(rank, rows), clocks[rank], policy, problem, lambda plan, step: None, EventLog(tmp_path, rank))
        for rank in (0, 1)
    ]
    samplers = [Sampler(1600, [8, 8]) for _ in planners]

    def step(sizes: tuple[int, int], seconds: tuple[float | None, float | None]) -> None:
        for planner, sampler in zip(planners, samplers, strict=True):
            planner.tick(sampler, 1, idle=False)
        for rank in (0, 1):
            took = seconds[rank]
            clocks[rank].steps.append(None if took is None else Timing(took, 0.1))
            planners[rank].record(sizes, True)
            position = samplers[rank].state_dict()
            samplers[rank].load_state_dict(position | {"step": position["step"] + 1})

    yield step, policy
    for planner in planners:
        planner.drain()


def test_the_first_step_with_a_batch_is_not_reported(pair) -> None:
    step, policy = pair
    step((8, 8), (None, None))  # a clock does not know when the first step began
    step((8, 8), (0.5, 0.6))
    step((9, 7), (0.9, 0.9))  # new to both
    for _ in range(2):
        step((8, 8), (0.5, 0.6))
    step((8, 7), (0.5, 0.4))  # only the pair is new
    step((10, 6), (0.9, 0.9))
    step((8, 8), (0.5, 0.6))
    first, second = policy.reports[0], policy.reports[2]
    assert first.batches.tolist() == [[8, 8], [8, 8], [9, 7]]
    assert first.measured.tolist() == [[False, False], [True, True], [False, False]]
    assert first.busy[1].tolist() == [0.5, 0.6]
    assert second.batches.tolist() == [[8, 8], [8, 8], [8, 7]]
    assert second.measured.all()


def test_sizes_are_remembered() -> None:
    sizes = Sizes()
    assert [sizes.had(batch) for batch in (4, 4, 5, 4, 5)] == [False, True, False, True, True]
