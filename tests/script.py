"""A policy whose plans are written down: what tests need to make batches change when they want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omnilearn.control import Plan, Problem, Report, State


class Script:
    """A policy that follows a fixed list of plans, one per report, whatever is measured."""

    def __init__(self, plans: Sequence[Sequence[int]], interval: int = 1) -> None:
        self.plans, self.interval = [tuple(plan) for plan in plans], interval

    def __repr__(self) -> str:
        return f"Script({self.plans})"

    def start(self, problem: Problem) -> State:
        return self._at(0)

    def update(self, problem: Problem, state: State, report: Report) -> State:
        return self._at(min(int(state.plan.reason) + 1, len(self.plans) - 1))

    def restore(self, problem: Problem, saved: dict[str, Any]) -> State:
        return self._at(int(saved["reason"]))

    def _at(self, number: int) -> State:
        return State(Plan(self.plans[number], reason=str(number)), interval=self.interval)
