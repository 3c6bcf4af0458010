"""What the clock says of steps, and which it says nothing of."""

from __future__ import annotations

import torch

from omnilearn.pytorch.clock import Clock


def steps(clock: Clock, count: int) -> list[bool]:
    """Whether each of so many steps has a time."""
    weight = torch.ones(3, requires_grad=True)
    for _ in range(count):
        loss = weight.sum()
        clock.watch(loss)
        loss.backward()
        clock.reduced()
    return [clock.take() is not None for _ in range(count)]


def test_the_first_step_after_a_start_says_nothing() -> None:
    clock = Clock(torch.device("cpu"))
    assert steps(clock, 3) == [False, True, True]
    clock.restart()
    assert steps(clock, 3) == [False, True, True]


def test_more_steps_may_say_nothing() -> None:
    """Also where the clock is started once more for another reason."""
    clock = Clock(torch.device("cpu"))
    steps(clock, 1)
    clock.restart(untimed=2)
    clock.restart()
    assert steps(clock, 4) == [False, False, True, True]
