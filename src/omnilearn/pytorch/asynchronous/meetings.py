"""What workers do together between epochs: each brings something, and all get what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from omnilearn.errors import OmniLearnError
from omnilearn.pytorch.asynchronous.members import Member

KEPT = 16
"""Outcomes that are kept for those who come late."""


@dataclass
class Meeting:
    brought: dict[int, Any] = field(default_factory=dict)
    outcome: Any = None
    over: bool = False


class Meetings:
    """The n-th meeting after an epoch is the same one for all workers. Called with the server's lock held."""

    def __init__(self) -> None:
        self._all: dict[tuple[int, int], Meeting] = {}

    def attend(
        self,
        m: Member,
        brought: Any,
        act: Callable[[dict[int, Any]], Any],
        members: Callable[[], Iterable[Member]],
        wait: Callable[[str], None],
    ) -> Any:
        """What ``act`` makes of what everybody brings. ``wait`` lets the others come, and says whom it waits for."""
        key = (m.epoch, m.meetings)
        m.meetings += 1
        meeting = self._all.setdefault(key, Meeting())
        if not meeting.over:
            meeting.brought[m.rank] = brought
        while not meeting.over:
            absent = [o for o in members() if o.rank not in meeting.brought and _will_come(o, key)]
            if absent:
                wait(f"rank {', '.join(str(o.rank) for o in absent)} to do the same")
                continue
            try:
                meeting.outcome = act(meeting.brought)
            except OmniLearnError as error:
                meeting.outcome = error
            meeting.over = True
            for old in sorted(self._all)[:-KEPT]:
                del self._all[old]
        if isinstance(meeting.outcome, OmniLearnError):
            raise meeting.outcome
        return meeting.outcome


def _will_come(m: Member, key: tuple[int, int]) -> bool:
    """Whether a worker is still on its way there. Not who joined late and has begun nothing, nor who is lost."""
    return not m.lost and not m.late and (m.epoch, m.meetings) <= key
