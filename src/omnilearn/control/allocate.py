"""The best split for known step-time curves, exactly.

Minimises ``max over active k of (α_k + β_k·b_k) + C(number of active workers)`` over whole-number batches within
the problem's bounds, with any worker allowed to be parked where the problem says so. Where a batch takes several
passes (the problem's ``micro``), α_k counts once for each. Assumes that reducing over more workers never costs less (C
does not fall). Pure: same input, same plan, on every rank.

How: for a time T, worker k can compute ``cap_k(T)`` samples. The fewest workers that hold the global batch within T
are those with the largest caps, so ``n(T)``, which never grows with T, costs one sort. ``T + C(n(T))`` is then
minimised by branch and bound over T: between T1 < T2 it is at least ``T1 + C(n(T2))``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omnilearn.control.curves import passes
from omnilearn.control.problem import Floats, Ints, Problem
from omnilearn.errors import InfeasibleError

Mask = npt.NDArray[np.bool_]

EXACT_WORKERS = 256
"""Up to so many workers the optimum is exact; with more, and a reduction cost, within PRECISION of it."""
PRECISION = 1e-3
WHOLE = 1e-9
"""What is this near to a whole number of passes is one: a multiple may make their sizes fractions."""
FLATTEST = 2.0**-40
"""The least growth per unit that is told apart, as a fraction of the fixed part."""


def allocate(
    problem: Problem, alpha: npt.ArrayLike, beta: npt.ArrayLike, reduce_cost: npt.ArrayLike | None = None
) -> Ints:
    """The optimal batches for ``t_k(b) = alpha_k + beta_k·b``.

    ``reduce_cost[n]`` is what the reduction over n active workers adds to a step (``n = 0 … workers``).

    >>> allocate(Problem.of(12, workers=2), [0.0, 0.0], [1.0, 2.0]).tolist()
    [8, 4]
    >>> allocate(Problem.of(12, workers=2), [0.0, 100.0], [1.0, 2.0]).tolist()
    [12, 0]
    """
    a, b = np.asarray(alpha, dtype=np.float64), np.asarray(beta, dtype=np.float64)
    cost = np.zeros(problem.workers + 1) if reduce_cost is None else np.asarray(reduce_cost, dtype=np.float64)
    _check(problem, a, b, cost)
    low, high = problem.units
    # Flatter than FLATTEST, rounding decides and not the curve.
    b = np.maximum(b * problem.multiple_of, np.maximum(a * FLATTEST, 1e-100))
    total = problem.global_batch // problem.multiple_of
    micro = None if problem.micro is None else problem.micro / problem.multiple_of
    lines = _Lines(a, b, low.astype(np.float64), high.astype(np.float64), total, not problem.park, micro)
    batches = np.zeros(problem.workers, dtype=np.int64)
    active, T = _best_set(lines, cost) if problem.park else (np.ones(problem.workers, dtype=bool), None)
    batches[active] = _fill(lines.only(active), T) * problem.multiple_of
    return batches


def step_time(
    batches: npt.ArrayLike,
    alpha: npt.ArrayLike,
    beta: npt.ArrayLike,
    reduce_cost: npt.ArrayLike | None = None,
    micro: Ints | None = None,
) -> float:
    """What a step with these batches takes by the curves: the slowest active worker, and the reduction."""
    b = np.asarray(batches)
    active = b > 0
    times = (np.asarray(alpha, dtype=float) * passes(b, micro) + np.asarray(beta, dtype=float) * b)[active]
    return float(times.max() + (0.0 if reduce_cost is None else np.asarray(reduce_cost)[int(active.sum())]))


def _check(problem: Problem, alpha: Floats, beta: Floats, cost: Floats) -> None:
    n = problem.workers
    if alpha.shape != (n,) or beta.shape != (n,):
        raise InfeasibleError(f"{n} workers need {n} curves, got {alpha.size} alphas and {beta.size} betas")
    if not (np.all(np.isfinite(alpha) & (alpha >= 0)) and np.all(np.isfinite(beta) & (beta > 0))):
        k = int(np.argmax(~(np.isfinite(alpha) & (alpha >= 0) & np.isfinite(beta) & (beta > 0))))
        raise InfeasibleError(
            f"worker {k}: a step-time curve needs alpha >= 0 and beta > 0, both finite, got alpha={alpha[k]}, "
            f"beta={beta[k]}: check the timings it was fitted to"
        )
    if cost.shape != (n + 1,) or not np.all(np.isfinite(cost)) or np.any(np.diff(cost[1:]) < 0):
        raise InfeasibleError(
            f"reduce_cost needs {n + 1} finite values (for 0 … {n} active workers) that do not fall, got {cost[:9]}"
        )


@dataclass(frozen=True)
class _Lines:
    """The curves and bounds, with batches counted in units of the problem's multiple.

    Forced: everybody takes part and computes at least its minimum. Otherwise a worker whose minimum does not fit
    computes nothing. All arrays are floats: converting them costs more than computing with them.
    """

    alpha: Floats
    beta: Floats
    low: Floats
    high: Floats
    total: int
    forced: bool
    micro: Floats | None  # units per pass, not always whole ones

    def only(self, active: Mask) -> _Lines:
        """These workers, and all of them."""
        micro = None if self.micro is None else self.micro[active]
        low, high = self.low[active], self.high[active]
        return _Lines(self.alpha[active], self.beta[active], low, high, self.total, True, micro)

    def times(self, units: Floats | Ints) -> Floats:
        """How long each worker takes for so many units."""
        if self.micro is None:
            return self.alpha + self.beta * units
        return self.alpha * np.maximum(np.ceil(units / self.micro - WHOLE), 1.0) + self.beta * units

    def _units_in_passes(self, T: float) -> Floats:
        """How many units fit into T where passes are bounded: in as many full ones as fit, or in one more."""
        assert self.micro is not None
        full = np.floor(T / (self.alpha + self.beta * self.micro))
        best = np.zeros_like(full)
        for count in (full, full + 1):
            by_time = np.floor((T - np.maximum(count, 1) * self.alpha) / self.beta)
            best = np.maximum(best, np.minimum(np.floor(count * self.micro + WHOLE), by_time))
        # The divisions may round across a whole number either way; there the products decide.
        best += self.times(best + 1) <= T
        best -= self.times(best) > T
        return np.asarray(best)

    def caps(self, T: float) -> Floats:
        """How many units each worker computes within T."""
        units = self._units_within(T) if self.micro is None else self._units_in_passes(T)
        if self.forced:
            np.maximum(units, self.low, out=units)
        else:
            units[units < self.low] = 0
        return np.minimum(units, self.high, out=units)

    def _units_within(self, T: float) -> Floats:
        exact = (T - self.alpha) / self.beta
        units = np.floor(exact)
        # The division may round across a whole number either way; there the product decides.
        exact -= units
        exact -= 0.5
        near = np.flatnonzero(np.abs(exact, out=exact) > 0.499)
        if near.size:
            alpha, beta, close = self.alpha[near], self.beta[near], units[near]
            close += alpha + beta * (close + 1) <= T
            close -= alpha + beta * close > T
            units[near] = close
        return np.asarray(units)

    def later(self, caps: Floats) -> Floats:
        """When each worker's cap grows next (infinite: never)."""
        times = caps + 1
        if not self.forced:
            np.maximum(times, self.low, out=times)
        if self.micro is None:
            times *= self.beta
            times += self.alpha
        else:
            times = self.times(times)
        times[caps >= self.high] = np.inf
        return times


def _fill(lines: _Lines, near: float | None) -> Ints:
    """The split over exactly these workers: all of them finish as early as the slowest can be made to."""
    T = _first(lines, near)
    units = lines.caps(T).astype(np.int64)
    # Workers whose last unit ends exactly at T are tied; what they hold too much goes back, largest batch first, among
    # equals the slower one (values decide, not positions: reordering workers reorders the plan).
    surplus = int(units.sum()) - lines.total
    if surplus:
        tied = np.flatnonzero((units > lines.low) & (lines.times(units) >= T))
        order = np.lexsort((lines.high[tied], -lines.low[tied], -lines.alpha[tied], -lines.beta[tied], -units[tied]))
        units[tied[order[:surplus]]] -= 1
    return units


def _first(lines: _Lines, near: float | None = None) -> float:
    """The earliest time at which the batch fits; ``near`` is a guess."""
    below, above = _bracket(lines, near)
    plain = lines.forced or int(lines.low.sum()) <= lines.total
    halve = False
    while True:
        caps = lines.caps(below)
        later, missing = lines.later(caps), lines.total - int(caps.sum())
        if plain and missing <= 0:
            return below
        middle = (below + above) / 2
        if plain and missing <= len(later):
            # Each worker's next growth adds a unit at least: when so many have grown, the batch fits.
            soonest = np.partition(later, missing - 1)[:missing]
            above = min(above, float(soonest[-1]))
            if not halve:  # often it does not fit any earlier
                middle = float(np.max(soonest, where=soonest < above, initial=-np.inf))
            halve = not halve
        candidate = float(later.min())
        if candidate >= above:
            return above
        middle = middle if candidate < middle < above else candidate
        if _fits(lines, middle):
            above = middle
        else:
            below = middle


def _fits(lines: _Lines, T: float) -> bool:
    caps = lines.caps(T)
    if caps.sum() < lines.total:
        return False
    return lines.forced or int(lines.low.sum()) <= lines.total or _fewest(lines, caps) > 0


def _bracket(lines: _Lines, near: float | None) -> tuple[float, float]:
    """A time that is too early and one that is not, close together."""
    least = float(np.min(lines.times(lines.low)))
    if near is None:  # the split in real numbers, by Newton's method: what is held grows convexly with time
        near = (lines.total + float((lines.alpha / lines.beta).sum())) / float((1 / lines.beta).sum())
        for _ in range(3):
            busy = lines.alpha < near
            rate = 1 / lines.beta[busy]
            if not rate.size:
                break
            near = (lines.total + float((lines.alpha[busy] * rate).sum())) / float(rate.sum())
    above, step = max(near, least), 1e-4 * max(near, least)
    if _fits(lines, above):
        while above > step:
            if not _fits(lines, above - step):
                return above - step, above
            above, step = above - step, step * 8
        return 0.0, above
    end = float(np.max(lines.times(lines.high)))
    while above < end:
        below, above, step = above, min(above + step, end), step * 8
        if _fits(lines, above):
            return below, above
    raise InfeasibleError(
        f"no set of workers can hold {lines.total} units between their minimums {lines.low[:8].astype(int)} and "
        f"maximums {lines.high[:8].astype(int)}: change global_batch, min_batch or max_batch"
    )


def _best_set(lines: _Lines, cost: Floats) -> tuple[Mask, float]:
    """Who is active in the optimal split, and the time it takes at most."""

    def count(T: float) -> int:
        return _fewest(lines, lines.caps(T))

    first = _first(lines)
    most = count(first)
    best, best_T = first + float(cost[most]), first
    # Taking longer pays only by what a smaller reduction saves. The limit itself cannot be better, only as good.
    limit = best - float(cost[1])
    if limit > first and cost[most] > cost[1]:
        tolerance = best * (PRECISION if len(lines.low) > EXACT_WORKERS else 0.0)
        fewest = count(limit)
        intervals = [(first + float(cost[fewest]), first, limit, most, fewest)]
        while intervals:
            bound, early, late, n_early, n_late = heapq.heappop(intervals)
            if bound >= best - tolerance:
                break
            # The next time at which anything changes; near enough is enough where there is a tolerance.
            candidate = early if tolerance else float(lines.later(lines.caps(early)).min())
            if n_early == n_late or candidate > late or candidate + cost[n_late] >= best - tolerance:
                continue
            middle = max(candidate, (early + late) / 2)
            n = count(middle)
            if middle + cost[n] < best:
                best, best_T = middle + float(cost[n]), middle
            if middle < late:
                heapq.heappush(intervals, (middle + float(cost[n_late]), middle, late, n, n_late))
            if candidate < middle:
                heapq.heappush(intervals, (early + float(cost[n]), early, middle, n_early, n))
    return _choose(lines, lines.caps(best_T)), best_T


def _fewest(lines: _Lines, caps: Floats) -> int:
    """How many workers with these caps are needed to hold the batch (0: no set can)."""
    if caps.sum() < lines.total:
        return 0
    n = int(np.searchsorted(np.cumsum(np.sort(caps)[::-1]), lines.total)) + 1
    if lines.low.min() == lines.low.max():
        return n if n * int(lines.low[0]) <= lines.total else 0
    return int(_choose(lines, caps).sum())


def _choose(lines: _Lines, caps: Floats) -> Mask:
    """The fewest workers with these caps that hold the batch: the largest; among equals who is done first."""
    largest = np.sort(caps)[::-1]
    n = int(np.searchsorted(np.cumsum(largest), lines.total)) + 1
    chosen: Mask = caps > largest[n - 1]
    tied = np.flatnonzero(caps == largest[n - 1])
    chosen[tied[_by_value(lines, tied, caps)[: n - int(chosen.sum())]]] = True
    if lines.low[chosen].sum() > lines.total:
        return _knapsack(lines, caps)
    return chosen


def _by_value(lines: _Lines, workers: Ints, caps: Floats) -> Ints:
    """An order of workers that depends on what they are and not on where they stand: who is done first with its cap."""
    alpha, beta = lines.alpha[workers], lines.beta[workers]
    done = lines.times(caps)[workers]
    return np.lexsort((-lines.high[workers], lines.low[workers], alpha, beta, done))


def _knapsack(lines: _Lines, caps: Floats) -> Mask:
    """The smallest set with Σ caps ≥ total and Σ low ≤ total; empty if there is none.

    Needed only where minimums differ and the plain choice overshoots them. Exact dynamic programme over
    (workers taken, sum of minimums): fine for hundreds of workers, not for thousands.
    """
    total, low = lines.total, lines.low.astype(np.int64)
    usable = np.flatnonzero((caps > 0) & (low <= total))
    usable = usable[_by_value(lines, usable, caps)]
    best = np.full((len(usable) + 1, total + 1), -1, dtype=np.int64)
    best[0, 0] = 0
    took = np.zeros((len(usable), *best.shape), dtype=bool)
    for i, k in enumerate(usable):
        offer = np.full_like(best, -1)
        source = best[:-1, : total + 1 - low[k]]
        offer[1:, low[k] :] = np.where(source >= 0, source + int(caps[k]), -1)
        took[i] = offer > best
        best = np.maximum(best, offer)
    chosen = np.zeros(len(caps), dtype=bool)
    fits = np.argwhere(best >= total)
    if len(fits):
        n, weight = (int(v) for v in fits[0])
        for i in range(len(usable) - 1, -1, -1):
            if took[i, n, weight]:
                chosen[usable[i]] = True
                n, weight = n - 1, weight - int(low[usable[i]])
    return chosen
