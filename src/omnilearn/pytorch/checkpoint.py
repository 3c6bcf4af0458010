"""Checkpoints: one file, written whole or not at all, loadable with ``weights_only=True``."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from omnilearn.errors import UsageError
from omnilearn.pytorch import parcel
from omnilearn.pytorch.world import World

FILE = "checkpoint.pt"
VERSION = 1


def write(folder: str | os.PathLike[str], state: dict[str, Any]) -> Path:
    """Write ``state`` so that a crash at any moment leaves the previous checkpoint or the new one whole."""
    state = plain(state)
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{FILE}.tmp"  # what a crash leaves is overwritten the next time
    try:
        with unfinished.open("wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
    return path


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(folder) / FILE
    if not path.is_file():
        raise UsageError(
            f"there is no checkpoint in {folder} (looked for {FILE}): save one with omni.save({str(folder)!r})"
        )
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(state, dict) or "version" not in state:
        raise UsageError(f"{path} was not written by omni.save(): it has no version")
    if state["version"] != VERSION:
        raise UsageError(f"{path} has checkpoint version {state['version']}, this OmniLearn reads {VERSION}")
    return state


def receive(world: World, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint that rank 0 reads, on all ranks; its error, on all ranks."""
    if world.control is None:
        return read(folder)
    outcome: list[Any] = [None, 0]
    blob = torch.empty(0, dtype=torch.uint8)
    if world.is_main:
        try:
            blob = parcel.pack(read(folder))
            outcome[1] = len(blob)
        except UsageError as error:
            outcome[0] = str(error)
    with world.naming_the_culprit("receiving a checkpoint"):
        dist.broadcast_object_list(outcome, src=0, group=world.control)
        if outcome[0]:
            raise UsageError(outcome[0])
        if not world.is_main:
            blob = torch.empty(outcome[1], dtype=torch.uint8)
        dist.broadcast(blob, 0, group=world.control)
    state: dict[str, Any] = parcel.unpack(blob)
    return state


def plain(value: Any, where: tuple[Any, ...] = ()) -> Any:
    """The same, with NumPy's numbers made Python's. Raises, naming the place, where something could be written but not
    read back with ``weights_only=True``."""
    if isinstance(value, np.generic) and not isinstance(value, np.void):
        return value.item()
    if type(value) in (dict, OrderedDict):
        return type(value)((plain(key, where), plain(item, (*where, key))) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(plain(item, (*where, k)) for k, item in enumerate(value))
    if value is None or type(value) in (bool, int, float, str, torch.Tensor, nn.Parameter):
        return value
    check_plain(".".join(map(str, where)), value)
    return value


def check_plain(what: str, value: Any) -> None:
    """Refuse what could be written but not read back with ``weights_only=True``."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{what} is a {type(value).__name__}, which could not be read back: it must be made of tensors, numbers, "
            f"strings, lists and dicts ({reason})"
        ) from error


def random_state(device: torch.device) -> dict[str, Any]:
    """This process's random number generators, in tensors and plain numbers."""
    version, numbers, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
