"""Checkpoints: one file of arrays and JSON, written whole or not at all, read without pickle."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnilearn.errors import UsageError

FILE = "checkpoint.npz"
VERSION = 1


def write(folder: str | os.PathLike[str], variables: Sequence[Any], facts: dict[str, Any]) -> Path:
    """Write so that a crash at any moment leaves the previous checkpoint or the new one whole."""
    arrays = [np.asarray(variable.numpy()) for variable in variables]
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{FILE}.tmp"  # what a crash leaves is overwritten the next time
    # As bytes: NumPy's format does not know bfloat16.
    kinds = [[str(array.dtype), list(array.shape)] for array in arrays]
    text = json.dumps({"version": VERSION, "arrays": kinds, **facts}, default=_number)
    data: dict[str, Any] = {str(k): np.frombuffer(array.tobytes(), dtype=np.uint8) for k, array in enumerate(arrays)}
    data["facts"] = np.frombuffer(text.encode(), dtype=np.uint8)
    try:
        with unfinished.open("wb") as file:
            np.savez(file, **data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return path


def read_into(folder: str | os.PathLike[str], variables: Sequence[Any]) -> dict[str, Any]:
    """Give the variables the values that were saved. Returns the facts."""
    arrays, facts = _read(folder)
    have = [np.asarray(variable.numpy()) for variable in variables]
    if [(str(array.dtype), list(array.shape)) for array in have] != [(kind, shape) for kind, shape, _ in arrays]:
        raise UsageError(
            f"the checkpoint in {folder} does not fit this model and optimizer: it has {len(arrays)} arrays, these "
            f"have {len(have)}, or their shapes differ"
        )
    for variable, array, (_, shape, data) in zip(variables, have, arrays, strict=True):
        variable.assign(np.frombuffer(data, dtype=array.dtype).reshape(shape))
    return facts


def _read(folder: str | os.PathLike[str]) -> tuple[list[tuple[str, list[int], bytes]], dict[str, Any]]:
    """The arrays as (type, shape, bytes), and the facts."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise UsageError(
            f"there is no checkpoint in {folder} (looked for {FILE}): save one with omni.save({str(folder)!r})"
        )
    try:
        with np.load(path, allow_pickle=False) as data:
            facts = json.loads(data["facts"].tobytes())
            arrays = [(kind, shape, data[str(k)].tobytes()) for k, (kind, shape) in enumerate(facts["arrays"])]
    except Exception as error:
        raise UsageError(f"{path} cannot be read as a checkpoint: {error}") from error
    if facts["version"] != VERSION:
        raise UsageError(f"{path} has checkpoint version {facts['version']}, this OmniLearn reads {VERSION}")
    return arrays, facts


def _number(value: Any) -> Any:
    """NumPy's numbers are Python's to JSON."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be written")


def check_plain(value: Any) -> None:
    """Refuse what JSON cannot hold."""
    try:
        json.dumps(value, default=_number)
    except (TypeError, ValueError) as error:
        raise UsageError(f"extra must be made of numbers, strings, lists and dicts ({error})") from error
