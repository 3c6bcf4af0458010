"""What each part is worth: OmniLearn on real data at HL8, and without one part at a time.

All variants train on scikit-learn's digits from the same first weights and take turns epoch by epoch, until the
test accuracy is reached or the epochs are over. Only training counts as time. Learning-rate scaling belongs to
asynchronous mode, where it is left out in turn: in synchronous mode the global batch is constant, nothing is scaled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from omnilearn.bench import oracle
from omnilearn.bench.arguments import add_levels, positive
from omnilearn.bench.asynchronous import TIMEOUT, span, usual_batch
from omnilearn.bench.gang import Batches, Gang, Trace
from omnilearn.bench.oracle import show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.workloads import Workload, workload
from omnilearn.errors import InfeasibleError

STEPS = 11
"""Of an epoch: 1,408 of the 1,437 digits."""
VARIANTS = {
    "full": "OmniLearn as it is",
    "no weighting": "a balanced fixed split, workers' gradients averaged as if their batches were equal",
    "same split, weighted": "for comparison with the line above",
    "no dynamic control": "policy static: nominal core counts, once",
    "no parking": "park=False",
    "uniform DDP": "none of it",
    "async": "OmniLearn's asynchronous mode as it is",
    "async, no LR scaling": "lr_scaling='none': small batches move the parameters as far as large ones",
    "async, no dynamic control": "policy uniform and no LR scaling: plain asynchronous training (ASP)",
}


Histories = dict[tuple[str, str], dict[int, list[tuple[float, float]]]]
"""By level and variant, and by seed: (seconds so far, test accuracy) after each epoch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_levels(parser, ("HL8",))
    parser.add_argument(
        "--size",
        choices=("small", "full"),
        default="small",
        help="small: a CNN; full: a narrow ResNet-18 on the digits scaled up, for many cores (default: small)",
    )
    parser.add_argument("--accuracy", type=float, default=0.97, help="to be reached on the test digits (default: 0.97)")
    parser.add_argument("--epochs", type=positive, help="at most (default: 12, quick: 3)")
    parser.add_argument("--seeds", type=positive, help="repetitions (default: 3, quick: 1)")


def run(args: argparse.Namespace) -> Record:
    if not 0 < args.accuracy < 1:
        raise InfeasibleError(f"--accuracy must lie between 0 and 1, got {args.accuracy}")
    epochs, seeds = args.epochs or (3 if args.quick else 12), args.seeds or (1 if args.quick else 3)
    what = workload("digits", args.size)
    what.dataset(1)  # says now if scikit-learn is missing
    histories: Histories = {}
    last: dict[tuple[str, str], str] = {}
    with Progress("ablation", len(args.levels) * seeds * (epochs + 1)) as progress, Gang(4) as gang:
        for level in args.levels:
            gang.level(level)
            for seed in range(seeds):
                for outcome in train(gang, what, args.size, level, seed, epochs, args.quick, progress):
                    for variant, history, split in outcome:
                        histories.setdefault((level, variant), {})[seed] = history
                        last[level, variant] = show(split)
                    judge(what, histories, last, args.accuracy, epochs, seeds).keep(args.json)
    return judge(what, histories, last, args.accuracy, epochs, seeds)


def judge(
    what: Workload,
    histories: Histories,
    last: dict[tuple[str, str], str],
    wanted: float,
    epochs: int,
    seeds: int,
) -> Record:
    rows: list[Row] = []
    summary: dict[str, Any] = {
        "workload": what.describe,
        "accuracy": wanted,
        "epochs": epochs,
        "seeds": seeds,
        "variants": VARIANTS,
        "levels": {},
    }
    summary["left_out"] = "LR scaling in synchronous mode, where the global batch is constant and nothing is scaled"
    for (level, variant), by_seed in histories.items():
        runs = list(by_seed.values())
        times = [next((time for time, accuracy in run if accuracy >= wanted), None) for run in runs]
        known = [time for time in times if time is not None]
        reached = median_and_spread(known) if len(known) == len(times) else {}
        final = median_and_spread(run[-1][1] for run in runs)
        each = np.concatenate([np.diff([0.0, *(time for time, _ in run)]) for run in runs])
        row: Row = {
            "level": level,
            "variant": variant,
            "seconds_to_accuracy": reached.get("median"),
            "lower": reached.get("lower"),
            "upper": reached.get("upper"),
            "reached": f"{len(known)} of {len(times)}",
            "seconds_per_epoch": float(np.median(each)),
            "final_accuracy": final["median"],
            "final_lower": final["lower"],
            "final_upper": final["upper"],
            "batches": last[level, variant],
        }
        rows.append(row)
        summary["levels"].setdefault(level, {})[variant] = {
            "seconds_to_accuracy": row["seconds_to_accuracy"],
            "seconds_to_accuracy_spread": [row["lower"], row["upper"]],
            "seconds_per_epoch": row["seconds_per_epoch"],
            "final_accuracy": row["final_accuracy"],
            "final_accuracy_spread": [row["final_lower"], row["final_upper"]],
        }
    return Record("ablation", rows, summary)


def train(
    gang: Gang, what: Workload, size: str, level: str, seed: int, epochs: int, quick: bool, progress: Progress
) -> Iterator[list[tuple[str, list[tuple[float, float]], Batches]]]:
    """After every epoch, every variant's (seconds so far, test accuracy) after each, and the split it ended with."""
    batch = what.global_batch
    everybody = tuple(range(gang.size))
    witness = int(np.argmax(gang.shares))  # never parked first, and quick to evaluate
    with gang.session(what.name, size, watch=False) as least:
        balanced = oracle.over(oracle.measure_curve(gang, batch, least, quick), batch, least, everybody)
        assert balanced is not None
        uniform = (batch // gang.size,) * gang.size
        splits = {"no weighting": balanced, "same split, weighted": balanced, "uniform DDP": uniform}
        for variant in splits:
            gang.all("open_plain", variant, {"seed": seed, "weighted": variant != "no weighting"})
        policies = {
            "full": ("optimal", {}),
            "no dynamic control": ("static", {}),
            "no parking": ("optimal", {"park": False}),
        }
        for variant, (policy, options) in policies.items():
            gang.all("open_omni", variant, STEPS, policy, {"seed": seed, **options}, doing=f"setting up {variant}")
        asynchronous: dict[str, tuple[str, dict[str, Any]]] = {
            "async": ("optimal", {}),
            "async, no LR scaling": ("optimal", {"lr_scaling": "none"}),
            "async, no dynamic control": ("uniform", {"lr_scaling": "none"}),
        }
        for variant, (policy, own) in asynchronous.items():
            own = {"seed": seed, "timeout": TIMEOUT, **own}
            gang.all("open_async", variant, STEPS, policy, own, doing=f"setting up {variant}")
        progress.done(f"{level} seed {seed}: set up")
        histories: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
        ended: dict[str, Batches] = {}
        for epoch in range(epochs):
            for variant in VARIANTS if epoch % 2 else list(VARIANTS)[::-1]:
                blocks = gang.all("block", variant, *([STEPS, splits[variant]] if variant in splits else []))
                if variant in asynchronous:
                    seconds, ended[variant] = span(blocks), tuple(usual_batch(block.samples) for block in blocks)
                else:
                    trace = Trace.of(blocks)
                    seconds, ended[variant] = trace.total, trace.batches[-1]
                spent = (histories[variant][-1][0] if histories[variant] else 0.0) + seconds
                accuracy = gang.all("accuracy", variant, witness)[witness]
                histories[variant].append((spent, accuracy))
            progress.done(f"{level} seed {seed}: epoch {epoch + 1} of {epochs}")
            yield [(variant, histories[variant], ended[variant]) for variant in VARIANTS]
