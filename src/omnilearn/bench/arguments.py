"""Arguments that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from omnilearn.bench.workloads import ANY_IMAGE, NAMES, Size
from omnilearn.cluster.emulation import FORMS, LEVELS


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
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 (autocast)")


def size_of(args: argparse.Namespace) -> Size:
    return Size(args.size, args.batch, args.image, args.bf16)


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
