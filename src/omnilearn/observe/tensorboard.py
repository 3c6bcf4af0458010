"""A tracker that writes TensorBoard's files, with the tensorboard package alone: no torch, no tensorflow."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from omnilearn.errors import UsageError
from omnilearn.observe.events import Follower


class TensorBoard:
    """``track(folder, TensorBoard(folder))``, then ``tensorboard --logdir …``. A file is made with the first figure."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int, t: float) -> None:
        writer, event, summary = self._open()
        value = [summary.Value(tag=name, simple_value=number) for name, number in values.items()]
        writer.add_event(event(wall_time=t, step=step, summary=summary(value=value)))

    def close(self) -> None:
        if self._writer is not None:
            self._writer[0].close()
            self._writer = None

    def _open(self) -> Any:
        if self._writer is None:
            # TensorBoard's own switch: without it, it imports all of TensorFlow where that is installed.
            sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
            try:
                # What torch.utils.tensorboard writes with, too.
                from tensorboard.compat.proto.event_pb2 import Event
                from tensorboard.compat.proto.summary_pb2 import Summary
                from tensorboard.summary.writer.event_file_writer import EventFileWriter
            except ImportError as error:
                raise UsageError("TensorBoard files need its package: pip install tensorboard") from error
            self._writer = (EventFileWriter(str(self._folder)), Event, Summary)
        return self._writer


class OfThisHost(TensorBoard):
    """Writes only where worker 0 runs: with several hosts and one folder, one launcher does it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        self._here: bool | None = None

    def log(self, values: Mapping[str, float], step: int, t: float) -> None:
        if self._here is None:
            run = [event for event in Follower(self._folder).poll() if event["kind"] == "run"]
            workers = run[-1].get("workers") or [{}] if run else [{}]
            self._here = workers[0].get("host", socket.gethostname()) == socket.gethostname()
        if self._here:
            super().log(values, step, t)
