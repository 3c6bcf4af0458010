"""The best fixed split of a level: what an adaptive policy is measured against.

Every worker's line is timed beforehand, all workers computing side by side so that they contend as in training. The
solver's split over every set of workers is then tried for real, with its neighbours; sets that the lines predict to be
far slower than the best are left out, but for the fastest worker alone. All of it runs on plain DDP, without OmniLearn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from omnilearn.bench.gang import Batches, Floats, Gang, Trace
from omnilearn.control import Problem, allocate, step_time

SPLITS = "splits"
"""The contestant that runs fixed splits; benchmarks open it."""
WARM_UP = 2
"""Steps that do not count: DDP orders its buckets in the second one."""
HOPELESS = 1.5
"""Sets of workers predicted to be slower than the best by more than this factor are not tried."""
NEIGHBOUR = 0.15
MOST_SETS = 64


@dataclass(frozen=True)
class Curve:
    """Lines fitted to the workers' own times, and what reducing over n of them adds."""

    alpha: Floats
    beta: Floats
    cost: Floats
    points: list[list[tuple[int, float]]]

    def time(self, batches: Batches) -> float:
        return step_time(batches, self.alpha, self.beta, self.cost)


@dataclass
class Search:
    """Every split tried, with the measured seconds per step; and how many sets were left out."""

    curve: Curve
    tried: dict[Batches, list[float]] = field(default_factory=dict)
    left_out: int = 0

    def seconds(self, split: Batches) -> float:
        return float(np.median(self.tried[split]))

    def best(self, keep: Callable[[int], bool] = lambda workers: True) -> Batches | None:
        """The fastest split over a number of workers that ``keep`` accepts."""
        fitting = [split for split in self.tried if keep(active(split))]
        return min(fitting, key=self.seconds, default=None)

    def fastest(self, count: int) -> list[Batches]:
        return sorted(self.tried, key=self.seconds)[:count]


def active(split: Batches) -> int:
    return sum(size > 0 for size in split)


def search(gang: Gang, batch: int, least: int, *, quick: bool = False, say: Callable[[str], None] = print) -> Search:
    """Find the best fixed split of ``batch`` samples in the session under way (``SPLITS`` is open)."""
    curve = measure_curve(gang, batch, least, quick)
    found = Search(curve)
    steps = 2 if quick else 4

    def try_out(split: Batches) -> Trace:
        trace = gang.block(SPLITS, steps + WARM_UP, split).after(WARM_UP)
        found.tried.setdefault(split, []).extend(trace.seconds.tolist())
        return trace

    # Reduction costs: what a step over the n fastest takes beyond its slowest worker's own time.
    order = np.argsort(curve.alpha + curve.beta * batch / gang.size)
    for n in range(2, gang.size + 1):
        split = over(curve, batch, least, tuple(sorted(order[:n].tolist())))
        if split is not None:
            trace = try_out(split)
            own = max(
                (curve.alpha[k] + curve.beta[k] * size for k, size in enumerate(split) if size),
            )
            curve.cost[n] = max(float(np.median(trace.seconds)) - own, 0.0)
    curve.cost[:] = np.maximum.accumulate(curve.cost)
    say("curves and reduction measured")

    splits = [split for workers in _sets(gang.size, order) if (split := over(curve, batch, least, workers)) is not None]
    predicted = {split: curve.time(split) for split in splits}
    bound = HOPELESS * min([*predicted.values(), *(found.seconds(split) for split in found.tried)])
    alone = min((split for split in splits if active(split) == 1), key=predicted.__getitem__, default=None)
    promising = sorted((s for s in splits if predicted[s] <= bound or s == alone), key=predicted.__getitem__)
    chosen = [s for s in promising if s == alone or s in promising[:4]] if quick else promising
    found.left_out = len(splits) - len(chosen)
    for split in chosen:
        if split not in found.tried:
            try_out(split)
    say(f"{len(chosen)} sets of workers tried, {found.left_out} left out that were predicted to be slower")

    for start in found.fastest(1 if quick else 2):
        # Once more with the lines corrected by what the workers needed in this very split.
        refined = _corrected(try_out(start), curve, batch, least, start)
        if refined is not None and refined not in found.tried:
            try_out(refined)
    for split in list(neighbours(found.fastest(1)[0], least))[: 2 if quick else None]:
        if split not in found.tried:
            try_out(split)
    say(f"best of {len(found.tried)} splits: {show(found.fastest(1)[0])}")
    return found


def measure_curve(gang: Gang, batch: int, least: int, quick: bool) -> Curve:
    """Time every worker at three batches around its share, all at the same time."""
    shares = np.asarray(gang.nominal) / sum(gang.nominal)
    sizes = []
    for share in shares:
        own: list[int] = []
        for factor in (0.5, 1.0, 2.0):
            size = int(np.clip(round(batch * share * factor), least, batch))
            own.append(size if not own or size > own[-1] else min(own[-1] + 1, batch))
        sizes.append(own)
    repeats, seconds = (2, 0.2) if quick else (4, 1.0)
    points = gang.all("curve", sizes, repeats, seconds, doing="the workers' curves")
    lines = [fit(own) for own in points]
    return Curve(
        np.array([alpha for alpha, _ in lines]),
        np.array([beta for _, beta in lines]),
        np.zeros(gang.size + 1),
        points,
    )


def fit(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """The line through the median time of each batch size, by relative least squares, never falling, never below 0.

    >>> [round(value, 6) for value in fit([(10, 2.0), (20, 3.0), (40, 5.0)])]
    [1.0, 0.1]
    """
    by_size: dict[int, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    b = np.array(list(by_size), dtype=float)
    t = np.array([float(np.median(times)) for times in by_size.values()])
    beta_only = float(np.mean(t / b))
    if len(b) < 2:
        return 0.0, beta_only
    alpha, beta = np.linalg.lstsq(np.stack([1 / t, b / t], axis=1), np.ones_like(t), rcond=None)[0]
    if alpha < 0:
        return 0.0, beta_only
    if beta <= 0:
        return float(np.mean(t)) * 0.99, 0.01 * beta_only
    return float(alpha), float(beta)


def over(curve: Curve, batch: int, least: int, workers: tuple[int, ...]) -> Batches | None:
    """The solver's split over exactly these workers, or None where their least batches are too much."""
    if least * len(workers) > batch:
        return None
    k = list(workers)
    problem = Problem.of(batch, workers=len(k), minimum=least, park=False)
    split = np.zeros(len(curve.alpha), dtype=np.int64)
    split[k] = allocate(problem, curve.alpha[k], curve.beta[k])
    return tuple(split.tolist())


def neighbours(split: Batches, least: int) -> Iterable[Batches]:
    """Splits near this one: one worker's batch, or all but the largest's, some percent up or down."""
    largest = int(np.argmax(split))
    others = [k for k, size in enumerate(split) if size and k != largest]
    for chosen in ([others] if len(others) > 1 else []) + [[k] for k in others]:
        for factor in (1 - NEIGHBOUR, 1 + NEIGHBOUR):
            moved = list(split)
            for k in chosen:
                step = max(1, round(abs(factor - 1) * split[k]))
                moved[k] += step if factor > 1 else -step
                moved[largest] += split[k] - moved[k]
            if all(size >= least for size in (moved[k] for k in [*others, largest])):
                yield tuple(moved)


def show(split: Batches) -> str:
    """A split in a table: ``36/36/24/96``, a parked worker as 0."""
    return "/".join(map(str, split))


def _sets(size: int, order: Any) -> Iterable[tuple[int, ...]]:
    """Every set of workers; where those are too many, the n fastest for every n."""
    if 2**size - 1 <= MOST_SETS:
        for n in range(1, size + 1):
            yield from combinations(range(size), n)
    else:
        for n in range(1, size + 1):
            yield tuple(sorted(int(k) for k in order[:n]))


def _corrected(trace: Trace, curve: Curve, batch: int, least: int, split: Batches) -> Batches | None:
    busy = np.array([np.median(own[~np.isnan(own)]) if (~np.isnan(own)).any() else np.nan for own in trace.busy.T])
    expected = curve.alpha + curve.beta * np.asarray(split)
    factor = np.where(np.isfinite(busy), busy / expected, 1.0)
    scaled = Curve(curve.alpha * factor, curve.beta * factor, curve.cost, curve.points)
    return over(scaled, batch, least, tuple(k for k, size in enumerate(split) if size))
