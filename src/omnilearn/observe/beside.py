"""What accompanies a run in its launcher: the live view (or a line now and then), and TensorBoard's files.

Both read the log folder, in threads of their own. A script that writes no events is left alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec

from omnilearn.observe.live import REFRESH, LiveView
from omnilearn.observe.tensorboard import OfThisHost
from omnilearn.observe.track import track

PLAIN_EVERY = 60.0
"""Seconds between two lines where there is no terminal."""


@contextlib.contextmanager
def beside(folder: str | os.PathLike[str], *, live: bool) -> Iterator[None]:
    """While the block runs: show the run in ``folder`` if ``live``, and write TensorBoard's files if that is here."""
    with contextlib.ExitStack() as stack:
        if find_spec("tensorboard") is not None:
            stack.enter_context(track(folder, OfThisHost(folder)))
        if live and find_spec("rich") is not None:
            stack.enter_context(_shown(folder))
        yield


@contextlib.contextmanager
def _shown(folder: str | os.PathLike[str]) -> Iterator[None]:
    from rich.console import Console

    # With a view on the terminal the workers' lines go through it, so both of their ways must lead there.
    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    # The stream itself, not whatever sys.stdout is later: the launcher puts its own there, which leads back here.
    console = Console(file=sys.stdout, highlight=False) if terminal else Console(file=sys.__stderr__)
    view = LiveView(folder, "omnilearn", console=console, plain_every=PLAIN_EVERY)
    view.starting = ""  # nothing is shown before the first event
    over = threading.Event()

    def follow() -> None:
        while not over.wait(REFRESH if terminal else 1.0):
            view.update()

    thread = threading.Thread(target=follow, name="omnilearn-live", daemon=True)
    with view if terminal else contextlib.nullcontext():
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(10)
