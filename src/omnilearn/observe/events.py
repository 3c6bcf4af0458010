"""What happened, as JSON lines: each rank appends to a file of its own, anybody may read while it grows.

A line is written whole, by one system call, so a crash costs at most what is under way, and readers skip what is not a
whole line. Steps that come quickly are written together (``windows``), so that a file stays small. Writing never
disturbs training: a full disk ends the events with one warning. What the events mean is in docs/events.md; showing them
is left to ``live`` and ``report``. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnilearn.errors import UsageError
from omnilearn.observe.windows import Windows, flat

VERSION = 1
Event = dict[str, Any]

log = logging.getLogger("omnilearn")
_NAME = re.compile(r"rank-\d+\.jsonl")


class EventLog:
    """Appends one rank's events to ``folder/rank-<k>.jsonl``. Without a folder it does nothing.

    >>> EventLog(None, 0).write("run", options={})
    """

    def __init__(self, folder: str | os.PathLike[str] | None, rank: int) -> None:
        self.rank = rank
        self._file: int | None = None
        self._path = Path(folder or ".") / f"rank-{rank}.jsonl"
        self._windows: dict[Any, Windows] = {}  # by worker: a server may write for all of its own
        if folder is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                os.write(self._file, b"\n")  # whoever wrote before died in the middle of a line
        except OSError as error:
            self._give_up(error)

    def __bool__(self) -> bool:
        """Whether events are kept: what is costly to describe need not be, otherwise."""
        return self._file is not None

    def write(self, kind: str, **fields: Any) -> None:
        """Append an event. Never raises: what cannot be written is left out, with one warning.

        "steps" may be merged with the next ones; everything else is in the file when this returns.
        """
        if self._file is None:
            return
        try:
            now = time.monotonic()
            if kind == "steps":
                due = self._windows.setdefault(fields.get("worker"), Windows(now)).add(fields, now)
            else:
                due = [*self._pending(now), (kind, fields)]
            for name, values in due:
                self._append(name, values)
        except Exception as error:  # whatever is wrong with an event, training goes on
            self._give_up(error)

    def _pending(self, now: float) -> list[tuple[str, dict[str, Any]]]:
        return [record for windows in self._windows.values() for record in windows.rest(now)]

    def _append(self, kind: str, fields: dict[str, Any]) -> None:
        event = {"v": VERSION, "kind": kind, "t": round(time.time(), 4), "rank": self.rank, **fields}
        line = (_encode(event) + "\n").encode()
        assert self._file is not None
        written = os.write(self._file, line)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        if self._file is not None:
            for kind, fields in self._pending(time.monotonic()):
                with contextlib.suppress(Exception):
                    self._append(kind, fields)
            os.close(self._file)
            self._file = None

    def _give_up(self, error: Exception) -> None:
        log.warning("no more events of rank %d: %s cannot be written (%s)", self.rank, self._path, error)
        self.close()


class Follower:
    """Reads the events of a folder as they come: ``poll()`` gives those that are new.

    ``skipped`` counts lines that are no events; ``newer`` are format versions that this OmniLearn cannot read.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.skipped = 0
        self.newer: set[Any] = set()
        self._at: dict[Path, int] = {}
        self._rest: dict[Path, bytes] = {}

    def poll(self) -> list[Event]:
        """New events of all ranks, in the order of their times."""
        events: list[Event] = []
        for path in self._files():
            try:
                with path.open("rb") as file:
                    file.seek(self._at.get(path, 0))
                    new = file.read()
            except OSError:
                continue
            self._at[path] = self._at.get(path, 0) + len(new)
            *lines, rest = (self._rest.get(path, b"") + new).split(b"\n")
            self._rest[path] = rest
            events += [event for event in map(self._event, lines) if event is not None]
        return sorted(events, key=lambda event: event["t"])

    def end(self) -> list[Event]:
        """Last lines without an end: whole events whose newline is missing, or cut off by a crash."""
        rests, self._rest = [rest for rest in self._rest.values() if rest.strip()], {}
        return [event for event in map(self._event, rests) if event is not None]

    def _files(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        except OSError:
            return []

    def _event(self, line: bytes) -> Event | None:
        if not line.strip():
            return None
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        known = isinstance(event, dict) and isinstance(event.get("kind"), str) and "v" in event
        if known and event["v"] != VERSION:
            self.newer.add(str(event["v"]))
            return None
        if not known or not all(isinstance(event.get(name), (int, float)) for name in ("t", "rank")):
            self.skipped += 1
            return None
        return dict(event)


def read(folder: str | os.PathLike[str]) -> list[Event]:
    """All events of a run, of all ranks, in the order of their times. ``pandas.DataFrame(read(…))`` works.

    Lines that are no events (cut off by a crash, written by somebody else) are skipped; a warning says how many.
    """
    events, problems = collect(folder)
    for problem in problems:
        log.warning(problem)
    return events


def steps(folder: str | os.PathLike[str]) -> list[Event]:
    """The steps of a run as flat records, one number per column: a row per worker and step, or window of steps.

    ``pandas.DataFrame(steps("runs/…")).groupby("worker").busy.mean()``
    """
    return list(_flat(event for event in read(folder) if event["kind"] in ("steps", "window")))


def _flat(events: Iterator[Event]) -> Iterator[Event]:
    for event in events:
        with contextlib.suppress(KeyError, TypeError, ValueError, IndexError):  # fields missing: not ours
            yield from flat(event)


def collect(folder: str | os.PathLike[str]) -> tuple[list[Event], list[str]]:
    """All events in the order of their times, and in words what could not be read."""
    follower = Follower(folder)
    if not follower._files():
        raise UsageError(f"there are no events in {folder}: no rank-*.jsonl was found; is it the log folder of a run?")
    events = follower.poll()
    if rest := follower.end():
        events = sorted(events + rest, key=lambda event: event["t"])
    problems = []
    if follower.newer:
        versions = ", ".join(sorted(follower.newer))
        message = f"{folder} has events of format {versions}; this OmniLearn reads format {VERSION}: upgrade it"
        if not events:
            raise UsageError(message)
        problems.append(f"{message} (the others are shown)")
    if follower.skipped:
        problems.append(f"{follower.skipped} lines in {folder} are no events, or were cut off: skipped")
    return events, problems


def _encode(event: Event) -> str:
    try:
        return json.dumps(event, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:  # numbers that are not finite; JSON has none
        return json.dumps(_finite(event), separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """NumPy's and torch's numbers and arrays as Python's; everything else in words."""
    return _finite(value.tolist()) if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
