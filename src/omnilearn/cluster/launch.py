"""Starts the workers with torchrun's agent, waits for them, and says what went wrong first.

Knows torch.distributed's launcher and nothing of arguments (``run.py``) or limits (``emulator.py``).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omnilearn.cluster import units
from omnilearn.cluster.console import PREFIX, TRACEBACK, console
from omnilearn.cluster.emulator import Emulator

HEADLINE = 1000  # characters: our own errors are whole
SHOWN = 30  # lines of the failing worker's stderr
CHAINED = " exception "  # "During handling of the above exception, …", "The above exception was …"
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Interrupted(BaseException):
    """A signal told the launcher to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Turn signals into ``Interrupted``, so that what was begun is cleaned up; ignored while it is."""

    def interrupt(number: int, frame: object) -> None:
        ignore()
        raise Interrupted(number)

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        for number in HANDLED:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """From here on nothing may stop the cleaning up; ``signals_raise`` puts the handlers back."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torchrun's own log lines only where LOGLEVEL asks for them: what matters is said once, at the end."""
    before = logging.root.manager.disable
    if "LOGLEVEL" not in os.environ and "TORCHELASTIC_LOG_LEVEL" not in os.environ:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def launch(
    config: Any,
    command: Any,
    arguments: Sequence[str],
    emulator: Emulator,
    log_dir: Path,
    met: Callable[[], None] | None = None,
) -> int:
    """Run ``command`` on all workers; returns the exit code, having said on stderr what failed. ``met`` is called when
    all hosts are there."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    if isinstance(command, str):
        # The agent substitutes ${local_rank}; a dollar in the user's own arguments must survive that.
        escaped = [word.replace("$", "$$") for word in (command, *arguments)]
        command, *arguments = emulator.command_for("${local_rank}", escaped, with_parent=True)
    config.log_line_prefix_template = config.log_line_prefix_template or PREFIX
    out, err = sys.stdout, sys.stderr
    stderrs: dict[int, str] = {}
    _hear_of_starts(
        config.logs_specs, stderrs, emulator, lambda line: print(f"omnilearn: {line}", file=err, flush=True), met
    )
    try:
        with _quiet(), console(out, err):
            elastic_launch(config, command)(*arguments)
        return 0
    except ChildFailedError as error:
        where = " on this host" if config.max_nodes > 1 else ""
        return _report(error.failures, stderrs, emulator, f"Logs: {log_dir}", where)
    except (SignalException, Interrupted) as error:
        number = error.number if isinstance(error, Interrupted) else int(error.sigval)
        name = signal.Signals(number).name
        word = "interrupted" if number == signal.SIGINT else f"ended by {name}"
        print(f"omnilearn: {word}; all workers were ended. Logs: {log_dir}", file=err)
        return 128 + number
    except Exception as error:
        print(f"omnilearn: the workers could not be started: {type(error).__name__}: {error}", file=err)
        return 1
    finally:
        _ignore_signals()
        emulator.kill()


def _hear_of_starts(
    logs_specs: Any,
    stderrs: dict[int, str],
    emulator: Emulator,
    say: Callable[[str], None],
    met: Callable[[], None] | None = None,
) -> None:
    """At every start of the workers the agent decides where their output goes: keep ``stderrs`` up to date, by local
    rank. It says nothing of starting them again, so we do."""
    decide, failures = logs_specs.reify, 0

    def reify(envs: Any) -> Any:
        nonlocal failures
        if met is not None:
            met()
        before, failures = failures, int(envs[0]["TORCHELASTIC_RESTART_COUNT"])
        if stderrs:
            why = _why_again(stderrs, emulator) if failures > before else "the machines changed"
            size, most = int(envs[0]["WORLD_SIZE"]), envs[0]["TORCHELASTIC_MAX_RESTARTS"]
            now = "1 worker" if size == 1 else f"{size} workers"
            say(f"{why}: all start again, {now} now ({failures} of {most} restarts used)")
            if failures == before:
                _keep_logs(stderrs)
            emulator.start_again()
        stderrs.clear()
        destinations = decide(envs)
        stderrs.update(destinations.stderrs)
        return destinations

    logs_specs.reify = reify


def _keep_logs(stderrs: Mapping[int, str]) -> None:
    """The agent's folder for logs is named by the failures so far. Where none led to the next start, it would be used
    again and what is in it be lost."""
    folder = Path(next(iter(stderrs.values()))).parents[1]
    free = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(1))
    with contextlib.suppress(OSError):
        folder.rename(next(name for name in free if not name.exists()))


def _why_again(stderrs: Mapping[int, str], emulator: Emulator) -> str:
    """Which error ended the workers of this host; those that only say that they lost another one do not tell."""
    for rank in stderrs:
        if emulator.out_of_memory(rank):
            return f"worker {rank} here was {_at_its_limit(emulator, rank)}"
    last = [words for path in stderrs.values() if (words := _exception(_tail(path)))]
    return next((_short(words) for words in last if not _blames_a_peer(words)), "a worker was lost")


def _at_its_limit(emulator: Emulator, rank: int) -> str:
    limit = units.show_size(emulator.limits[rank].memory or 0)
    return f"out of memory, killed by the kernel at its emulated limit of {limit}"


def _short(words: str) -> str:
    """For a headline; all of it stands below or in the log files."""
    return textwrap.shorten(words, HEADLINE, placeholder=" …")


def _blames_a_peer(words: str) -> bool:
    return words.partition(":")[0].endswith("PeerFailure")


def _report(failures: Any, stderrs: dict[int, str], emulator: Emulator, logs: str, where: str) -> int:
    """Say which worker failed first and how; returns its status."""

    def last_word(rank: int) -> tuple[bool, int]:
        # Who fails because a peer did says so, and writes its traceback after that peer wrote its own.
        path = stderrs.get(failures[rank].local_rank, "")
        blames = _blames_a_peer(_exception(_tail(path)))
        try:
            return blames, os.stat(path).st_mtime_ns
        except OSError:
            return blames, 0

    ended_by_us = {rank for rank, failure in failures.items() if failure.exitcode == -signal.SIGTERM}
    order = sorted(set(failures) - ended_by_us or ended_by_us, key=last_word)
    first, others = failures[order[0]], order[1:]
    lines = _tail(stderrs.get(first.local_rank, ""))
    named = _exception(lines)
    cause = f"{_short(named)} ({_cause(first, emulator)})" if named else _cause(first, emulator)
    name = f"rank {order[0]}" if isinstance(order[0], int) else order[0]
    print(f"omnilearn: {name} failed first{where}: {cause}", file=sys.stderr)
    if lines:
        print("\n".join(f"  {line}" for line in lines), file=sys.stderr)
    for rank in others:
        words = _exception(_tail(stderrs.get(failures[rank].local_rank, "")))
        print(
            f"omnilearn: then rank {rank}: {_short(words or _cause(failures[rank], emulator))}",
            file=sys.stderr,
        )
    print(f"omnilearn: all workers were ended. {logs}", file=sys.stderr)
    return max(1, int(first.exitcode))


def _cause(failure: Any, emulator: Emulator) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    if failure.exitcode == -signal.SIGKILL and emulator.out_of_memory(failure.local_rank):
        return _at_its_limit(emulator, failure.local_rank)
    hint = " (out of memory? the kernel kills so)" if failure.exitcode == -signal.SIGKILL else ""
    return f"killed by {failure.signal_name()}{hint}"


def _tail(path: str) -> list[str]:
    """The end of a stderr file: from the last traceback on, if it has one."""
    try:
        lines = Path(path).read_text(errors="replace").rstrip().splitlines()
    except OSError:
        return []
    starts = [k for k, line in enumerate(lines) if TRACEBACK.match(line)]
    while len(starts) > 1 and any(CHAINED in line for line in lines[starts[-2] : starts[-1]]):
        starts.pop()
    block = lines[starts[-1] :] if starts else lines
    return [re.sub(r"^\[rank\d+\]: ", "", line) for line in block[-SHOWN:]]


def _exception(lines: Sequence[str]) -> str:
    """The last line of a traceback that names the exception; "" if there is none."""
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(: |$)", line)]
    return named[-1] if lines and TRACEBACK.match(lines[0]) and named else ""
