"""What all benchmarks hand back: one record, the same shape for all, written as JSON and shown as tables.

A record says what was measured, with which command, on what kind of machine, row by row and in short. It names no
host and no path, so that it can be published as it is. Measuring is left to the benchmarks.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from omnilearn import __version__
from omnilearn.errors import OmniLearnError, UsageError

SCHEMA = 1

Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """This machine in words and numbers, without its name. Imports no framework; names a GPU only if torch is here."""
    torch = sys.modules.get("torch")
    gpus = []
    if torch is not None and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "all_cores": os.cpu_count(),
        "memory_gib": _memory(),
        "gpu": gpus,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": _version("torch"),
        "tensorflow": _version("tensorflow") or _version("tensorflow-cpu"),
    }


def cores_in_words(here: Mapping[str, Any]) -> str:
    """
    >>> cores_in_words({"cores": 2, "all_cores": 16}), cores_in_words({"cores": 2})
    ('2 of 16 cores', '2 cores')
    """
    some, everything = here["cores"], here.get("all_cores")
    return f"{some} cores" if everything in (None, some) else f"{some} of {everything} cores"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def command_line(arguments: Sequence[str]) -> str:
    """The command that was run, as somebody else would type it: of absolute paths only the last part."""
    return " ".join(["omnilearn", *(Path(word).name if Path(word).is_absolute() else word for word in arguments)])


def median_and_spread(values: Iterable[float]) -> dict[str, float]:
    """The median, and the lower and upper quartile around it.

    >>> median_and_spread([3, 1, 2, 5, 4])
    {'median': 3.0, 'lower': 2.0, 'upper': 4.0}
    """
    lower, median, upper = np.percentile(list(values), [25, 50, 75])
    return {"median": float(median), "lower": float(lower), "upper": float(upper)}


@dataclass(frozen=True)
class Record:
    """One benchmark's result. ``rows`` are what was measured, ``summary`` the few numbers that matter."""

    bench: str
    rows: list[Row]
    summary: dict[str, Any]
    command: str = field(default_factory=lambda: command_line(sys.argv[1:]))
    machine: dict[str, Any] = field(default_factory=machine)
    version: str = __version__
    date: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain values in the order they are written; what is not a finite number is null."""
        values = asdict(self)
        order = ("schema", "bench", "command", "version", "date", "machine", "summary", "rows")
        return {key: _plain(values[key]) for key in order}

    def keep(self, path: str | Path | None) -> None:
        """What there is so far, for a benchmark that is interrupted: marked as unfinished, replaced by the whole."""
        if path:
            replace(self, summary={**self.summary, "unfinished": True}).write(path)

    def write(self, path: str | Path) -> None:
        """Write as JSON: either all of it is there afterwards or what was there before. Makes the folders needed."""
        target = Path(path)
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        except OSError as error:
            raise OmniLearnError(f"cannot write {target}: {error.strerror}: choose another --json path") from error
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)  # mkstemp's 0600 is meant for secrets
            os.replace(temporary, target)
        except BaseException as error:
            os.unlink(temporary)
            if isinstance(error, OSError):
                raise OmniLearnError(f"cannot write {target}: {error.strerror}: choose another --json path") from error
            raise

    def show(self, file: TextIO | None = None) -> None:
        """Print the rows as tables, one for each kind of row (rows with the same columns are of one kind)."""
        kinds: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            kinds.setdefault(tuple(row), []).append(row)
        for columns, rows in kinds.items():
            table(columns, [[row[column] for column in columns] for row in rows], file=file)


def check_writable(path: str | Path) -> None:
    """Raise where that file could not be written: before long work is done for it, not after."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        why = f"{target.parent} is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"cannot write {target}: {why}: choose another path") from error


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, file: TextIO | None = None) -> None:
    """Print a table with rich where it is installed, else in plain text. Numbers stand to the right."""
    out = file if file is not None else sys.stdout
    names = [column.replace("_", " ") for column in columns]
    cells = [[cell(value) for value in row] for row in rows]
    right = [all(isinstance(row[i], (int, float, type(None))) for row in rows) for i in range(len(names))]
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(line[i]) for line in [names, *cells]) for i in range(len(names))]
        for line in [names, ["-" * width for width in widths], *cells]:
            parts = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, right, strict=True))
            print("  ".join(parts).rstrip(), file=out)
        print(file=out)
        return
    rich_table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, to_the_right in zip(names, right, strict=True):
        rich_table.add_column(name, justify="right" if to_the_right else "left", overflow="fold")
    for row in cells:
        rich_table.add_row(*row)
    console = Console(file=out, markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 140  # a file or a pipe has no width, and cutting numbers short would lose them
    console.print(rich_table)


def cell(value: Any) -> str:
    """A value as tables show it."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (float, np.floating)):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, (int, np.integer)):
        return f"{value:,}"
    return str(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not isfinite(value) else value
