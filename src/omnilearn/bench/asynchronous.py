"""Asynchronous training at the papers' levels: plain ASP, dynamic batching, the staleness rules, and synchronous mode.

All contestants train from the same first weights and take turns epoch by epoch; only training counts as time. Accuracy
is compared over equal time and after equal samples. What became of every gradient comes from the runs' own events.

With ``--emulate`` the cluster is another one: shares of a card, a card beside a CPU.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from omnilearn.bench import transport
from omnilearn.bench.arguments import add_cluster, add_levels, add_models, check_workloads, positive, size_of
from omnilearn.bench.block import Block
from omnilearn.bench.gang import Gang
from omnilearn.bench.names import Size
from omnilearn.bench.oracle import show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.workloads import workload
from omnilearn.cluster.emulation import parse
from omnilearn.cluster.resources import cores
from omnilearn.observe import read

LEVELS = ("HL1", "HL2", "HL4", "HL8")
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("uniform", {"lr_scaling": "none"}),
    "dynamic": ("optimal", {}),
    "dynamic, scale": ("optimal", {"staleness": "scale"}),
    "dynamic, discard": ("optimal", {"staleness": "discard"}),
    "dynamic, bounded": ("optimal", {"staleness": "bounded"}),
    "sync": ("optimal", {}),
}
STEPS = {"digits": 11}
"""Global batches in an epoch: nearly all digits; elsewhere what takes some seconds."""
DEFAULT_STEPS = 8
IMAGES = {"heavy": 16}
"""Smaller than usual, for more epochs in the same time: accuracy has begun to settle when it is compared."""
EPOCHS = 8
HARDEST = "HL8"
"""The level with goals for accuracy: it has several seeds."""
CLIP = 1.0
"""All contestants clip their gradients to this norm: without it SGD diverges on *heavy*, in synchronous mode too."""
GOALS = {
    "staleness_p95_vs_plain": {HARDEST: 0.5},
    "accuracy_gain_vs_plain": {HARDEST: 0.0},
    "samples_per_s_vs_plain": 0.95,
    "round_trips_vs_transport": 0.9,
}
ROUND_TRIPS = {
    "round_trips_vs_transport": "ratio",
    "sent_vs_messages": "sent_vs_messages",
    "sent_vs_needed": "sent_vs_needed",
}
"""In the summary, from the transport's rows: the worst of them."""
COMPARED = "over the second half of the time that all had"
"""When accuracy is, as ``History.accuracy_within`` has it."""
WORKERS = (1, 2, 4, 8)
PARAMETERS = 1_000_000
TIMEOUT = 1800.0
"""A contestant waits for its turn; nobody must give it up meanwhile."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_levels(parser, LEVELS)
    add_cluster(parser, "another cluster instead of the levels, without round trips unless --workers asks for them")
    add_models(parser, ("digits", "heavy"))
    parser.add_argument("--epochs", type=positive, help=f"each (default: {EPOCHS}; quick: 2)")
    parser.add_argument(
        "--workers", type=positive, nargs="+", metavar="N", help=f"for the round trips ({' '.join(map(str, WORKERS))})"
    )
    parser.add_argument(
        "--seeds", type=positive, help=f"repetitions (default: 3 at {HARDEST}, 1 elsewhere and with --quick)"
    )


@dataclass
class History:
    """One contestant with one seed: seconds so far and accuracy after each epoch, and what the events say."""

    points: list[tuple[float, float]] = field(default_factory=list)
    samples: int = 0
    updates: list[int] = field(default_factory=list)  # by worker
    staleness: list[int] = field(default_factory=list)
    dropped: int = 0
    batches: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        return self.points[-1][0]

    def accuracy_within(self, seconds: float) -> float:
        """The mean over the second half of so long, in a straight line between epochs: one epoch's is much luck."""
        times, accuracies = zip((0.0, 0.0), *self.points, strict=True)
        return float(np.interp(np.linspace(seconds / 2, seconds, 101), times, accuracies).mean())


def run(args: argparse.Namespace) -> Record:
    emulation = parse(args.emulate, None, cores(), "async") if args.emulate else None
    workers = emulation.nproc if emulation else 4
    check_workloads(args, workers, len(CONTESTANTS), servers=len(CONTESTANTS) - 1, equally=False)
    levels = (args.emulate,) if args.emulate else args.levels
    counts = args.workers or (() if args.emulate else WORKERS)
    seeds = {level: args.seeds or (3 if level == HARDEST and not args.quick else 1) for level in levels}
    total = len(counts) + sum(seeds.values()) * len(args.model) * (1 + epochs_of(args))
    rows: list[Row] = []
    summary: dict[str, Any] = {
        "goals": GOALS, "compared": COMPARED, "contestants": list(CONTESTANTS), "seeds": seeds, "levels": {},
    }  # fmt: skip
    with Progress("async", total) as progress:
        trips: list[Row] = []
        for count in counts:
            progress.now(f"round trips of {count} workers")
            trips.append(transport.measure(count, PARAMETERS, 0.5 if args.quick else 1.0, 1 if args.quick else 3))
            summary |= {key: min(row[column] for row in trips) for key, column in ROUND_TRIPS.items()}
            Record("async", rows + trips, summary).keep(args.json)
            progress.done(f"round trips of {count} workers")
        with Gang(emulation=emulation) as gang, tempfile.TemporaryDirectory(prefix="omnilearn-bench-") as logs:
            summary["emulation"], summary["devices"] = gang.emulator.how, gang.devices
            for level in levels:
                if emulation is None:
                    gang.level(level, "async")
                outcomes = summary["levels"][level] = {}
                for name in args.model:
                    histories: dict[str, list[History]] = {}
                    for seed in range(seeds[level]):
                        folder = Path(logs, f"{level}-{name}-{seed}")
                        for contestant, history in train(gang, level, name, args, seed, folder, progress).items():
                            histories.setdefault(contestant, []).append(history)
                    rows += [describe(level, name, who, runs, histories) for who, runs in histories.items()]
                    outcomes[name] = compare(histories)
                    Record("async", rows + trips, summary).keep(args.json)
    return Record("async", rows + trips, summary)


def epochs_of(args: argparse.Namespace) -> int:
    return int(args.epochs or (2 if args.quick else EPOCHS))


def size_for(name: str, args: argparse.Namespace) -> Size:
    """As asked for; small images where that leaves it open."""
    size = size_of(args)
    return size if size.image or size.kind != "small" else replace(size, image=IMAGES.get(name))


def train(
    gang: Gang, level: str, name: str, args: argparse.Namespace, seed: int, folder: Path, progress: Progress
) -> dict[str, History]:
    """Every contestant's history."""
    steps, batch = STEPS.get(name, DEFAULT_STEPS), workload(name, size_for(name, args)).global_batch
    witness = max(range(gang.size), key=lambda k: (gang.devices[k] != "cpu", gang.nominal[k]))  # the quickest to ask
    histories = {who: History(updates=[0] * gang.size) for who in CONTESTANTS}
    with gang.session(name, size_for(name, args), watch=False):
        for who, (policy, own) in CONTESTANTS.items():
            options = {"seed": seed, "timeout": TIMEOUT, "log_dir": str(folder / who), "clip": CLIP, **own}
            if who != "sync":
                options["nonfinite"] = "skip"  # counted as dropped; one contestant's bad luck must not end all
            kind = "open_omni" if who == "sync" else "open_async"
            gang.all(kind, who, steps, policy, options, doing=f"setting up {who}")
        progress.done(f"{level} {name}, seed {seed}: set up")
        for epoch in range(epochs_of(args)):
            for who in list(CONTESTANTS)[:: 1 if epoch % 2 else -1]:
                progress.now(f"{level} {name}, seed {seed}, epoch {epoch + 1}: {who}")
                blocks, history = gang.all("block", who, doing=f"an epoch of {who}"), histories[who]
                before = history.points[-1][0] if history.points else 0.0
                history.points.append((before + span(blocks), gang.all("accuracy", who, witness)[witness]))
                history.samples += steps * batch
                history.batches = tuple(usual_batch(block.samples) for block in blocks)
                if who == "sync":
                    history.updates = [steps * (epoch + 1)] * gang.size
                    history.staleness += [0] * steps
            progress.done(f"{level} {name}, seed {seed}: epoch {epoch + 1} of {epochs_of(args)}")
    for who in CONTESTANTS:
        if who != "sync":
            _count(histories[who], folder / who)
    return histories


def span(blocks: Sequence[Block]) -> float:
    """Seconds from the first worker's begin to the last one's end."""
    return max(block.end for block in blocks) - min(block.begin for block in blocks)


def usual_batch(samples: dict[int, int]) -> int:
    """The batch of most of a worker's last steps."""
    last = [size for _, size in sorted(samples.items())][-5:]
    return max(set(last), key=last.count) if last else 0


def _count(history: History, folder: Path) -> None:
    for event in read(folder):
        if event["kind"] == "updates":
            history.staleness += event["staleness"]
            history.dropped += event["weight"].count(0.0)
            for worker in event["worker"]:
                history.updates[worker] += 1


def describe(level: str, name: str, who: str, runs: list[History], all_runs: dict[str, list[History]]) -> Row:
    staleness = np.concatenate([np.asarray(run.staleness or [0]) for run in runs])
    updates = len(staleness) - sum(run.dropped for run in runs)
    seconds = sum(run.seconds for run in runs)
    after = [run.accuracy_within(_equal_time(all_runs, k)) for k, run in enumerate(runs)]
    final = [run.points[-1][1] for run in runs]
    return {
        "level": level,
        "workload": name,
        "contestant": who,
        "updates_per_s": updates / seconds,
        "samples_per_s": sum(run.samples for run in runs) / seconds,
        "updates_by_worker": show(tuple(np.sum([run.updates for run in runs], axis=0).tolist())),
        "staleness_mean": float(staleness.mean()),
        "p50": float(np.percentile(staleness, 50)),
        "p95": float(np.percentile(staleness, 95)),
        "max": int(staleness.max()),
        "accuracy_equal_samples": float(np.mean(final)),
        "accuracy_equal_time": float(np.mean(after)),
        "spread": float(np.ptp(after)),
        "batches": show(runs[-1].batches),
    }


def _equal_time(histories: dict[str, list[History]], seed: int) -> float:
    """The time that all had."""
    return min(runs[seed].seconds for runs in histories.values())


def compare(histories: dict[str, list[History]]) -> dict[str, Any]:
    """Dynamic batching against plain ASP and synchronous mode, seed by seed; and each rule against plain ASP."""
    plain, sync = histories["plain"], histories["sync"]

    def at_equal_time(who: str) -> Any:
        return np.array([run.accuracy_within(_equal_time(histories, k)) for k, run in enumerate(histories[who])])

    def p95(who: str) -> float:
        return float(np.percentile(np.concatenate([np.asarray(run.staleness) for run in histories[who]]), 95))

    def speed(runs: list[History]) -> Any:
        return np.array([run.samples / run.seconds for run in runs])

    found: dict[str, Any] = {}
    for who in (name for name in histories if name not in ("plain", "sync")):
        runs = histories[who]
        gain = 100 * (at_equal_time(who) - at_equal_time("plain"))
        equal_samples = [100 * (a.points[-1][1] - b.points[-1][1]) for a, b in zip(runs, plain, strict=True)]
        found[who] = {
            "staleness_p95_vs_plain": p95(who) / max(p95("plain"), 1e-9),
            "accuracy_gain_vs_plain": float(np.median(gain)),
            "accuracy_gain_spread": [float(gain.min()), float(gain.max())],
            "accuracy_gain_equal_samples": float(np.median(equal_samples)),
            "accuracy_gap_to_sync": float(np.median(100 * (at_equal_time("sync") - at_equal_time(who)))),
            "samples_per_s_vs_plain": median_and_spread(speed(runs) / speed(plain))["median"],
            "samples_per_s_vs_sync": median_and_spread(speed(runs) / speed(sync))["median"],
        }
    return {**found["dynamic"], "rules": {who: own for who, own in found.items() if who != "dynamic"}}
