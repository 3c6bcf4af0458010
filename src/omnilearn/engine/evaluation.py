"""Evaluation: each sample once, split by speed over the workers that evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from omnilearn.control import Problem, State, apportion


def part(rank: int, workers: Sequence[int], size: int, batch: int, state: State, problem: Problem) -> range:
    """The samples of this worker, of ``size`` in all; none where it does not take part."""
    if rank not in workers:
        return range(0)
    speeds = throughput(state, problem.speeds, batch)[list(workers)]
    count = len(workers)
    least = 1 if size >= count else 0
    parts = apportion(speeds, size, np.full(count, least), np.full(count, size))
    at = list(workers).index(rank)
    start = int(parts[:at].sum())
    return range(start, start + int(parts[at]))


def throughput(state: Any, nominal: Any, batch: int) -> Any:
    """Samples per second of every worker at this batch, as far as measured; else the nominal speeds."""
    curves = getattr(state, "curves", None)
    if curves is None or (curves.seen == 0).any():
        return np.asarray(nominal, dtype=np.float64)
    return batch / curves.times(np.full(len(curves.alpha), batch))
