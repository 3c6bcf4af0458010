"""The default policy: fit every worker's curve, solve for the best split, try a parking before believing it.

Three things change a plan. *Rebalance*: the same workers, better split, where the predicted gain is more than noise
could fake. *Excite*: once or twice in the beginning, batches are moved a little so that the fixed part of each
worker's time can be told from the part that grows with its batch. *Trial*: another set of workers, tried for a few
steps (fewer where it is hopeless) and kept only if the measured step time confirms it; a refuted set is not tried
again for a while, twice as long each time, unless the others meanwhile became slower than it was or its own workers
faster. Fewer workers are tried once without a prediction for it: what they are spared alone no line shows. Workers
that noise alone tells apart count as equals, and who was measured at one batch only is taken to be like the others.
What is known, and how reports get there, is in ``evidence``.

The way back for a parked worker: the solver wants it (its pulse or the others' curves changed), or nothing was heard
of it for so long that asking again costs at most PROBE_BUDGET of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from omnilearn.control.allocate import allocate
from omnilearn.control.curves import FORGET, Curves
from omnilearn.control.evidence import LONGEST_TRIAL, REFUTED, SETTLED, OptimalState, Refuted, Trial, nominal, take_in
from omnilearn.control.policy import Report, State, as_plan, median, saved_plan, share
from omnilearn.control.problem import Floats, Ints, Plan, Problem
from omnilearn.control.subsets import (
    Workers,
    at_best,
    at_least,
    at_very_best,
    cautious,
    expected_cost,
    feasible,
    members,
    predicted,
    restricted,
    split_over,
)

EFFECTIVE_NOISE = float(np.sqrt((1 - FORGET) / (1 + FORGET)))
"""How much of a single measurement's noise is left in a fitted curve."""
PROBE_BUDGET = 0.005
EXCITE = 0.25
"""How far batches are moved to tell α from β, as a fraction…"""
LEARNING = 16
"""… in so many first steps."""
MUCH = 0.3
"""A predicted gain for which another set of workers is tried at once, not only when the lines have settled."""
TIE, NOISY_TIE = 0.02, 0.4
"""The least predicted gain for which another set of workers is tried; where steps differ, this part of the noise."""
CALM, LOOK_BUDGET = 2, 0.04
"""Once a plan has held for so many reports, one worker is tried alone though by its line a step takes longer: where
that is expected to cost at most this part of the steps for which the plan has held (what nobody is sure of may cost as
much)…"""
BEARABLE, DEAR = 1.5, 0.3
"""… and a step no more than so many times as long; at once where acting together costs so much of the step. There, and
where one alone surprised, half of the workers are tried too."""
HOPELESS = 0.2
"""A trial ends early where it is slower by this fraction of the time before, and more than noise could fake."""
HOPE = 0.1
"""A gain that is only hoped for, because nobody knows what it costs that so many workers act together."""
LEARN = "learn the curves"
EVERY, EVERY_CALM = 0.2, 0.8
"""Seconds between two reports, and between two in a long calm: a slow worker feels each of them."""
LONG_CALM = 6
"""A calm is long when the plan has been thought about so often and left as it is."""
FIRST_ASK = 120
"""A parked worker is asked again after so many steps at the earliest, twice as many after each refusal."""


@dataclass(frozen=True)
class Optimal:
    """See the module's docstring. ``gain`` is the least predicted saving for which batches are changed,
    ``trial_steps`` how many measured steps decide a trial."""

    gain: float = 0.02
    trial_steps: int = 3
    first: str = "static"

    def start(self, problem: Problem) -> OptimalState:
        low, _ = problem.units
        weights = problem.speeds if self.first == "static" else np.ones(problem.workers)
        if int(low.sum()) * problem.multiple_of <= problem.global_batch:
            batches = share(problem, weights)
        else:
            batches = allocate(problem, np.zeros(problem.workers), 1 / weights)
        return self._start(problem, as_plan(batches, "nominal speeds" if self.first == "static" else "uniform"))

    def _start(self, problem: Problem, plan: Plan) -> OptimalState:
        return OptimalState(
            plan,
            interval=2,
            curves=Curves.guess(problem.speeds),
            reduce_cost=(None, 0.0) + (None,) * (problem.workers - 1),
        )

    def restore(self, problem: Problem, saved: dict[str, Any]) -> OptimalState:
        plan, curves, cost = saved_plan(problem, saved), Curves.from_state(saved["curves"]), saved["reduce_cost"]
        if plan is None:
            plan = as_plan(allocate(problem, curves.alpha, curves.beta, expected_cost(tuple(cost))), "restored")
        refuted = tuple((tuple(workers), Refuted(**found)) for workers, found in saved.get("refuted", ()))
        return replace(
            self._start(problem, plan),
            curves=curves,
            reduce_cost=tuple(cost),
            alone=saved.get("alone", 1.0),
            refuted=refuted,
            excitements=2,
        )

    def update(self, problem: Problem, state: State, report: Report) -> OptimalState:
        assert isinstance(state, OptimalState)
        state, news = take_in(problem, state, report)
        if not news:
            return state
        if np.any(state.curves.seen[state.plan.sizes > 0] == 0):
            return replace(state, interval=2)
        state = replace(state, curves=nominal(problem, state))
        guessed = replace(state, curves=state.curves.shaped())
        after = self._judge(problem, guessed) if state.trial else self._improve(problem, guessed)
        return replace(after, curves=state.curves, interval=_interval(after))

    def _improve(self, problem: Problem, state: OptimalState) -> OptimalState:
        """Without a trial under way: rebalance, excite, or start a trial."""
        plan, cost = state.plan, _cost(problem, state)
        curves = state.curves.pooled(plan.sizes)
        now = predicted(plan.sizes, curves, cost)
        then, rebalance = now, False
        # Right after a change of speed a line rests on a measurement or two: small gains wait for more.
        least = max(self._worth(curves, plan.active), curves.doubt(plan.sizes))
        if 1 - at_best(problem, curves, plan.active, cost) / now > (self.gain if _equals(problem, plan) else least):
            balanced = split_over(problem, curves, plan.active)
            then = predicted(balanced, curves, cost)
            # Machines that are said to be equal, and that noise alone tells apart, go back to equal batches readily.
            level = _equals(problem, plan) and np.ptp(balanced[plan.sizes > 0]) <= problem.multiple_of
            rebalance = 1 - then / now > (self.gain if level else least)
        if problem.park and problem.workers > 1:
            wanted = self._another_set(problem, state, cost, then if rebalance else now)
            if wanted is not None:
                batches, reason = wanted
                measured = median(state.times) if state.times else now
                baseline = min(measured, then) if rebalance else measured
                trial = Trial(before=plan, baseline=baseline, steps=max(len(state.times), 1))
                after = replace(state, trial=trial, changed_at=state.steps)
                return _follow(after, as_plan(batches, reason, predicted(batches, curves, cost), now))
        if rebalance:
            return _follow(state, as_plan(balanced, "rebalance", then, now))
        if (moved := self._excite(problem, state)) is not None:
            return _follow(replace(state, excitements=state.excitements + 1), as_plan(moved, LEARN))
        # A plan that was decided takes effect after what is prefetched: only then it begins to hold.
        return replace(state, settled=state.settled + bool(state.times))

    @property
    def _usual_trial(self) -> int:
        """Steps that a trial usually takes: its batches have to settle, too."""
        return 2 * self.trial_steps

    def _worth(self, curves: Curves, active: Workers) -> float:
        """The least predicted gain that is not just noise."""
        return max(self.gain, 4 * EFFECTIVE_NOISE * float(np.max(curves.noise[list(active)])))

    def _excite(self, problem: Problem, state: OptimalState) -> Ints | None:
        """Batches moved a little, half of the workers up and half down, while the curves' fixed parts are unknown."""
        active = np.asarray(state.plan.active)
        if state.excitements >= 2 or len(active) < 2 or state.settled < 1 or state.steps > LEARNING:
            return None
        batches = state.plan.sizes
        unknown = state.curves.alpha_uncertainty(batches)[active] > 0.25
        if not unknown.any():
            return None
        # Neighbours in size go opposite ways. Values decide, not positions: reordering workers reorders the plan.
        order = np.lexsort((state.curves.alpha[active], state.curves.beta[active], batches[active]))
        rank = np.empty_like(order)
        rank[order] = np.arange(len(active))
        factor = np.where((rank + state.excitements) % 2, 1 + EXCITE, 1 - EXCITE)
        # The largest goes with the smaller half: what it gives or takes is what the others have to take or give.
        moved = np.zeros(problem.workers, dtype=np.int64)
        inside = restricted(problem, tuple(active.tolist()))
        moved[active] = share(inside, batches[active] * factor * (1 + 1e-9 * rank))  # nor who gets an odd sample
        return None if np.array_equal(moved, batches) else moved

    def _another_set(self, problem: Problem, state: OptimalState, cost: Floats, now: float) -> tuple[Ints, str] | None:
        """A plan with other workers that is predicted to be faster, or that should be asked about again."""
        if (again := self._ask_again(problem, state, cost, now)) is not None:
            return again
        curves, refused, active = state.curves, dict(state.refuted), set(state.plan.active)
        early = state.steps <= 2 * LEARNING
        moving = state.plan.reason == LEARN if early else not state.settled
        # Lines still change, or there is little to compare a trial with.
        hurried = moving or len(state.times) < self.trial_steps
        noise = float(np.max(curves.noise[list(active)]))
        bound = (1 - (MUCH if hurried else TIE)) * now
        hopeless = at_very_best(problem, curves, cost) > bound
        for candidate in () if hopeless else _candidates(problem, state, cost, bound):
            workers = members(candidate)
            fewer = set(workers) < active
            # Doing it with fewer workers needs little more than a tie: what is measured decides in the end.
            tie = max(TIE, NOISY_TIE * noise) if early else max(0.04, noise)
            least = tie if fewer else max(0.03, self._worth(curves, workers))
            if hurried:
                least = max(least, MUCH)
            if workers == state.plan.active or not self._promises(state, candidate, cost, now, least, early):
                continue
            then = predicted(candidate, curves, cost)
            if workers in refused and refused[workers].stands(state.steps, state.times, then):
                continue
            return candidate, f"{'park' if fewer else 'unpark' if set(workers) > active else 'exchange'}: try"
        if len(state.times) < self.trial_steps:
            return None
        return _worth_a_look(problem, state, cost, now, early, self._usual_trial)

    def _promises(
        self, state: OptimalState, candidate: Ints, cost: Floats, now: float, least: float, early: bool
    ) -> bool:
        """Whether it is predicted to be faster by ``least``: for sure, or perhaps, and the plan has held for so long
        that finding out costs little."""
        hoped, feared = (cautious(candidate, state.curves, cost, bold) for bold in (True, early))
        enough = (1 - least) * now
        excess = self._usual_trial * max(feared / enough - 1, 0.0)  # in steps
        return hoped <= enough and excess <= LOOK_BUDGET * (state.steps - state.since)

    def _ask_again(self, problem: Problem, state: OptimalState, cost: Floats, now: float) -> tuple[Ints, str] | None:
        """A plan with the parked in it, where they were not heard of for long enough."""
        waited = state.steps - state.changed_at
        if not state.plan.parked or waited < FIRST_ASK or not feasible(problem, asked := _asked(problem, state)):
            return None
        curves, refused = state.curves, dict(state.refuted)
        everybody = split_over(problem, curves, asked)
        # What asking is expected to cost, in steps. Curves learnt in a hurry are soon looked at again if that is
        # cheap; a worker that would hold all others up is left alone for long.
        excess = self._usual_trial * max(predicted(everybody, curves, cost) / now - 1, 0.0)
        failures = refused[asked].failures if asked in refused else 0
        longest = max(500, state.price / PROBE_BUDGET)
        patience = max(FIRST_ASK * 2**failures, min(excess / PROBE_BUDGET, longest))
        return (everybody, "ask the parked again") if waited >= patience else None

    def _judge(self, problem: Problem, state: OptimalState) -> OptimalState:
        """During a trial: settle the batches, then let the measured step time decide."""
        trial, plan = state.trial, state.plan
        assert trial is not None
        curves, cost = state.curves.pooled(plan.sizes), _cost(problem, state)
        count = len(state.times)
        measured = median(state.times) if count else 0.0
        doubt = float(np.max(curves.noise[list(plan.active)])) * np.sqrt(1 / max(count, 1) + 1 / trial.steps)
        unclear = abs(1 - measured / trial.baseline) < doubt
        bound = trial.baseline * (1 + max(HOPELESS, 4 * doubt))
        # However its batches are split: by far too slow, in each of two steps or more. Alone there is nothing to split.
        slow = count > 1 and min(state.times) > bound
        hopeless = slow and (len(plan.active) == 1 or at_best(problem, curves, plan.active, cost) > bound)
        if not hopeless and (count < self.trial_steps or (unclear and count < LONGEST_TRIAL)):
            if not (trial.rebalances and state.times):
                return state
            now, least = predicted(plan.sizes, curves, cost), self._worth(curves, plan.active)
            if 1 - at_best(problem, curves, plan.active, cost) / now <= least:
                return state
            balanced = split_over(problem, curves, plan.active)
            then = predicted(balanced, curves, cost)
            if 1 - then / now <= least:
                return state
            trial = replace(trial, rebalances=trial.rebalances - 1)
            return _follow(replace(state, trial=trial), as_plan(balanced, "rebalance", then, now))
        price = max(count, self.trial_steps) * measured / trial.baseline
        # What no prediction spoke for has to be faster by more than noise could fake.
        unlikely = unclear and (plan.predicted or 0.0) >= trial.baseline
        if measured < 0.99 * trial.baseline and not unlikely:
            kept = replace(plan, reason=plan.reason.replace("try", "kept"))
            return self._improve(problem, replace(state, plan=kept, trial=None, price=price))
        back = split_over(problem, state.curves.pooled(trial.before.sizes), trial.before.active)
        workers, refused = plan.active, dict(state.refuted)
        failures = refused[workers].failures + 1 if workers in refused else 1
        refused[workers] = Refuted(
            since=state.steps,
            until=state.steps + ceil(max(REFUTED, price / PROBE_BUDGET / 4) * 2 ** (failures - 1)),
            failures=failures,
            seconds=measured,
            predicted=predicted(plan.sizes, curves, cost),
            promised=plan.predicted or measured,
        )
        after = replace(state, trial=None, refuted=tuple(refused.items()), changed_at=state.steps, price=price)
        return _follow(after, as_plan(back, "tried, slower: back", trial.baseline, measured))


def _cost(problem: Problem, state: OptimalState) -> Floats:
    """What acting together is expected to cost, by number of workers; for the fastest alone, less than nothing."""
    cost = expected_cost(state.reduce_cost)
    alone = float(state.curves.times(np.full(problem.workers, problem.global_batch)).min())
    cost[1] -= (1 - state.undisturbed) * alone
    return cost


def _equals(problem: Problem, plan: Plan) -> bool:
    """Whether all who take part are equally fast by description."""
    return bool(np.ptp(problem.speeds[plan.sizes > 0]) == 0)


def _candidates(problem: Problem, state: OptimalState, cost: Floats, bound: float) -> list[Ints]:
    """Splits over other sets of workers, the one predicted to be the fastest first; those slower than ``bound`` may
    be left out."""
    curves, refused, active = state.curves, dict(state.refuted), set(state.plan.active)
    candidates = [allocate(problem, curves.alpha, curves.beta, cost)]
    # Where the best set was refuted: the best of those with one worker more or less, and the fastest alone.
    if members(candidates[0]) in refused and problem.workers <= 64:
        fastest = int(np.argmin(curves.times(np.full(problem.workers, problem.global_batch))))
        near = [(fastest,), *(tuple(sorted(active ^ {k})) for k in range(problem.workers))]
        candidates += [
            split_over(problem, curves, others)
            for others in near
            if others and feasible(problem, others) and at_best(problem, curves, others, cost) <= bound
        ]
        # Among equally fast ones the workers' own times decide, not their positions.
        candidates.sort(key=lambda b: (predicted(b, curves, cost), sorted(curves.times(b)[b > 0].tolist())))
    return candidates


def _worth_a_look(
    problem: Problem, state: OptimalState, cost: Floats, now: float, early: bool, trial: int
) -> tuple[Ints, str] | None:
    """Another set of workers that no prediction speaks for, where too little is known for one; each set once."""
    if not state.settled:
        return None
    curves, active, refused = state.curves, set(state.plan.active), dict(state.refuted)
    if (fewer := _fewer(problem, state, cost, now, trial)) is not None:
        return fewer, "park: try"
    # What acting together costs is only a guess for a number of workers that never did. Worth a look where so many
    # were parked at once that better sets may lie between: if it cost no more than for fewer, would it pay?
    if state.plan.parked and None in state.reduce_cost[len(active) + 1 :]:
        hopeful = np.maximum.accumulate([c or 0.0 for c in state.reduce_cost])
        batches = allocate(problem, curves.alpha, curves.beta, hopeful)
        workers = members(batches)
        new = state.reduce_cost[len(workers)] is None and active < set(workers) and workers not in refused
        if new and 1 - cautious(batches, curves, hopeful, early) / now > HOPE:
            return batches, "unpark: try"
    return None


def _fewer(problem: Problem, state: OptimalState, cost: Floats, now: float, trial: int) -> Ints | None:
    """The fastest alone, the faster half or all but the slowest, though their lines do not speak for it; each number
    of workers once. ``trial``: steps that it takes to find out.

    With fewer, a worker is also spared work of reducing that lies in its own time: its line cannot show that, one
    worker alone does.
    """
    curves, active = state.curves, np.asarray(state.plan.active)
    if state.settled < CALM or len(active) < 2:
        return None
    dear = cost[len(active)] > DEAR * now
    bound = (BEARABLE if dear else min(BEARABLE, 1 + LOOK_BUDGET * (state.steps - state.since) / trial)) * now
    known = {len(workers): found for workers, found in state.refuted}
    counts = {1}
    if dear:
        counts.add(len(active) // 2)
    if 1 in known and known[1].surprised:
        counts |= {len(active) // 2, len(active) - 1}
    looks = []
    for n in counts - known.keys():
        shares = np.full(problem.workers, problem.global_batch / n)
        times = np.maximum(curves.times(shares), at_least(shares, curves))[active]
        workers = tuple(sorted(active[np.lexsort((curves.beta[active], times))[:n]].tolist()))
        if feasible(problem, workers) and at_best(problem, curves, workers, cost) < bound:
            looks.append(split_over(problem, curves, workers))
    best = min(looks, key=lambda b: cautious(b, curves, cost, early=False), default=None)
    return best if best is not None and cautious(best, curves, cost, early=False) < bound else None


def _asked(problem: Problem, state: OptimalState) -> Workers:
    """Everybody; where the minimums of all are too much, the parked first, and of them those never measured."""
    low, _ = problem.units
    total = problem.global_batch // problem.multiple_of
    order = np.lexsort((-problem.speeds, state.curves.seen, state.plan.sizes > 0))
    order = order[low[order] <= total]  # the others can never take part
    fit = int(np.searchsorted(np.cumsum(low[order]), total, side="right"))
    return tuple(sorted(order[:fit].tolist()))


def _follow(state: OptimalState, plan: Plan) -> OptimalState:
    return replace(state, plan=plan, times=(), settled=0, since=state.steps)


def _interval(state: OptimalState) -> int:
    """Steps until the next report: while things move every 2 to 4, else 4 to 32; longer steps, more often."""
    batches = state.plan.sizes
    step = max(median(state.times) if state.times else float(state.curves.times(batches)[batches > 0].max()), 1e-6)
    if state.trial or state.settled < SETTLED or np.any(state.curves.suspect[list(state.plan.active)] != 1):
        return min(max(ceil(EVERY / step), 2), 4)
    return min(max(ceil((EVERY_CALM if state.settled >= LONG_CALM else EVERY) / step), 4), 32)
