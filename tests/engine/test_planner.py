"""What a worker tells the others of its steps, and what it keeps to itself."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnilearn.cluster.resources import Resources
from omnilearn.control import Plan, Problem, Report, State, Uniform
from omnilearn.data import Sampler
from omnilearn.engine.peers import Peers
from omnilearn.engine.planner import Planner, Sizes, Timing
from omnilearn.engine.pulse import Beat, Pulse
from omnilearn.errors import UsageError
from omnilearn.observe import EventLog

CORE = Resources(host="here", cores=1.0, device="cpu", device_name="", device_id="", memory=2**30)


class Wire:
    """What two peers in this very process have said to each other."""

    def __init__(self) -> None:
        self.rows: tuple[list[np.ndarray], ...] = ([], [])
        self.answers: list[bytes] = []
        self.read = [0, 0]


class Talk:
    def __init__(self, wire: Wire, number: int) -> None:
        self._wire, self._number = wire, number

    def rows(self, awaited: Collection[int]) -> np.ndarray:
        """As the real ones: of a rank that is late, an earlier row that came since, and nothing at its end."""
        length = max(len(rows[self._number]) for rows in self._wire.rows if len(rows) > self._number)
        table = np.full((2, length), np.nan)
        for rank, rows in enumerate(self._wire.rows):
            if rank in awaited or len(rows) > self._number:
                table[rank] = rows[self._number]
            elif len(rows) > self._wire.read[rank]:
                table[rank, : len(rows[-1])] = rows[-1]
                table[rank, -1] = np.nan
            self._wire.read[rank] = len(rows)
        return table

    def answer(self, data: bytes) -> None:
        self._wire.answers.append(data)

    def heard(self) -> bytes:
        return self._wire.answers[self._number]


class Twin(Peers):
    """One of two peers, of which rank 0 thinks. Waiting for what was not said yet is an error."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.size, self.resources, self._wire = rank, 2, (CORE, CORE), wire

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def exchange(self, row: np.ndarray, thinker: int) -> Talk:
        assert thinker == 0
        self._wire.rows[self.rank].append(row)
        return Talk(self._wire, len(self._wire.rows[self.rank]) - 1)

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
    wire = Wire()
    problem, policy, clocks = Problem.of(16, workers=2), Listening(), (Times(), Times())
    planners = [
        Planner(Twin(rank, wire), clocks[rank], policy, problem, lambda plan, step: None, EventLog(tmp_path, rank))
        for rank in (0, 1)
    ]
    samplers = [Sampler(1600, [8, 8]) for _ in planners]

    def step(
        sizes: tuple[int, int], seconds: tuple[float | None, float | None], thinking: tuple[int, ...] = ()
    ) -> None:
        for planner, sampler in zip(planners, samplers, strict=True):
            planner.tick(sampler, 1, parked=())
        for rank in thinking:
            planners[rank].think()
        for rank in (0, 1):
            took = seconds[rank]
            clocks[rank].steps.append(None if took is None else Timing(took, 0.1))
            planners[rank].record(sizes, True)
            position = samplers[rank].state_dict()
            samplers[rank].load_state_dict(position | {"step": position["step"] + 1})

    yield step, policy, planners, wire
    for planner in planners:
        planner.drain()


def test_the_first_step_with_a_batch_is_not_reported(pair) -> None:
    step, policy, *_ = pair
    step((8, 8), (None, None))  # a clock does not know when the first step began
    step((8, 8), (0.5, 0.6))
    step((9, 7), (0.9, 0.9))  # new to both
    for _ in range(2):
        step((8, 8), (0.5, 0.6))
    step((8, 7), (0.5, 0.4))  # only the pair is new
    step((10, 6), (0.9, 0.9))
    step((8, 8), (0.5, 0.6))
    first, second = policy.reports
    assert first.batches.tolist() == [[8, 8], [8, 8], [9, 7]]
    assert first.measured.tolist() == [[False, False], [True, True], [False, False]]
    assert first.busy[1].tolist() == [0.5, 0.6]
    assert second.batches.tolist() == [[8, 8], [8, 8], [8, 7]]
    assert second.measured.all()


class Changing(Twin):
    """A peer whose own speed is what it is told."""

    now = 1.0

    def speed(self) -> float:
        return self.now


def test_a_parked_worker_keeps_its_pulse_at_the_end_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done together with the others in between is no reason to forget how fast it was."""
    monkeypatch.setattr("omnilearn.engine.pulse.EVERY", 0.0)
    monkeypatch.setattr("omnilearn.engine.pulse.AGAIN", 0.0)
    wire = Wire()
    worlds, policy, problem = (Twin(0, wire), Changing(1, wire)), Listening(), Problem.of(16, workers=2)
    planners = [Planner(world, Times(), policy, problem, lambda plan, step: None) for world in worlds]
    samplers = [Sampler(1600, [16, 0]) for _ in planners]

    def step() -> None:
        for rank, planner in enumerate(planners):
            planner.tick(samplers[rank], 1, parked=(1,))
        for rank, planner in enumerate(planners):
            planner.record((16, 0), rank == 0)
            position = samplers[rank].state_dict()
            samplers[rank].load_state_dict(position | {"step": position["step"] + 1})
        if planners[1]._pulse._thread is not None:
            planners[1]._pulse._thread.join(10)

    for _ in range(8):
        step()
    worlds[1].now = 3.0
    for _ in range(12):
        step()
    assert policy.reports[-1].pulse.tolist() == [1.0, 3.0]
    for rank, planner in enumerate(planners):  # both begin, then both finish: in one process one waits for the other
        if planner._exchange is None:
            planner._begin(samplers[rank].step, parked=(1,), look=False)
    for rank, planner in enumerate(planners):
        planner.confirm(samplers[rank], 1, parked=(1,))
    assert policy.reports[-1].pulse.tolist() == [1.0, 3.0]
    for _ in range(4):
        step()
    assert policy.reports[-1].pulse.tolist() == [1.0, 3.0]
    for planner in planners:
        planner.drain()


def test_nobody_waits_for_the_parked_and_they_follow() -> None:
    wire, policy, problem = Wire(), Listening(), Problem.of(16, workers=2)
    plans = [Plan((16, 0), reason=str(number)) for number in range(9)]
    policy.update = lambda problem, state, report: (  # type: ignore[method-assign]
        policy.reports.append(report) or State(plans[len(policy.reports)], interval=3)
    )
    planners = [Planner(Twin(rank, wire), Times(), policy, problem, lambda plan, step: None) for rank in (0, 1)]
    samplers = [Sampler(1600, [16, 0]) for _ in planners]
    heard: list[list[str]] = [[], []]

    def steps(rank: int, count: int, sizes: tuple[int, int] = (16, 0)) -> None:
        for _ in range(count):
            planners[rank].tick(samplers[rank], 1, parked=(1,))
            planners[rank].record(sizes, sizes[rank] > 0)
            heard[rank].append(planners[rank].plan.reason)
            position = samplers[rank].state_dict()
            samplers[rank].load_state_dict(position | {"step": position["step"] + 1})

    wire.rows[1].append(np.array([-1.0, -1.0, 1.5, 12.0, 5.0, 0.1, 0.0]))  # with the first exchange, in step 0
    steps(0, 8)
    wire.rows[1].append(np.array([-1.0, -1.0, 2.5, 10.0, 4.0, 0.2, 0.0]))  # with the second, but late
    steps(0, 6)
    wire.rows[1].clear()
    assert len(policy.reports) == 4
    assert [report.pulse.tolist() for report in policy.reports] == [[1.0, 1.5]] * 2 + [[1.0, 2.5]] * 2, "as last heard"
    answers = [pickle.loads(told) for told in wire.answers if told]
    assert [answer.failed for answer in answers] == [(0, 5), *[(0, 0)] * 4], "said only once"
    assert [answer.micro for answer in answers] == [(0, 12)] * 3 + [(0, 10)] * 2
    steps(1, 14)
    assert heard[1] == heard[0]

    planners[0].record((8, 8), True)  # it took part in one of the steps that the next exchange tells of
    with pytest.raises(IndexError):
        steps(0, 4)
    for planner in planners:
        planner._exchange = None
        planner.drain()


@pytest.mark.parametrize(
    ("speeds", "ratio"),
    [
        ([1.0, 1.5, 1.0, 1.5, 0.7, 1.5, 1.0], 1.0),  # never twice in a row the same way
        ([1.2, 1.0, 0.9, 1.1, 0.9, 1.4, 1.6], 1.5),  # by what it usually was, not by the first look
        ([1.0, 1.0, 2.0, 2.0, 2.1, 1.0, 1.0], 1.0),  # and back
        ([1.0, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4], 1.0),
    ],
)
def test_a_pulse_is_what_two_looks_agree_on(speeds: list[float], ratio: float) -> None:
    beat = Beat()
    for speed in speeds:
        beat.compare(speed)
    assert beat.ratio == pytest.approx(ratio, rel=0.03)


def test_a_suspicious_look_is_soon_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks, speed = [0.0], [], [1.0]
    monkeypatch.setattr("omnilearn.engine.pulse.time.monotonic", lambda: now[0])
    pulse = Pulse(lambda: looks.append(now[0]) or speed[0])
    for tenth in range(100):
        now[0] = tenth / 10
        speed[0] = 1.0 if now[0] < 5 else 2.0
        pulse.look()
        if pulse._thread is not None:
            pulse._thread.join(10)
    assert looks == pytest.approx([1.5, 1.5, 1.5, 3.0, 4.5, 6.0, 6.5, 8.0, 9.5], abs=0.11)
    assert pulse.ratio == 2.0


def test_time_between_two_loops_brings_no_look_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], []
    monkeypatch.setattr("omnilearn.engine.pulse.time.monotonic", lambda: now[0])
    pulse = Pulse(lambda: looks.append(now[0]) or 1.0)
    for _ in range(10):  # loops of half a second, and ten seconds between them
        pulse.resume()
        for _ in range(5):
            now[0] += 0.1
            pulse.look()
            if pulse._thread is not None:
                pulse._thread.join(10)
        pulse.pause()
        now[0] += 10
    assert len(set(looks)) == 3  # 5 seconds of loops


def test_after_a_restore_nothing_of_before_is_waited_for(pair) -> None:
    step, _, planners, _ = pair
    while any(planner._exchange is None for planner in planners):
        step((8, 8), (0.5, 0.5))
    for planner in planners:
        planner.restore(planner.state, 0)
        assert planner._exchange is None


def test_one_thinks_for_all_and_all_end_an_exchange_at_the_same_step(pair) -> None:
    step, policy, planners, wire = pair
    for _ in range(3):
        step((8, 8), (0.5, 0.6))
    assert not policy.reports
    step((8, 8), (0.5, 0.6), thinking=(0, 1))  # an exchange begins; rank 1 has nothing to think about
    assert (len(policy.reports), len(wire.answers)) == (1, 2)  # in the first one there was nothing to report
    assert all(planner._exchange is not None for planner in planners)  # so all would end it in ``confirm``
    planners[0].think()  # a backward pass done again, after it ran out of memory
    assert (len(policy.reports), len(wire.answers)) == (1, 2)
    step((8, 8), (0.5, 0.6))
    assert len(policy.reports) == 1
    assert all(planner._exchange is None for planner in planners)


def test_what_was_thought_is_not_known_before_it_is_on_all_ranks(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that begins in between starts with the same batches everywhere."""
    step, policy, planners, _ = pair
    monkeypatch.setattr(policy, "update", lambda problem, state, report: State(Plan((9, 7)), interval=3))
    for _ in range(3):
        step((8, 8), (0.5, 0.6))
    step((8, 8), (0.5, 0.6), thinking=(0,))
    assert planners[0]._exchange.answer.state.plan.batches == (9, 7)
    assert [planner.plan.batches for planner in planners] == [(8, 8), (8, 8)]
    step((8, 8), (0.5, 0.6))
    assert [planner.plan.batches for planner in planners] == [(9, 7), (9, 7)]


def test_an_answer_that_is_the_last_one_again_is_not_said_again(pair) -> None:
    step, _, planners, wire = pair
    for _ in range(12):
        step((8, 8), (0.5, 0.6))
    assert [bool(answer) for answer in wire.answers] == [True, False, False, False]
    for planner in planners:  # what was said before is forgotten
        planner.restore(State(Plan((10, 6)), interval=3), 12)
    for _ in range(5):
        step((8, 8), (0.5, 0.6))
    assert wire.answers[-1]
    assert [planner.plan.batches for planner in planners] == [(10, 6), (10, 6)]


def test_the_fastest_that_takes_part_thinks() -> None:
    problem = Problem.of(16, speeds=[1.0, 4.0, 4.0])
    planner = Planner(Twin(0, Wire()), Times(), Listening(), problem, lambda plan, step: None)
    assert planner.thinker(()) == 1
    assert planner.thinker((1,)) == 2
    assert planner.thinker((1, 2)) == 0, "who is parked may be late"


class Local(Listening):
    def start(self, problem: Problem) -> State:
        class Own(State):
            pass

        return Own(super().start(problem).plan)


def test_a_state_that_cannot_be_sent_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match=r"cannot be sent to the other workers .*Own must be made of"):
        Planner(Twin(0, Wire()), Times(), Local(), Problem.of(16, workers=2), lambda plan, step: None)


def test_sizes_are_remembered() -> None:
    sizes = Sizes()
    assert [sizes.tells(batch) for batch in (4, 4, 5, 4, 5)] == [False, True, False, True, True]


def test_the_first_steps_with_a_much_larger_batch_do_not_tell() -> None:
    sizes = Sizes(growing=3)
    told = [(batch, sizes.tells(batch)) for batch in (4, 4, 7, 7, 16, 16, 4, 16, 16, 8, 8)]
    assert [batch for batch, tells in told if tells] == [4, 7, 4, 16, 8]
