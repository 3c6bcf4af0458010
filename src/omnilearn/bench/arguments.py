"""Arguments that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from importlib.util import find_spec

from omnilearn.bench.names import ANY_IMAGE, NAMES, TF_NAMES, Size, workload
from omnilearn.cluster.emulation import FORMS, LEVELS
from omnilearn.cluster.resources import has_card, ram
from omnilearn.errors import InfeasibleError, UsageError


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """A list of names separated by commas, each of them known."""
    spelled = {name.lower(): name for name in known}

    def read(text: str) -> tuple[str, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        for word in words:
            if word.lower() not in spelled:
                raise argparse.ArgumentTypeError(f"unknown name {word!r}: choose from {', '.join(spelled.values())}")
        if not words:
            raise argparse.ArgumentTypeError(f"give at least one of {', '.join(spelled.values())}")
        return tuple(dict.fromkeys(spelled[word.lower()] for word in words))

    return read


def add_models(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    parser.add_argument(
        "--model",
        type=names(NAMES),
        default=default,
        help=f"workloads, of {', '.join(NAMES)} (default: {','.join(default)})",
    )
    add_size(parser)


def add_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=("small", "full"), default="small", help="of the models (default: small)")
    parser.add_argument("--batch", type=positive, help="global batch (default: the workload's own)")
    parser.add_argument("--image", type=positive, help=f"image side, for {', '.join(ANY_IMAGE)}")
    parser.add_argument("--length", type=positive, help="tokens of a sequence, for gpt2")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")


def add_compress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compress", action="store_true", help="also OmniLearn with gradients sent in bfloat16")


def size_of(args: argparse.Namespace) -> Size:
    return Size(args.size, args.batch, args.image, args.bf16, args.length)


def add_framework(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--framework",
        choices=("pytorch", "tensorflow"),
        default="pytorch",
        help=f"what to train with; tensorflow has the workloads {', '.join(TF_NAMES)} (default: pytorch)",
    )


def check_workloads(
    args: argparse.Namespace, workers: int, contestants: int = 1, *, servers: int = 0, equally: bool = True
) -> None:
    """Refuse what was asked for and is not there, before anything starts.

    In each of so many ``workers`` so many ``contestants`` take turns, with a model of their own, as each server has.
    ``equally``: uniform DDP is one of them, so the global batch must be so many times the same.
    """
    framework = getattr(args, "framework", "pytorch")
    missing = [name for name in args.model if framework == "tensorflow" and name not in TF_NAMES]
    if missing:
        raise UsageError(f"there is no {', '.join(missing)} for TensorFlow: choose from {', '.join(TF_NAMES)}")
    if framework == "tensorflow" and getattr(args, "device", "cpu") != "cpu":
        raise UsageError("TensorFlow is measured on CPUs: leave --device out")
    if framework == "tensorflow" and find_spec("tensorflow") is None:
        raise UsageError("tensorflow is not installed here: leave --framework out, or pip install -e '.[tensorflow]'")
    if getattr(args, "device", "cpu") == "cuda" and not has_card():
        raise UsageError("--device cuda: there is no card here")
    for name in args.model:
        what = workload(name, size_of(args), framework)
        if name == "digits":
            (what.data if framework == "tensorflow" else what.dataset)(1)  # says now if scikit-learn is missing
        if equally and what.global_batch % workers:
            near = max(what.global_batch // workers, 1) * workers
            raise InfeasibleError(
                f"{name} has a global batch of {what.global_batch}, which {workers} workers cannot share equally as "
                f"uniform DDP does: give --batch {near} or --batch {near + workers}"
            )
        if framework == "pytorch" and not has_card():
            need, there = workers * what.memory(contestants) + servers * what.memory(1), ram()
            if need > there:
                beside = f" and {servers} servers" if servers else ""
                raise InfeasibleError(
                    f"{name} needs at least {need / 1e9:.0f} GB of memory for {workers} workers with {contestants} "
                    f"models each{beside}, and there are {there / 1e9:.0f} GB here: choose another one, or --size small"
                )


def add_levels(parser: argparse.ArgumentParser, default: tuple[str, ...]) -> None:
    parser.add_argument(
        "--levels",
        type=names(LEVELS["sync"]),
        default=default,
        help=f"the papers' heterogeneity levels (default: {','.join(default)})",
    )


def add_cluster(parser: argparse.ArgumentParser, instead: str) -> None:
    parser.add_argument("--emulate", metavar="SPEC", help=f"{instead}: {FORMS}")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where workers compute; they may share a card"
    )
