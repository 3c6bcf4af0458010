"""Keeps the events of steps few: each step by itself at first and at a slow pace, summaries of many beyond that.

A record of steps is due at once while there are few, then at most once per ``interval``, which grows with the run: a
file has some thousand lines however fast the steps are. What comes in between is merged. Pure but for the time it is
told; ``events`` writes what it hands back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Fields = dict[str, Any]

FIRST = 256
"""So many first steps are written as they come: that is where plans change."""
SHORTEST, LONGEST = 1.0, 30.0
"""Seconds between two records of steps: at the beginning, and after some hours."""
GROWTH = 500
"""The interval is this fraction of the time so far."""
MOST = 20_000
"""Steps that wait to be written."""
SINGLE = 8
"""A record of no more steps than this has each of them; a larger one is a window."""
TIMES = ("busy", "wait", "data")
"""Fields that are 0 where a step was not measured."""
SUMMARY = ("min", "lower", "median", "upper", "max", "mean")
"""What a window has in place of one value per step: five quartiles and the mean."""


def summary(values: Sequence[Any]) -> list[float] | None:
    """
    >>> summary([4, 1, 2, 3, 10])
    [1, 2, 3, 4, 10, 4.0]
    """
    known = sorted(v for v in values if v is not None and v == v)
    if not known:
        return None
    last = len(known) - 1
    at = [known[round(last * quarter / 4)] for quarter in range(5)]
    return [*at, round(sum(known) / len(known), 6)]


class Windows:
    """``add`` the fields of a ``steps`` event; it returns the events that are to be written now, with their kind."""

    def __init__(self, now: float) -> None:
        self._began = self._written = now
        self._seen = 0
        self._pending: Fields = {}
        self._like: tuple[Any, ...] = ()  # what the pending steps have in common

    def interval(self, now: float) -> float:
        return min(max((now - self._began) / GROWTH, SHORTEST), LONGEST)

    def add(self, fields: Fields, now: float) -> list[tuple[str, Fields]]:
        steps = len(fields.get("batch") or ())
        lists = [name for name, value in fields.items() if isinstance(value, (list, tuple))]
        if not steps or any(len(fields[name]) != steps for name in lists):
            return [*self.rest(now), ("steps", fields)]  # not ours to merge
        # A window has consecutive steps with one typical batch: it mixes no two plans.
        like = (lists, sorted(fields["batch"])[steps // 2])
        old = self._pending
        goes_on = old and like == self._like and fields.get("step") == old.get("step", 0) + len(old["batch"])
        due = [] if goes_on else self.rest(now)
        self._like = like
        if self._pending:
            for name, value in fields.items():
                if name in lists:
                    self._pending[name] += value
                elif name != "step":
                    self._pending[name] = value
        else:
            self._pending = {name: list(value) if name in lists else value for name, value in fields.items()}
        self._seen += steps
        full = len(self._pending["batch"]) >= MOST
        if self._seen <= FIRST or full or now - self._written >= self.interval(now):
            due += self.rest(now)
        return due

    def rest(self, now: float) -> list[tuple[str, Fields]]:
        """What waits for company."""
        if not self._pending:
            return []
        fields, self._pending, self._written = self._pending, {}, now
        return [("steps", fields) if len(fields["batch"]) <= SINGLE or self._seen <= FIRST else window(fields)]


def window(fields: Fields) -> tuple[str, Fields]:
    """Many steps as one event: a summary in place of each list."""
    measured = [i for i, busy in enumerate(fields.get("busy", ())) if busy]
    kept: Fields = {"step": fields.get("step"), "steps": len(fields["batch"]), "measured": len(measured)}
    for name, value in fields.items():
        if name in TIMES:
            kept[name] = summary([value[i] for i in measured])
        elif isinstance(value, list):
            kept[name] = summary(value)
        elif name != "step":
            kept[name] = value
    return "window", kept


def flat(event: Mapping[str, Any]) -> Iterator[Fields]:
    """The rows of a ``steps`` or ``window`` event: one number per column.

    ``batch``, ``busy``, … are a step's own values, or a window's means with ``busy_min`` … ``busy_max`` beside them.
    """
    common = {"t": event["t"], "worker": event.get("worker", event["rank"])}
    single = event["kind"] == "steps"
    lists = {n: v for n, v in event.items() if isinstance(v, list)}
    scalars = {n: v for n, v in event.items() if n not in lists and n not in ("v", "kind", "t", "rank", "worker")}
    if single:
        lengths = {len(v) for v in lists.values()}
        if len(lengths) != 1:
            raise ValueError("lists of different lengths")
        for i in range(lengths.pop()):
            row = {**common, **scalars, "step": event["step"] + i, "steps": 1}
            row.update({name: value[i] for name, value in lists.items()})
            row["measured"] = int(bool(row.get("busy")))
            for name in TIMES:
                if name in row and not row["measured"]:
                    row[name] = None
            yield row
        return
    row = {**common, **scalars}
    for name, value in lists.items():
        row[name] = value[-1]
        row.update({f"{name}_{part}": number for part, number in zip(SUMMARY[:-1], value[:-1], strict=True)})
    yield row
