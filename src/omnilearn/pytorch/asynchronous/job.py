"""What rank 0 sends to the server's process: its optimizer and schedulers, whatever they are, and what they work on."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from omnilearn.control import Policy, Problem
from omnilearn.errors import UsageError


class Likeness:
    """A model without its code: parameters, buffers, and by which names its ``state_dict`` has them.

    The server never computes with it. ``entries``: by name, where the value is ("parameter" or "buffer", by number), or
    ("value", what it was).
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        known = {id(p): ("parameter", k) for k, p in enumerate(self._parameters)}
        known |= {id(b): ("buffer", k) for k, b in enumerate(self._buffers)}
        entries = model.state_dict(keep_vars=True)
        self._entries = {name: known.get(id(value), ("value", value)) for name, value in entries.items()}

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffers(self) -> list[torch.Tensor]:
        return self._buffers

    def state_dict(self) -> dict[str, Any]:
        return OrderedDict((name, self._value(*place)) for name, place in self._entries.items())

    def _value(self, kind: str, what: Any) -> Any:
        if kind == "value":
            return what
        tensor = (self._parameters if kind == "parameter" else self._buffers)[what]
        return tensor.detach()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        missing, unknown = self._entries.keys() - state.keys(), state.keys() - self._entries.keys()
        if missing or unknown:
            raise ValueError(f"it lacks {sorted(missing)[:5]}, and has {sorted(unknown)[:5]} more")
        for name, (kind, what) in self._entries.items():
            if kind == "value":
                continue
            tensor, saved = self._value(kind, what), state[name]
            if tensor.shape != saved.shape:
                raise ValueError(f"{name} has the shape {tuple(saved.shape)}, here {tuple(tensor.shape)}")
            tensor.copy_(saved)


class Kept:
    """What a worker has for itself, a GradScaler: the server only keeps its state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


@dataclass(frozen=True)
class Shares:
    """How the workers' shares are bounded."""

    global_batch: int
    minimum: int
    maximum: int | None
    multiple_of: int

    def problem(self, speeds: Sequence[float]) -> Problem:
        return Problem.of(
            self.global_batch, speeds=speeds, minimum=self.minimum, maximum=self.maximum if len(speeds) > 1 else None,
            multiple_of=self.multiple_of, park=False,
        )  # fmt: skip


@dataclass(frozen=True)
class Job:
    """``settings`` are the server's, ``options`` the run's, for its events; ``passport`` is what workers are checked
    against, ``token`` what lets them in."""

    likeness: Likeness
    optimizer: torch.optim.Optimizer
    others: tuple[Any, ...]
    policy: Policy
    shares: Shares
    settings: Any
    options: dict[str, Any]
    passport: dict[str, Any]
    token: str
    log_dir: str | None


def write(job: Job) -> int:
    """A file without a name that holds it; its number."""
    cloudpickle = _cloudpickle()
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it is the number that is passed on)
    try:
        torch.save(job, file, pickle_module=cloudpickle or pickle, pickle_protocol=4)
    except Exception as error:
        more = (
            "" if cloudpickle else "; what is defined in a script itself can be sent with cloudpickle: pip install it"
        )
        raise UsageError(
            f"the optimizer, the schedulers or the policy cannot be sent to the asynchronous server, a process "
            f"of its own ({type(error).__name__}: {error}){more}"
        ) from error
    file.seek(0)
    return os.dup(file.fileno())


def read(number: int) -> Job:
    with os.fdopen(number, "rb") as file:
        job: Job = torch.load(file, map_location="cpu", weights_only=False)  # from rank 0, by a file without a name
    return job


def _cloudpickle() -> ModuleType | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    module: ModuleType = cloudpickle
    return module
