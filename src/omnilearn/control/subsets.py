"""What could a set of workers do? The best split over it, and how long a step with it would take."""

from __future__ import annotations

from functools import cache

import numpy as np

from omnilearn.control.allocate import allocate, step_time
from omnilearn.control.curves import LEAP, Curves, passes
from omnilearn.control.problem import Floats, Ints, Problem

Workers = tuple[int, ...]
FEW = 6
"""So many workers are few enough to look at every set of them."""


def members(batches: Ints) -> Workers:
    """Those with a batch."""
    return tuple(np.flatnonzero(batches).tolist())


def predicted(batches: Ints | tuple[int, ...], curves: Curves, cost: Floats) -> float:
    """Seconds of a step with these batches."""
    return step_time(batches, curves.alpha, curves.beta, cost, curves.micro)


def at_best(problem: Problem, curves: Curves, workers: Workers, cost: Floats) -> float:
    """Seconds of a step below which no split over these workers comes: that with parts of samples, and no bounds."""
    k = np.asarray(workers, dtype=np.int64)
    alpha, beta = curves.alpha[k], curves.beta[k]
    return float((problem.global_batch + (alpha / beta).sum()) / (1 / beta).sum() + cost[len(k)])


def at_very_best(problem: Problem, curves: Curves, cost: Floats) -> float:
    """Seconds of a step below which no split over any set of workers comes. Quicker to tell than which set is best."""
    speed = 1 / curves.beta
    if problem.workers <= FEW:
        sets, counts = _every_set(problem.workers)
        return float(((problem.global_batch + sets @ (curves.alpha * speed)) / (sets @ speed) + cost[counts]).min())
    order = np.argsort(curves.alpha, kind="stable")
    alone = problem.global_batch + np.cumsum((curves.alpha * speed)[order])
    shared = float((alone / np.cumsum(speed[order])).min())  # by all who are worth it, if acting together cost nothing
    fastest = problem.global_batch / np.cumsum(np.sort(speed)[::-1]) + curves.alpha.min()  # n of them
    return float((np.maximum(fastest, shared) + cost[1:]).min())


@cache
def _every_set(workers: int) -> tuple[Floats, Ints]:
    """Every set of so many workers, one per row, and how many each has."""
    sets = (np.arange(1, 2**workers)[:, None] >> np.arange(workers)) & 1
    return sets.astype(np.float64), sets.sum(axis=1)


def at_least(batches: Ints | Floats, curves: Curves) -> Floats:
    """Seconds for these batches, if r times the batch last measured takes √r times as long."""
    return np.asarray(np.sqrt(batches / np.maximum(curves.at, 1.0)) * curves.times(curves.at))


def cautious(batches: Ints, curves: Curves, cost: Floats, early: bool) -> float:
    """As ``predicted``, and more for workers that would compute more than they did last.

    A line fitted to small batches says little about one that is many times larger: with r times its batch a worker is
    believed to need √r times the time, at least. Later, when a wrong trial is not soon made up for by what it teaches,
    a line's uncertainty counts too.
    """
    on, times, more = batches > 0, curves.times(batches), batches > curves.at
    least = np.where(more & (curves.at > 0), at_least(batches, curves), 0.0)
    doubt = 0.0 if early else np.where(more, np.minimum(curves.uncertainty(batches), times / 2), 0.0)
    return float(np.maximum(times + doubt, least)[on].max() + cost[int(on.sum())])


def restricted(problem: Problem, workers: Workers) -> Problem:
    """The same problem for these workers alone, all of them active."""
    k = np.asarray(workers, dtype=np.int64)
    return Problem(
        problem.global_batch,
        problem.speeds[k],
        problem.minimum[k],
        problem.maximum[k],
        problem.multiple_of,
        park=False,
        micro=None if problem.micro is None else problem.micro[k],
    )


def feasible(problem: Problem, workers: Workers) -> bool:
    """Whether these workers alone can have the whole batch."""
    low, high = problem.units
    k, total = np.asarray(workers, dtype=np.int64), problem.global_batch // problem.multiple_of
    return int(low[k].sum()) <= total <= int(high[k].sum())


def split_over(problem: Problem, curves: Curves, workers: Workers) -> Ints:
    """The best split over exactly these workers, without leaps.

    A line fitted to a few noisy steps may be far too flat. Nobody gets several times the batch last measured because
    of that: for such a leap, at least half of the time is taken to grow with the batch.
    """
    k, batches = np.asarray(workers, dtype=np.int64), np.zeros(problem.workers, dtype=np.int64)
    if len(k) == 1:
        batches[k] = problem.global_batch
        return batches
    inside, alpha, beta, at = restricted(problem, workers), curves.alpha[k], curves.beta[k], curves.at[k]
    batches[k] = allocate(inside, alpha, beta)
    steeper = np.where(at > 0, curves.times(curves.at)[k] / (2 * np.maximum(at, 1.0)), 0.0)
    if np.any((steeper > beta) & (batches[k] > LEAP * at)):
        steeper = np.maximum(steeper, beta)
        fixed = alpha - (steeper - beta) * at / passes(at, inside.micro)
        batches[k] = allocate(inside, np.maximum(fixed, 0.0), steeper)
    return batches


def expected_cost(measured: tuple[float | None, ...]) -> Floats:
    """What reducing over n workers costs, for every n, from what was measured for some.

    Between measured counts in a straight line; beyond the largest with the last slope; it never falls with n.
    """
    costs, every = np.array(measured, dtype=np.float64), np.arange(len(measured))  # None becomes nan
    counts = np.flatnonzero(~np.isnan(costs) & (every > 0))
    costs = costs[counts]
    line = np.interp(every, counts, costs)
    if len(counts) > 1:
        slope = (costs[-1] - costs[-2]) / (counts[-1] - counts[-2])
        line = np.where(every > counts[-1], costs[-1] + slope * (every - counts[-1]), line)
    line[0] = 0.0
    return np.maximum.accumulate(np.maximum(line, 0.0))
