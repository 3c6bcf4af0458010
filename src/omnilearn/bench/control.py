"""The decisions alone, without a training: how long they take, how good they are, what the sampler costs.

Planning is timed for a seeded random cluster of 10,000 workers. Quality is simulated on the clusters of
``bench.clusters`` with noise, from a uniform start; 1.0 of the oracle is the best split that exists. So are the papers'
climbs, step by step (``bench.journey``).
"""

from __future__ import annotations

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from statistics import median, median_low
from typing import Any

import numpy as np

from omnilearn.bench import journey
from omnilearn.bench.clusters import CLUSTERS, Cluster, simulate
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.control import Optimal, Policy, Proportional, allocate
from omnilearn.data import Sampler

GOALS = {"allocate_ms": 10.0, "replan_ms": 25.0, "sampler_ms_per_4096": 1.0}
"""In milliseconds, for 10,000 workers and 4,096 indices."""
SAMPLES, CUT = 100_000_000, 4096
NEAR = 0.97
CLIMBERS: dict[str, Policy] = {"optimal": Optimal(), "proportional": Proportional()}
POLICIES: dict[str, Policy] = {"optimal": Optimal(first="uniform"), "proportional": Proportional(first="uniform")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=_positive, default=10_000, help="workers to plan for (default: 10000)")
    parser.add_argument("--repeats", type=_positive, help="how often each thing is timed (default: 25, quick: 5)")
    parser.add_argument("--seeds", type=_positive, help="simulations per cluster and policy (default: 20, quick: 3)")
    parser.add_argument("--replans", type=_positive, help="re-plans per simulation (default: 40, quick: 12)")
    parser.add_argument(
        "--steps", type=_positive, help="at each level of the simulated climbs (default: 60, quick: 20)"
    )
    parser.add_argument("--noise", type=float, default=0.05, help="relative noise of step times (default: 0.05)")


def run(args: argparse.Namespace) -> Record:
    repeats = args.repeats or (5 if args.quick else 25)
    seeds = args.seeds or (3 if args.quick else 20)
    replans = args.replans or (12 if args.quick else 40)

    timings = planning(args.workers, repeats) | {"sampler_ms_per_4096": sampler_ms(repeats)}
    rows: list[Row] = [
        {"measured": name, **median_and_spread(values), "goal": GOALS[name]} for name, values in timings.items()
    ]
    summary: dict[str, Any] = {"workers": args.workers, "noise": args.noise, "seeds": seeds, "replans": replans}
    for row in rows:
        summary[row["measured"]] = row["median"]
        summary[f"{row['measured']}_spread"] = [row["lower"], row["upper"]]
    summary["sampler_mb_at_100m"] = sampler_mb()
    rows.append({"measured": "sampler_mb_at_100m", "value": summary["sampler_mb_at_100m"]})

    quality = [
        convergence(cluster, name, policy, seeds, replans, args.noise)
        for cluster in CLUSTERS
        for name, policy in POLICIES.items()
    ]
    for key in ("replans_to_97", "fraction_of_oracle"):
        summary[key] = {
            cluster.name: {row["policy"]: row[key] for row in quality if row["cluster"] == cluster.name}
            for cluster in CLUSTERS
        }
    steps = args.steps or (20 if args.quick else 60)
    climbs = [
        climbing(climb, name, policy, seeds, steps, args.noise)
        for climb in journey.CLIMBS
        for name, policy in CLIMBERS.items()
    ]
    summary["steps"] = steps
    summary["climbs"] = {
        climb.name: {row["policy"]: row["fraction_of_oracle"] for row in climbs if row["climb"] == climb.name}
        for climb in journey.CLIMBS
    }
    return Record("control", rows + quality + climbs, summary)


def random_cluster(workers: int, seed: int = 0) -> Cluster:
    """Workers whose lines are as different as in a large shared cluster; reducing over n of them costs some log n."""
    random = np.random.default_rng(seed)
    return Cluster(
        f"{workers} random workers",
        tuple(random.lognormal(np.log(0.05), 0.5, workers).tolist()),
        tuple(random.lognormal(np.log(0.002), 0.7, workers).tolist()),
        (0.0, *(0.005 * np.log2(np.arange(1, workers + 1))).tolist()),
        64 * workers,
    )


def planning(workers: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds for one solution, and for one re-plan: taking a report in, fitting, solving, deciding."""
    _say(f"planning for {workers:,} workers")
    cluster = random_cluster(workers)
    problem, policy, random = cluster.problem, Optimal(), np.random.default_rng(1)
    alpha, beta, cost = (np.asarray(v) for v in (cluster.alpha, cluster.beta, cluster.reduce_cost))
    solving = [_ms(lambda: allocate(problem, alpha, beta, cost)) for _ in range(repeats + 1)][1:]
    state, replanning = policy.start(problem), []
    for replan in range(repeats + 5):
        report = cluster.run(state.plan.batches, 1, 0.05, random)
        begin = time.perf_counter()
        state = policy.update(problem, state, report)
        if replan >= 5:  # the first ones know too little to be real re-plans
            replanning.append((time.perf_counter() - begin) * 1e3)
    return {"allocate_ms": solving, "replan_ms": replanning}


def convergence(cluster: Cluster, name: str, policy: Policy, seeds: int, replans: int, noise: float) -> Row:
    """How soon a policy is near the optimum, where it ends, and how often it still changes batches then."""
    _say(f"{cluster.name}: {name}")
    first, last, changes = [], [], []
    for seed in range(seeds):
        history = simulate(cluster, policy, replans, noise=noise, seed=seed)
        fractions = [replan.fraction for replan in history]
        fractions.append(cluster.optimum / cluster.time(history[-1].state.plan.batches))
        first.append(next((n for n, fraction in enumerate(fractions) if fraction >= NEAR), float("inf")))
        last.append(fractions[-1])
        changes.append(float(np.mean([replan.changed for replan in history[4:]] or [False])))
    soon = median_low(first)
    return {
        "cluster": cluster.name,
        "policy": name,
        "replans_to_97": None if soon == float("inf") else int(soon),
        "fraction_of_oracle": median(last),
        "lower": median_and_spread(last)["lower"],
        "upper": median_and_spread(last)["upper"],
        "later_changes": float(np.mean(changes)),
    }


def climbing(climb: journey.Climb, name: str, policy: Policy, seeds: int, steps: int, noise: float) -> Row:
    """How near the optimum a policy is all the way, and how soon after each change of the level."""
    _say(f"{climb.name}, climb: {name}")
    stages = [climb.at(level) for level in journey.CLIMB]
    paces = [journey.travel(stages, policy, steps, noise, seed) for seed in range(seeds)]
    fractions = median_and_spread([float(1 / np.mean(1 / pace)) for pace in paces])
    soon = [[float("inf") if k is None else k for k in journey.steps_to_near(pace)] for pace in paces]
    typical = [median_low(stage) for stage in zip(*soon, strict=True)]
    return {
        "climb": climb.name,
        "policy": name,
        "fraction_of_oracle": fractions["median"],
        "lower": fractions["lower"],
        "upper": fractions["upper"],
        "steps_to_90": ", ".join("–" if k == float("inf") else str(k) for k in typical),
        "never": float(np.mean(np.isinf(soon))),
    }


def sampler_ms(repeats: int) -> list[float]:
    """Milliseconds to cut one rank's 4,096 indices out of a step of an epoch of 100 million samples."""
    _say(f"cutting {CUT:,} of {SAMPLES:,} samples")
    shares = Sampler(SAMPLES, [CUT] * 8, seed=0).shares(3)
    next(shares)
    return [_ms(lambda: next(shares)) for _ in range(4 * repeats)]


def sampler_mb() -> float:
    """The most memory the sampler holds at a time in an epoch of 100 million samples, in MB."""
    tracemalloc.start()
    try:
        for share in islice(Sampler(SAMPLES, [CUT] * 8, seed=0).shares(3), 20):
            assert len(share.indices) == CUT
        return tracemalloc.get_traced_memory()[1] / 1e6
    finally:
        tracemalloc.stop()


def _ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def _say(text: str) -> None:
    print(f"bench control: {text}", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
