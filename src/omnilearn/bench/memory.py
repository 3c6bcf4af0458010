"""What is it worth that memory bounds the micro-batch and not the share? One worker has too little for its share.

Its share is the one that its speed deserves, its memory a part of what that needs at once. *Capped* is plain DDP with
this worker's batch cut down to what fits and the rest spread over the others by speed: what one does by hand.
*Micro-batches* is OmniLearn by ``omni.step``, which finds out by itself. *Enough memory* is plain DDP with the same
shares and no limit. Nobody is parked: that is another question (``bench sync``).

Made for cards. On a CPU the limit counts what threads and malloc hold too, and a run may end for want of memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

from omnilearn.bench import oracle
from omnilearn.bench.arguments import add_cluster, add_models, check_workloads, positive, size_of
from omnilearn.bench.gang import Batches, Gang, Trace, joined
from omnilearn.bench.names import Size
from omnilearn.bench.oracle import SPLITS, WARM_UP, show
from omnilearn.bench.progress import Progress
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.bench.sync import describe
from omnilearn.cluster.emulation import parse
from omnilearn.cluster.resources import cores
from omnilearn.errors import InfeasibleError

CLUSTER = "1,1,2"
ENOUGH, CAPPED, MICRO = "enough memory", "capped", "micro-batches"
SAFE = 0.9
"""Of what was seen to fit, a user who caps takes so much."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster(parser, f"the cluster (default: {CLUSTER})")
    parser.add_argument("--worker", type=int, metavar="K", help="the one with little memory (default: the fastest)")
    parser.add_argument(
        "--room", type=float, default=0.35, help="its memory, as a part of what its share needs (default: 0.35)"
    )
    add_models(parser, ("gpt2",))
    parser.add_argument("--rounds", type=positive, help="how often all take their turn (default: 6, quick: 2)")


def run(args: argparse.Namespace) -> Record:
    emulation = parse(args.emulate or CLUSTER, None, cores())
    check_workloads(args, emulation.nproc, equally=False)
    if not 0 < args.room < 1:
        raise InfeasibleError(f"--room must lie between 0 and 1, got {args.room}")
    if args.worker is not None and not 0 <= args.worker < emulation.nproc:
        raise InfeasibleError(f"--worker {args.worker}: there are workers 0 to {emulation.nproc - 1}")
    rounds = args.rounds or (2 if args.quick else 6)
    rows: dict[str, list[Row]] = {}
    outcomes: dict[str, Any] = {}
    with (
        Progress("memory", len(args.model) * (rounds + 2)) as progress,
        Gang(emulation=emulation, keep_memory=False) as gang,
    ):
        worker = int(np.argmax(gang.nominal)) if args.worker is None else args.worker
        gang.all("scarce", worker, None)

        def record() -> Record:
            first = outcomes[args.model[0]]
            summary = {
                "emulate": emulation.spec,
                "worker": worker,
                "room": args.room,
                "gain_over_capping": first["gain_over_capping"],
                "workloads": outcomes,
                "emulation": gang.emulator.how,
            }
            return Record("memory", [row for own in rows.values() for row in own], summary)

        for name in args.model:
            contest = compare(gang, name, size_of(args), worker, args.room, rounds, args.quick, progress)
            for outcomes[name], rows[name] in contest:
                record().keep(args.json)
        return record()


def compare(
    gang: Gang, name: str, size: Size, worker: int, part: float, rounds: int, quick: bool, progress: Progress
) -> Iterator[tuple[dict[str, Any], list[Row]]]:
    """The outcome so far, after every round."""
    batch, steps = gang.workload(name, size).global_batch, 4 if quick else 8
    others = tuple(k for k in range(gang.size) if k != worker)
    with gang.session(name, size) as least:
        gang.all("open_plain", SPLITS, {})
        curve = oracle.measure_curve(gang, batch, least, quick)
        balanced = oracle.over(curve, batch, least, tuple(range(gang.size)))
        assert balanced is not None
        gang.block(SPLITS, WARM_UP + 1, balanced)  # what DDP holds counts as in use
        need = gang.all("need", worker, balanced[worker])[worker]
        room = int(part * need)
        gang.all("scarce", worker, 4 * need)  # from the start this worker's memory is its own, as OmniLearn sees it
        gang.all("open_step", MICRO, steps, "optimal", {"park": False}, doing=f"setting up {MICRO}")
        if gang.devices[worker] == "cpu":
            gang.block(MICRO)  # starts threads, whose stacks count against the limit there
        gang.all("scarce", worker, room)
        fits = gang.all("largest", worker, balanced[worker], least)[worker]
        if not least <= fits < balanced[worker]:
            raise InfeasibleError(
                f"{name}: {fits} of the {balanced[worker]} samples of worker {worker} fit into --room {part:g} "
                f"({room / 1e6:.0f} MB): {'more' if fits < least else 'less'} room makes a case"
            )
        cap = max(int(SAFE * fits), least)
        rest = oracle.over(curve, batch - cap, least, others)
        assert rest is not None
        capped: Batches = tuple(cap if k == worker else rest[k] for k in range(gang.size))
        progress.done(f"{name}: of {balanced[worker]} samples {fits} fit")
        for _ in range(3):
            gang.block(MICRO)
        progress.done(f"{name}: memory and speeds are learned")
        traces: dict[str, list[Trace]] = {contestant: [] for contestant in (ENOUGH, CAPPED, MICRO)}

        def fixed(split: Batches) -> Trace:
            return gang.block(SPLITS, WARM_UP + steps, split).after(WARM_UP)

        for turn in range(rounds):
            gang.all("scarce", worker, None)
            traces[ENOUGH].append(fixed(balanced))
            gang.all("scarce", worker, room)
            for contestant in (CAPPED, MICRO) if turn % 2 else (MICRO, CAPPED):
                traces[contestant].append(fixed(capped) if contestant == CAPPED else gang.block(MICRO).after(1))
            progress.done(f"{name}: round {turn + 1} of {rounds}")
            yield judge(name, batch, traces, {"need_mb": need / 1e6, "room_mb": room / 1e6, "fits": fits})
        gang.all("scarce", worker, None)


def judge(
    name: str, batch: int, traces: dict[str, list[Trace]], known: dict[str, Any]
) -> tuple[dict[str, Any], list[Row]]:
    """How much faster than capping, round by round, and how near to having enough memory."""
    outcome = dict(known)
    for key, other in (("gain_over_capping", CAPPED), ("of_enough_memory", ENOUGH)):
        pairs = zip(traces[MICRO], traces[other], strict=True)
        ratio = median_and_spread(float(np.median(b.seconds) / np.median(a.seconds)) for a, b in pairs)
        outcome[key], outcome[f"{key}_spread"] = ratio["median"], [ratio["lower"], ratio["upper"]]
    rows = [
        {"workload": name, "contestant": contestant, **describe(joined(own), batch)}
        for contestant, own in traces.items()
    ]
    outcome["shares"] = {contestant: show(own[-1].batches[-1]) for contestant, own in traces.items()}
    return outcome, rows
