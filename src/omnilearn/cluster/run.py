"""``omnilearn run``: torchrun's options, a log folder, and an emulated cluster if asked.

Everything that can be wrong in the arguments is said before a process starts (exit code 2).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from omnilearn.cluster import emulation as emulations
from omnilearn.cluster import rendezvous, tf_run
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.launch import Interrupted, launch, signals_raise
from omnilearn.cluster.meeting import Meeting
from omnilearn.cluster.resources import cores
from omnilearn.errors import InfeasibleError, UsageError
from omnilearn.observe.beside import beside

_claimed: list[Any] = []
"""What makes this launcher the host of a meeting; kept until the process ends."""
OURS = ("--nproc", "--nproc-per-node", "--nnodes", "--emulate", "--emulate-by", "--max-restarts", "--rdzv-endpoint")
"""Options that hardly any script has itself."""
USAGE = "omnilearn run [--nproc N] [--emulate SPEC] [--log-dir DIR] [torchrun's options] script.py [arguments]"

DESCRIPTION = """\
Start a training script on several workers: torchrun inside, with its options. Each worker's lines carry its
rank; if one fails, its error is shown and all end; Ctrl-C ends all (after 5 seconds by force)."""

EPILOG = """\
examples:
  omnilearn run --nproc 4 train.py --epochs 10        four workers on this machine
  omnilearn run --nproc gpu train.py                  one worker for each card
  omnilearn run --emulate HL8 train.py                four unequal workers, fastest = 8 × slowest
  omnilearn run --emulate 1,1,2 train.py              three workers, their cores in this ratio
  omnilearn run --emulate cpu=0.5,1.2 train.py        two workers with so many cores
  omnilearn run --emulate mps=25,75 train.py          two workers share a card (CUDA MPS, percent)
  omnilearn run --emulate cluster.toml train.py       CPU, memory, network, changes (docs/launch.md)
  omnilearn run -m package.train                      a module
  omnilearn run --framework tensorflow --nproc 3 train.py           each process gets its TF_CONFIG
  omnilearn run --framework tensorflow --nproc 3 --ps 1 train.py    mode="async": a parameter server too

several hosts (the same command on each; HOST is any one of them):
  omnilearn run --nnodes 2 --nproc 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --rdzv-id job1 train.py

workers find in their environment, besides torchrun's variables: OMNILEARN_LOG_DIR, and when emulated
OMNILEARN_EMULATE (what is played) and OMNILEARN_PROGRESS (a file for the step, for schedules by step)

exit codes: 0 success, 2 wrong use, 130 interrupted, else that of the worker that failed first"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage, parser.description, parser.epilog = USAGE, DESCRIPTION, EPILOG
    ours = parser.add_argument_group("main options")
    torchrun = _torchrun_parser()
    theirs = parser.add_argument_group("torchrun's options") if torchrun else parser
    for action in (torchrun or tf_run.plain_parser())._actions:
        if action.dest in ("help", "log_dir"):
            continue
        if action.dest == "nproc_per_node":
            action.option_strings = ["--nproc", *action.option_strings]
            action.help = "workers on this machine: a number, or auto, gpu, cpu (default: as the emulation says, or 1)"
            action.metavar = "N"
            action.default = os.environ.get("PET_NPROC_PER_NODE")
            ours._add_action(action)
        elif action.option_strings:
            if action.dest == "shutdown_timeout":
                action.help = "seconds until workers that do not end are ended by force (default: 5)"
            theirs._add_action(action)
        else:
            action.help = {"training_script": "the script to run", "training_script_args": "its arguments"}[action.dest]
            parser._add_action(action)
    # Those who have no PyTorch get what they can use.
    ours.add_argument(
        "--framework", choices=("pytorch", "tensorflow"), default="pytorch" if torchrun else "tensorflow",
        help="what the script trains with; tensorflow: a TF_CONFIG for each process (default: %(default)s)",
    )  # fmt: skip
    ours.add_argument(
        "--ps", type=int, default=0, metavar="N",
        help="TensorFlow's mode='async': N parameter servers and a chief beside the workers (default: 0)",
    )  # fmt: skip
    theirs_only = {action.dest: action.default for action in torchrun._actions} if torchrun else {}
    parser.set_defaults(torchrun_defaults=theirs_only)
    ours.add_argument(
        "--emulate", metavar="SPEC", help=f"play a heterogeneous cluster on this machine: {emulations.FORMS}"
    )
    ours.add_argument(
        "--emulate-by",
        choices=("auto", "cgroup", "affinity", "throttle"),
        default="auto",
        help="how CPU shares are enforced (default: the best this machine allows)",
    )
    ours.add_argument(
        "--no-live",
        dest="live",
        action="store_false",
        help="no view of the workers below their output (without a terminal: no line every minute)",
    )
    ours.add_argument(
        "--log-dir", "--log_dir", metavar="DIR", help="where logs and events go (default: runs/DATE-TIME)"
    )


def _torchrun_parser() -> argparse.ArgumentParser | None:
    """torchrun's own parser, or None where there is no PyTorch."""
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ
    try:
        # torch reads it once, while it is imported: no C++ stack traces from the launcher; workers keep theirs.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from torch.distributed.run import get_args_parser
    except ImportError:
        return None
    finally:
        if quiet:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
    parser: argparse.ArgumentParser = get_args_parser()
    return parser


def main(args: argparse.Namespace) -> int:
    before = dict(os.environ)
    try:
        with signals_raise():
            return _main(args)
    except (UsageError, InfeasibleError) as error:
        print(f"omnilearn run: {error}", file=sys.stderr)
        return 2
    except Interrupted as error:
        print(f"omnilearn: ended by {error}", file=sys.stderr)
        return 128 + error.number
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(args: argparse.Namespace) -> int:
    _check_script(args)
    _check_words(args)
    if args.framework == "tensorflow":
        return _main_tensorflow(args)
    if args.ps:
        raise UsageError("--ps is for --framework tensorflow: PyTorch's mode='async' starts its server by itself")
    try:
        from torch.distributed.run import config_from_args, determine_local_world_size
    except ImportError:
        raise UsageError("PyTorch is not installed here: use --framework tensorflow, or pip install torch") from None
    single = _check_nodes(args)
    try:
        nproc = None if args.nproc_per_node is None else int(determine_local_world_size(args.nproc_per_node))
    except ValueError as error:
        raise UsageError(f"--nproc {args.nproc_per_node}: {error}") from error
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc}: at least one worker is needed")
    emulation = _emulation(args, nproc, single)
    fewest, _, most = args.nnodes.partition(":")
    if args.max_restarts or most not in ("", fewest):  # machines that come make all start again, too
        _expect_restarts(emulation)
    args.nproc_per_node = str(emulation.nproc)
    if args.redirects == "0" and args.tee == "0":
        args.tee = "3"
    if getattr(args, "shutdown_timeout", 0) is None and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" not in os.environ:
        args.shutdown_timeout = 5
    with Emulator(emulation, by=args.emulate_by, say=_say) as emulator:
        meeting: Meeting | None = None
        log_dir = make_log_dir(args.log_dir)
        args.log_dir = str(log_dir / "logs")
        if single:
            # A free port on this machine, as torchrun --standalone; the workers' way to it may be a bridge.
            args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", "run"
            args.local_addr = args.local_addr or emulator.host_address
        elif args.nnodes not in ("1", "1:1"):
            meeting = _meet(args, emulator)
        os.environ["OMNILEARN_LOG_DIR"] = str(log_dir)
        # torchrun would set 1 and warn; emulated workers get their own number on the way in.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores()) // emulation.nproc)))
        try:
            config, command, arguments = config_from_args(args)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise UsageError(str(error)) from error
        if not isinstance(command, str) and args.emulate:
            raise UsageError("--run-path starts no program of its own, so it cannot be emulated: leave it out")
        with beside(log_dir, live=args.live), meeting.waiting() if meeting else contextlib.nullcontext():
            code = launch(config, command, arguments, emulator, log_dir, met=meeting.over if meeting else None)
    return _ended(code, log_dir)


def _ended(code: int, log_dir: Path) -> int:
    if any(log_dir.glob("rank-*.jsonl")) and not code:
        shown = os.path.relpath(log_dir) if Path.cwd() in log_dir.parents else log_dir
        _say(f"for a page with figures: omnilearn report {shown}")
    return code


def _main_tensorflow(args: argparse.Namespace) -> int:
    nproc = tf_run.check(args, args.torchrun_defaults)
    emulation = _emulation(args, nproc, single=True)
    with Emulator(emulation, by=args.emulate_by, say=_say) as emulator:
        log_dir = make_log_dir(args.log_dir)
        os.environ["OMNILEARN_LOG_DIR"] = str(log_dir)
        # After the emulation was prepared: its workers have their own numbers.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(cores()) // emulation.nproc)))
        with beside(log_dir, live=args.live):
            code = tf_run.launch(tf_run.command(args), args.ps, emulator, log_dir)
    return _ended(code, log_dir)


def _expect_restarts(emulation: emulations.Emulation) -> None:
    """Have workers that are started again meet in a store of their own: in the agent's, where torch would have them
    meet, they find the addresses of those before them (pytorch issues 135712, 167288)."""
    if emulation.uses("bandwidth", "latency"):
        raise UsageError(
            f"emulation {emulation.spec!r} limits the network, where workers cannot be started again: leave "
            "bandwidth and latency out, or --max-restarts"
        )
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def _meet(args: argparse.Namespace, emulator: Emulator) -> Meeting | None:
    """Fill in what torchrun would guess from the hostname: who is the meeting place, and how we are reached."""
    endpoint = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    address = args.local_addr or rendezvous.local_address(endpoint)
    host = rendezvous.is_host(endpoint)
    if args.rdzv_backend == "c10d":
        if host:
            _claimed.append(rendezvous.claim(endpoint))  # two launchers of one machine may both find it free
            host = _claimed[-1] is not None
        if host is not None and "is_host" not in args.rdzv_conf:
            args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(host)}"]))
        args.local_addr = address
    elif args.rdzv_endpoint and args.rdzv_backend == "static":
        _say(
            f"--rdzv-endpoint {args.rdzv_endpoint} without --rdzv-backend: torchrun's default, static, needs "
            f"--node-rank on each host; hosts that find each other need --rdzv-backend c10d"
        )
    name = rendezvous.interface(address) if address else None
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    fewest = int(str(args.nnodes).partition(":")[0])
    return Meeting(endpoint, fewest, host, _say, emulator.close) if fewest > 1 else None


def _say(line: str) -> None:
    print(f"omnilearn: {line}", file=sys.__stderr__, flush=True)


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    if args.module:
        top = script.partition(".")[0]
        if not any((Path(top + end)).exists() for end in ("", ".py")) and importlib.util.find_spec(top) is None:
            raise UsageError(f"module {script!r} was not found: is the current folder right?")
    elif args.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"program {script!r} was not found, or may not be executed")
    elif not Path(script).is_file():
        raise UsageError(
            f"script {script!r} was not found in {os.getcwd()}: check the path (a module needs -m, and "
            "options of omnilearn come before the script)"
        )


def _check_words(args: argparse.Namespace) -> None:
    """Say which of the script's arguments look like options of ours: those come before the script."""
    for word in args.training_script_args:
        if word.partition("=")[0].replace("_", "-") in OURS:
            _say(
                f"{word} stands behind {args.training_script}, which gets it: options of omnilearn run come before the "
                f"script"
            )


def _check_nodes(args: argparse.Namespace) -> bool:
    """Whether this machine is the whole cluster and no meeting place was named."""
    named = bool(args.rdzv_endpoint) or args.master_port is not None
    if args.nnodes in ("1", "1:1"):
        return args.standalone or not named
    if not named:
        raise UsageError(
            f"--nnodes {args.nnodes} needs a place to meet: --rdzv-backend c10d --rdzv-endpoint HOST:PORT on "
            "every host, or --node-rank, --master-addr and --master-port"
        )
    return False


def _emulation(args: argparse.Namespace, nproc: int | None, single: bool) -> emulations.Emulation:
    if args.emulate is None:
        return emulations.Emulation("none", (emulations.Worker(),) * (nproc or 1))
    emulation = emulations.parse(args.emulate, nproc, cores())
    if emulation.uses("bandwidth", "latency") and not single:
        raise UsageError(
            f"emulation {args.emulate!r} limits the network, which works on one machine only: leave "
            "bandwidth and latency out, or --nnodes"
        )
    return emulation


def make_log_dir(asked: str | None) -> Path:
    """The folder asked for, or a new one named by the time; it exists afterwards."""
    try:
        if asked is not None:
            Path(asked).mkdir(parents=True, exist_ok=True)
            return Path(asked).resolve()
        base = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
        for n in range(1000):
            folder = base if n == 0 else base.with_name(f"{base.name}-{n}")
            try:
                folder.mkdir(parents=True)
                return folder.resolve()
            except FileExistsError:
                continue
    except OSError as error:
        raise UsageError(f"the log folder {asked or 'runs'!r} cannot be made: {error.strerror}") from error
    raise UsageError("no free name below runs/: give --log-dir")
