"""What the demo says: beforehand what will happen, afterwards what did, and why. Plain values in, words out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnilearn.errors import OmniLearnError
from omnilearn.observe import words
from omnilearn.observe.board import Board

ASYNC = "OmniLearn async, nobody waits"
SAME = 0.05  # times that differ by less are about the same


@dataclass(frozen=True)
class Run:
    """One training: how long it took, and what its workers did. ``waited`` is a share of each worker's time."""

    title: str
    reached: bool
    seconds: float
    accuracy: float
    epochs: int
    samples_per_second: float
    batches: tuple[int, ...]
    parked: tuple[int, ...]
    waited: tuple[float | None, ...]

    @property
    def name(self) -> str:
        """The first part of the title."""
        return self.title.partition(",")[0]

    @staticmethod
    def of(title: str, board: Board) -> Run:
        metric, plan = board.metric, board.plan
        if metric is None or plan is None:
            raise OmniLearnError(f"{title!r} ended without a result: was the disk full?")
        samples = metric["epoch"] * board.epoch_steps * board.options["global_batch"]
        return Run(
            title=title,
            reached=bool(metric["reached"]),
            seconds=metric["seconds"],
            accuracy=metric["accuracy"],
            epochs=metric["epoch"],
            samples_per_second=samples / metric["seconds"],
            batches=tuple(plan["batches"]),
            parked=tuple(plan["parked"]),
            waited=tuple(
                None if worker.computed is None else round(1 - worker.computed, 3) for worker in board.workers
            ),
        )


# Beforehand


def introduction(spec: str, cores: Sequence[float], target: float, batch: int, mode: str = "sync") -> list[str]:
    each = batch // len(cores)
    ours = (
        "each worker gets what it can do in the same time, and a worker that would only hold up the others is parked."
        if mode == "sync"
        else "each worker gets what it can do in the same time, sends its gradient to a server and goes on at once."
    )
    listed = ", ".join(f"{c:.3g}" for c in cores[:-1])
    return [
        f"This machine now plays a cluster of {len(cores)} unequal workers ({spec}): they may use {listed} and "
        f"{cores[-1]:.3g} cores. Together they teach a small neural network to read handwritten digits, {batch} digits "
        f"a step, until it gets {target:.0%} of digits it has never seen right.",
        f"First with plain PyTorch (DistributedDataParallel): every worker gets {each} digits, and in every step all "
        f"wait for the slowest. Then with OmniLearn: {ours}",
    ]


def busy(load: float, cores: float) -> str:
    return (
        f"Note: this machine is busy with other work (load {load:.1f} on {cores:.3g} cores). That slows the fastest "
        f"worker most and makes the difference smaller than it is."
    )


def starting(equal: bool) -> str:
    return "starting the workers, loading PyTorch" + (" (equal cores for now)" if equal else "")


# Afterwards


def table(runs: Sequence[Run], target: float) -> list[tuple[str, ...]]:
    """Rows of cells, the first of them the header."""

    def row(name: str, cells: Sequence[str]) -> tuple[str, ...]:
        return (name, *cells)

    def worst(run: Run) -> str:
        known = [(share, rank) for rank, share in enumerate(run.waited) if share is not None and run.batches[rank]]
        if not known:
            return "–"
        share, rank = max(known)
        return f"worker {rank}, {share:.0%} of its time" if share >= 0.005 else "nobody"

    return [
        row("", [run.name for run in runs]),
        row(
            f"time to {target:.0%} right",
            [f"{run.seconds:.1f} s" if run.reached else f"not within {run.seconds:.0f} s" for run in runs],
        ),
        row("digits per second", [f"{run.samples_per_second:,.0f}" for run in runs]),
        row("accuracy", [f"{run.accuracy:.1%}" for run in runs]),
        row("epochs", [str(run.epochs) for run in runs]),
        row("batches at the end", [" ".join(str(b) if b else "–" for b in run.batches) for run in runs]),
        row("parked at the end", [words.workers(run.parked) for run in runs]),
        row("waited most", [worst(run) for run in runs]),
    ]


def speed_up(ddp: Run, omni: Run) -> float:
    """How many times as fast OmniLearn was: times to the target, or samples per second where one has none."""
    if ddp.reached and omni.reached:
        return ddp.seconds / omni.seconds
    return omni.samples_per_second / ddp.samples_per_second


def conclusion(ddp: Run, omni: Run, cores: Sequence[float], target: float) -> str:
    """What happened, and why."""
    ratio = speed_up(ddp, omni)
    return f"{_outcome(ddp, omni, ratio, target)} {_why(ddp, omni, cores, ratio)}"


def _outcome(ddp: Run, omni: Run, ratio: float, target: float) -> str:
    if not omni.reached and not ddp.reached:
        compared = f"{ratio:.1f} times as many digits per second" if abs(ratio - 1) > SAME else "about as many digits"
        return f"Neither reached {target:.0%} in the time given; OmniLearn did {compared}."
    if omni.reached and not ddp.reached:
        return (
            f"OmniLearn reached {target:.0%} in {omni.seconds:.1f} s; plain DDP was stopped after {ddp.seconds:.0f} s "
            f"at {ddp.accuracy:.1%}. OmniLearn did {ratio:.1f} times as many digits per second."
        )
    if ddp.reached and not omni.reached:
        return f"OmniLearn did not reach {target:.0%} within {omni.seconds:.0f} s; plain DDP took {ddp.seconds:.1f} s."
    alike = omni.epochs == ddp.epochs and omni.title != ASYNC
    same = f" (the same samples in the same order, {omni.epochs} epochs)" if alike else ""
    if ratio > 1 + SAME:
        return f"OmniLearn was {ratio:.1f} times as fast as plain DDP to the same accuracy{same}."
    if ratio > 1 - SAME:
        return f"Both took about the same time to the same accuracy{same}."
    return f"OmniLearn took {1 / ratio:.1f} times as long as plain DDP{same}."


def _why(ddp: Run, omni: Run, cores: Sequence[float], ratio: float) -> str:
    short = "" if ratio > 1 + SAME else " In a run as short as this, finding that out costs about what it gains."
    if max(cores) <= 1.1 * min(cores) and not omni.parked:
        return "The workers are equal, so equal batches are right and there is nothing to gain."
    if ratio < 1 - SAME:
        return "That is not what should happen: is the machine busy with other work?"
    fastest = max(range(len(cores)), key=lambda k: cores[k])
    slowest = min(range(len(cores)), key=lambda k: cores[k])
    waited = ddp.waited[fastest]
    idle = f" for {waited:.0%} of its time" if waited is not None else ""
    cause = (
        f"With equal batches worker {fastest} ({cores[fastest]:.3g} cores) waited{idle}, held up by slow ones such as "
        f"worker {slowest} ({cores[slowest]:.3g} cores)."
    )
    active = [k for k, b in enumerate(omni.batches) if b]
    if omni.parked:
        left = (
            f"left everything to worker {active[0]}"
            if len(active) == 1
            else f"shared the work among {words.workers(active)}, by their speed,"
        )
        return (
            f"{cause} OmniLearn {left} and parked {words.workers(omni.parked)}: with so small a network, waiting for "
            f"{'them' if len(omni.parked) > 1 else 'it'} costs more than "
            f"{'they' if len(omni.parked) > 1 else 'it'} can contribute.{short}"
        )
    share = omni.batches[fastest]
    return (
        f"{cause} OmniLearn gave worker {fastest} {share} of the {sum(omni.batches)} digits of a step and worker "
        f"{slowest} only {omni.batches[slowest]}, so that all finish at about the same time.{short}"
    )
