"""Checkpoints: one file, written whole or not at all, loadable with ``weights_only=True``."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from omnilearn.errors import UsageError

FILE = "checkpoint.pt"
VERSION = 1


def write(folder: str | os.PathLike[str], state: dict[str, Any]) -> Path:
    """Write ``state`` so that a crash at any moment leaves the previous checkpoint or the new one whole."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".checkpoint-", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save({"version": VERSION, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
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
    if state.get("version") != VERSION:
        raise UsageError(f"{path} has checkpoint version {state.get('version')}, this OmniLearn reads {VERSION}")
    return state


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
