"""An emulation as a TOML file: ``[[worker]]`` and ``[[change]]`` tables. Unknown keys are errors."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnilearn.cluster import units
from omnilearn.cluster.emulation import LEVELS, Change, Emulation, Worker, level
from omnilearn.errors import InfeasibleError, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORKER_KEYS = ("cpu", "memory", "bandwidth", "latency", "mps", "device")
CHANGE_KEYS = ("at_step", "at_second", "worker", "level", "cpu", "memory", "bandwidth", "latency")
DEVICES = ("cpu", "cuda")


def read(path: Path, nproc: int | None, cores: float, mode: str) -> Emulation:
    """The emulation in the file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"the emulation file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the emulation file {str(path)!r} is not valid TOML: {error}") from error
    _known(content, ("worker", "change"), str(path))
    tables = {key: content.get(key, []) for key in ("worker", "change")}
    for key, value in tables.items():
        if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
            raise UsageError(f"{path}: write [[{key}]] with double brackets, once for each {key}")
    if not tables["worker"]:
        raise UsageError(f"{path}: no worker is described; write one [[worker]] table for each")
    workers = tuple(_worker(table, f"{path}: worker {k}") for k, table in enumerate(tables["worker"]))
    changes = [
        _change(table, len(workers), cores, mode, f"{path}: change {k}") for k, table in enumerate(tables["change"])
    ]
    changes.sort(key=lambda change: (change.at_step or 0, change.at_second or 0.0))
    return Emulation(str(path), workers, tuple(changes))


def _worker(table: Mapping[str, Any], where: str) -> Worker:
    _known(table, WORKER_KEYS, where)
    device = table.get("device")
    if device is not None and device not in DEVICES:
        raise InfeasibleError(f"{where}: unknown device {device!r}; choose from {', '.join(DEVICES)}")
    mps = _number(table, "mps", where)
    if mps is not None and mps > 100:
        raise InfeasibleError(f"{where}: mps = {mps:g} is more than 100 percent of a card")
    if mps is not None and device == "cpu":
        raise InfeasibleError(f"{where}: mps = {mps:g} needs a card, but the device is 'cpu'")
    return Worker(
        cpu=_number(table, "cpu", where),
        memory=units.size(f"{where}: memory", table["memory"]) if "memory" in table else None,
        bandwidth=units.rate(f"{where}: bandwidth", table["bandwidth"]) if "bandwidth" in table else None,
        latency=units.duration(f"{where}: latency", table["latency"]) if "latency" in table else None,
        mps=mps,
        device=device,
    )


def _change(table: Mapping[str, Any], nproc: int, cores: float, mode: str, where: str) -> Change:
    _known(table, CHANGE_KEYS, where)
    if ("at_step" in table) == ("at_second" in table):
        raise UsageError(f"{where}: give either at_step or at_second")
    at_step, at_second = table.get("at_step"), table.get("at_second")
    if at_step is not None and (isinstance(at_step, bool) or not isinstance(at_step, int) or at_step < 0):
        raise InfeasibleError(f"{where}: at_step = {at_step!r} must be a whole number from 0")
    if at_second is not None and (isinstance(at_second, bool) or not isinstance(at_second, int | float)):
        raise InfeasibleError(f"{where}: at_second = {at_second!r} must be a number")
    if at_second is not None and not (math.isfinite(at_second) and at_second >= 0):
        raise InfeasibleError(f"{where}: at_second = {at_second!r} must not be negative")
    return Change(_values(table, nproc, cores, mode, where), at_step, at_second)


def _values(
    table: Mapping[str, Any], nproc: int, cores: float, mode: str, where: str
) -> tuple[tuple[int, Worker], ...]:
    """The new limits: of one worker (``worker = 2``), or of all (a ``level``, or a list of ``cpu``)."""
    if "worker" in table:
        index = table["worker"]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < nproc:
            raise InfeasibleError(f"{where}: worker = {index!r}, but there are workers 0 to {nproc - 1}")
        if "level" in table:
            raise UsageError(f"{where}: a level is for all workers; leave out worker, or give cpu instead")
        limits = _worker({key: table[key] for key in WORKER_KEYS if key in table}, where)
        if limits == Worker():
            raise UsageError(f"{where}: nothing changes; give cpu, memory, bandwidth or latency")
        return ((index, limits),)
    if "level" in table and "cpu" in table:
        raise UsageError(f"{where}: give either level or cpu")
    if "level" in table:
        shares = level(str(table["level"]), cores, mode)
    elif isinstance(table.get("cpu"), list):
        shares = tuple(_number({"cpu": share}, "cpu", where) or 0.0 for share in table["cpu"])
    else:
        names = "/".join(LEVELS["sync"])
        raise UsageError(f'{where}: say for whom: worker = 0, level = "{names}", or cpu = [one per worker]')
    extra = [key for key in ("memory", "bandwidth", "latency") if key in table]
    if extra:
        raise UsageError(f"{where}: {extra[0]} needs worker = …")
    if len(shares) != nproc:
        raise UsageError(f"{where}: {len(shares)} shares for {nproc} workers")
    return tuple((k, Worker(cpu=share)) for k, share in enumerate(shares))


def _number(table: Mapping[str, Any], key: str, where: str) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InfeasibleError(f"{where}: {key} = {value!r} must be a number")
    if not (math.isfinite(value) and value > 0):
        raise InfeasibleError(f"{where}: {key} = {value!r} must be above zero")
    return float(value)


def _known(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    unknown = sorted(set(table) - set(keys))
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(keys)}")
