"""``omnilearn demo``: trains the same model twice on an emulated cluster and says what the difference was.

Both trainings are real scripts (``ddp.py``, ``omni.py``) started by ``omnilearn run``; what is shown comes from their
events. What is said about it is in ``story.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omnilearn.bench.record import Record, check_writable
from omnilearn.cluster import emulation as emulations
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.launch import Interrupted, signals_raise
from omnilearn.cluster.resources import cores
from omnilearn.cluster.run import make_log_dir
from omnilearn.demo import story
from omnilearn.errors import InfeasibleError, OmniLearnError, UsageError
from omnilearn.observe import report
from omnilearn.observe.live import LiveView

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """\
Train a small network on handwritten digits twice, on a cluster of unequal workers that this machine plays: with
plain PyTorch DistributedDataParallel and equal batches, then with OmniLearn, to the same accuracy."""

EPILOG = """\
examples:
  omnilearn demo                       about a minute and a half on two cores
  omnilearn demo --quick               a smaller network and an easier target, under a minute
  omnilearn demo --emulate HL2         a milder cluster (HL1: equal workers, nothing to gain)
  omnilearn demo --mode async          OmniLearn's asynchronous mode: nobody waits for anybody
  omnilearn demo --json demo.json      keep the numbers

exit codes: 0 both ran to their end, 1 one failed, 2 wrong use, 130 interrupted"""

TITLES = {"ddp": "Plain DDP, equal batches", "omni": "OmniLearn, batches by speed"}  # by script and folder
ASYNC = story.ASYNC
ENDS_WITHIN = 20.0  # seconds that a launcher told to end is given
LONGEST_START = 180.0  # seconds


@dataclass(frozen=True)
class Size:
    """How much is trained. ``seconds`` of training end a run that does not reach the target."""

    width: int
    target: float
    epochs: int
    seconds: float
    lr: float
    batch: int = 128
    mode: str = "sync"


FULL = Size(width=96, target=0.97, epochs=15, seconds=45.0, lr=0.0005)
QUICK = Size(width=48, target=0.93, epochs=8, seconds=15.0, lr=0.001)
SEED = 5  # with it the target is passed clearly: both runs need the same number of epochs, rounding or not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--emulate", metavar="SPEC", help="the cluster to play (default: HL8; for async: HL8-async)")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync", help="of OmniLearn (default: sync)")
    parser.add_argument("--epochs", metavar="N", type=_epochs, help="at most so many epochs each")
    parser.add_argument("--json", metavar="PATH", help="also write the numbers to this file (folders are made)")
    parser.add_argument("--quick", action="store_true", help="smaller network, easier target: under a minute")


def _epochs(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1 is needed")
    return value


def main(args: argparse.Namespace) -> int:
    try:
        with signals_raise():
            return _main(args)
    except Interrupted as error:
        word = "interrupted" if error.number == signal.SIGINT else f"ended by {error}"
        print(f"omnilearn: {word}; all workers were ended", file=sys.stderr)
        return 128 + error.number


def _main(args: argparse.Namespace) -> int:
    from rich.console import Console

    for module, name in (("sklearn", "scikit-learn"), ("torch", "PyTorch")):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"the demo needs {name}: pip install -e '.[demo]' in a checkout of OmniLearn")
    if args.json:
        check_writable(args.json)
    size = replace(QUICK if args.quick else FULL, mode=args.mode)
    args.emulate = args.emulate or ("HL8" if args.mode == "sync" else "HL8-async")
    try:
        emulation = _cluster(args.emulate)
    except (InfeasibleError, UsageError) as error:
        print(f"omnilearn demo: {error}", file=sys.stderr)
        return 2
    shares = [worker.cpu or 0.0 for worker in emulation.workers]
    batch = len(shares) * max(1, round(size.batch / len(shares)))  # DDP's equal batches are whole numbers
    size = replace(size, batch=batch, epochs=args.epochs or size.epochs)
    console = Console(highlight=False)
    for line in story.introduction(args.emulate, shares, size.target, batch, size.mode):
        console.print(line)
    if (load := _load()) > 0.4 * cores():
        console.print(story.busy(load, cores()), style="yellow")
    console.print()

    folder = make_log_dir(None)
    data = folder / "digits.pt"
    try:
        _write_digits(data)
        runs = [_train(name, size, emulation, data, console) for name in TITLES]
    finally:
        data.unlink(missing_ok=True)
    _conclude(console, runs, shares, size.target, folder, args.json)
    return 0


def _cluster(spec: str) -> emulations.Emulation:
    emulation = emulations.parse(spec, None, cores())
    if any(worker.cpu is None for worker in emulation.workers):
        raise UsageError(f"--emulate {spec}: the demo trains on CPUs: give every worker cores, as HL8 does")
    if emulation.nproc < 2:
        raise UsageError(f"--emulate {spec}: one worker alone has nobody to wait for: give two or more")
    with Emulator(emulation):  # says now if this machine does not allow it
        return emulation


def _load() -> float:
    """How many processes want to run already."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return 0.0


def _train(name: str, size: Size, emulation: emulations.Emulation, data: Path, console: Console) -> story.Run:
    """One of the two trainings, with its live view."""
    folder, title = data.with_name(name), TITLES[name]
    if name == "omni" and size.mode == "async":
        title = ASYNC
    shares = [worker.cpu or 0.0 for worker in emulation.workers]
    equal_start = _equal_start(emulation, data.with_name("cluster.toml"))
    options: dict[str, object] = {**asdict(size), "data": data, "seed": SEED}
    if equal_start:
        options["cores"] = ",".join(map(str, shares))
    script = [str(Path(__file__).with_name(f"{name}.py"))]
    script += [word for option, value in options.items() for word in (f"--{option}", str(value))]
    number = list(TITLES).index(name) + 1
    view = LiveView(folder, f"{number}. {title}", epochs=size.epochs, target=size.target, console=console)
    view.starting, view.cores = story.starting(equal_start), shares
    cluster = str(data.with_name("cluster.toml")) if equal_start else emulation.spec
    with _launched(folder, cluster, script) as process, view:
        view.follow(_until_over(process, title, size.seconds))
    console.print()
    if process.returncode:
        raise OmniLearnError(_failure(title, folder, process.returncode))
    return story.Run.of(title, view.board)


def _equal_start(emulation: emulations.Emulation, path: Path) -> bool:
    """Write the same cluster with equal cores until step 1, where its slowest worker would load PyTorch for long."""
    shares = [worker.cpu or 0.0 for worker in emulation.workers]
    plain = all(worker == emulations.Worker(cpu=worker.cpu) for worker in emulation.workers)
    start = min(emulations.scaled([1] * len(shares), cores())[0], 0.99)  # below 1: one thread, as with less
    if not plain or emulation.changes or min(shares) >= min(start, 0.4):
        return False
    lines = [f"[[worker]]\ncpu = {start}\n"] * len(shares) + [f"[[change]]\nat_step = 1\ncpu = {shares}\n"]
    path.write_text("# Equal cores while PyTorch is loaded; training is with those of the change.\n" + "\n".join(lines))
    return True


def _write_digits(path: Path) -> None:
    import torch

    from omnilearn.bench.workloads import digits

    parts = {name: digits(train=name == "train") for name in ("train", "test")}
    torch.save({name: (part.x, part.y) for name, part in parts.items()}, path)


@contextlib.contextmanager
def _launched(folder: Path, spec: str, script: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """``omnilearn run`` with its output in a file; ended when the block is left early."""
    folder.mkdir()
    command = [sys.executable, "-m", "omnilearn", "run", "--emulate", spec, "--log-dir", str(folder), *script]
    # The emulated clusters are of cores: where there is a card, it is not used.
    environment = {**os.environ, "OMNILEARN_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDS_WITHIN)


def _until_over(process: subprocess.Popen[bytes], title: str, seconds: float) -> Callable[[], bool]:
    """Whether the process still runs; an error when that is no longer to be expected."""
    deadline = time.monotonic() + LONGEST_START + 2 * seconds

    def alive() -> bool:
        if time.monotonic() > deadline:
            raise OmniLearnError(
                f"{title!r} did not end in {LONGEST_START + 2 * seconds:.0f} s: its workers were ended"
            )
        return process.poll() is None

    return alive


def _failure(title: str, folder: Path, code: int) -> str:
    lines = (folder / "output.txt").read_text(errors="replace").rstrip().splitlines()
    return "\n".join([f"{title!r} failed (exit code {code}); {folder} has its logs. Its last words:", *lines[-25:]])


def _emulated_by(folder: Path) -> str:
    """How the launcher said it limits the workers."""
    said = re.search(r"^omnilearn: emulating .*\((.+)\)$", (folder / "output.txt").read_text(errors="replace"), re.M)
    return said[1] if said else "unknown"


def _conclude(
    console: Console, runs: Sequence[story.Run], shares: list[float], target: float, folder: Path, json: str | None
) -> None:
    from rich import box
    from rich.table import Table

    header, *rows = story.table(runs, target)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, name in enumerate(header):
        shown.add_column(name, justify="right" if column else "left")
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    console.print()
    ddp, omni = runs
    console.print(story.conclusion(ddp, omni, shares, target), style="bold")
    how = _emulated_by(folder / "ddp")
    console.print(f"Times are of training alone, without start and evaluation. Emulated: {how}.", style="dim")
    record = Record(
        "demo",
        rows=[{**asdict(run), "target": target, "cores": shares} for run in runs],
        summary={"speed_up": story.speed_up(ddp, omni), "reached": ddp.reached and omni.reached, "emulated_by": how},
    )
    for path in (folder / "summary.json", *([Path(json)] if json else [])):
        record.write(path)
    console.print()
    report.write([folder / name for name in TITLES], folder / "report.html")
    console.print(f"Events, logs and summary.json of both runs: {_short(folder)}", soft_wrap=True)
    console.print(f"Report with figures, to open in a browser: {_short(folder / 'report.html')}", soft_wrap=True)


def _short(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)
