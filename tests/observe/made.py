"""Log folders of made-up runs, of any size, as the engines would have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from omnilearn.observe.windows import Windows

BEGAN = 1_790_000_000.0


class Folder:
    """Event files whose times are made up."""

    def __init__(self, path: Path, workers: int) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._files = [(path / f"rank-{k}.jsonl").open("w") for k in range(workers)]

    def write(self, rank: int, kind: str, t: float, **fields: Any) -> None:
        event = {"v": 1, "kind": kind, "t": round(BEGAN + t, 4), "rank": rank, **fields}
        self._files[rank].write(json.dumps(event) + "\n")

    def close(self) -> None:
        for file in self._files:
            file.close()


def cores(workers: int) -> list[float]:
    """Unequal: every fourth worker is eight times as fast as the slowest."""
    return [(0.5, 0.75, 1.0, 4.0)[k % 4] for k in range(workers)]


def sync_run(
    path: Path, workers: int = 4, steps: int = 400, *, uniform: bool = False, park: bool = False, name: str = "made"
) -> Path:
    """A synchronous run: a first plan, some steps later a better one, losses that fall."""
    rng = np.random.default_rng(workers)
    folder, speed = Folder(path, workers), np.array(cores(workers))
    total = 32 * workers
    alpha, beta = 0.004 / np.sqrt(speed), 0.002 / speed
    found = [
        {"host": f"{name}-{k // 8}", "cores": c, "device": "cpu", "device_name": "some CPU", "memory": 2**33}
        for k, c in enumerate(cores(workers))
    ]
    options = {"global_batch": total, "policy": "DDP" if uniform else "Optimal(gain=0.02, trial_steps=3)"}
    folder.write(0, "run", 0.0, mode="sync", backend="pytorch", options=options, workers=found, omnilearn="0.1")
    folder.write(0, "epoch", 0.0, epoch=0, step=0, steps=steps)
    equal = [total // workers] * workers
    balanced = [int(b) for b in np.maximum(speed / speed.sum() * total, 1)]
    balanced[-1] += total - sum(balanced)
    plans: list[tuple[int, list[int], str]] = [(0, equal, "uniform" if uniform else "start")]
    if not uniform:
        plans.append((min(20, steps // 4), balanced, "rebalance"))
    if park:
        without = [0 if k == 0 else b for k, b in enumerate(balanced)]
        without[-1] += balanced[0]
        plans.append((steps // 2, without, "park: try"))
    windows = [Windows(0.0) for _ in range(workers)]
    clock, chunk = 0.5, 10
    batches, upcoming = equal, list(plans)
    for first in range(0, steps, chunk):
        while upcoming and upcoming[0][0] <= first:
            step, batches, reason = upcoming.pop(0)
            parked = [k for k, b in enumerate(batches) if not b]
            folder.write(0, "plan", clock, step=step, batches=batches, parked=parked, reason=reason, predicted=None)
        size = np.array(batches)
        n = min(chunk, steps - first)
        busy = (alpha + beta * size) * rng.normal(1, 0.04, (n, workers)).clip(0.8, 1.6)
        busy[:, size == 0] = 0
        ends = busy.max(axis=1, keepdims=True) + 0.002
        clock += float(ends.sum())
        for k in range(workers):
            fields = {
                "step": first,
                "batch": [int(size[k])] * n,
                "busy": [0.0 if first == 0 and i == 0 else round(float(busy[i, k]), 6) for i in range(n)],
                "wait": [round(float(ends[i, 0] - busy[i, k]), 6) if size[k] else 0.0 for i in range(n)],
                "data": [round(float(busy[i, k]) * 0.02, 6) for i in range(n)],
                "loss": [float(f"{2.3 / (1 + (first + i) / 50) + rng.normal(0, 0.02):.5f}") for i in range(n)],
                "memory": 2**28,
            }
            for kind, values in windows[k].add(fields, clock):
                folder.write(k, kind, clock, **values)
    for k in range(workers):
        for kind, values in windows[k].rest(clock):
            folder.write(k, kind, clock, **values)
    if not uniform:
        slowest = float((alpha + beta * total / workers).max())
        folder.write(0, "curves", clock, step=steps, alpha=alpha.tolist(), beta=beta.tolist(), equal=slowest)
    for k in range(workers):
        folder.write(k, "end", clock, ok=True)
    folder.close()
    return path


def async_run(path: Path, workers: int = 4, seconds: float = 60.0) -> Path:
    """An asynchronous run: each worker at its own pace, gradients that come late."""
    rng = np.random.default_rng(workers)
    folder, speed = Folder(path, workers), np.array(cores(workers))
    found = [{"host": "made", "cores": c, "device": "cpu"} for c in cores(workers)]
    folder.write(0, "run", 0.0, mode="async", backend="pytorch", options={"policy": "Optimal()"}, workers=found)
    first, second = [32] * workers, [int(8 + 12 * s) for s in speed]
    for t, batches, reason in ((0.0, first, "start"), (seconds / 3, second, "rebalance")):
        folder.write(0, "plan", t, step=None, batches=batches, parked=[], reason=reason)
    for k in range(workers):
        t, step = 0.0, 0
        while t < seconds:
            batch = first[k] if t < seconds / 3 else second[k]
            n = 5
            busy = (0.01 + 0.005 * batch / speed[k]) * rng.normal(1, 0.05, n)
            wait = rng.uniform(0.004, 0.012, n)
            t += float((busy + wait).sum())
            late = rng.poisson(workers * (1.5 if speed[k] < 1 else 0.6), n)
            folder.write(
                k, "steps", t, worker=k, step=step, updates=step + n, batch=[batch] * n, busy=busy.tolist(),
                wait=wait.tolist(), staleness=late.tolist(), loss=(2 / (1 + t / 9) + rng.normal(0, 0.02, n)).tolist(),
            )  # fmt: skip
            step += n
        folder.write(k, "end", seconds, ok=True)
    folder.write(0, "oom", seconds / 2, step=40, worker=1, samples=24, micro_batch=12)
    folder.close()
    return path


def long_run(path: Path, workers: int = 32, steps: int = 100_000, pace: float = 0.1) -> Path:
    """What a long run leaves: windows at the intervals they are written at, some thousand per worker."""
    rng = np.random.default_rng(0)
    sync_run(path, workers, 300)
    begin, interval = 300, Windows(0.0).interval
    for k in range(workers):
        with (path / f"rank-{k}.jsonl").open("a") as file:
            step, t = begin, begin * pace
            batch = int(16 + k)
            while step < steps:
                n = max(1, min(int(interval(t) / pace), steps - step))
                q = np.sort(rng.normal(0.08, 0.004, 5)).round(6).tolist()
                parts = {
                    "batch": [batch] * 6,
                    "busy": [*q, q[2]],
                    "wait": [0.01, 0.011, 0.012, 0.013, 0.02, 0.0121],
                    "data": [0.0001, 0.0001, 0.0002, 0.0002, 0.001, 0.0002],
                    "loss": [0.1, 0.2, 0.3, 0.4, 0.5, round(0.3 + 2 / (1 + step / 5000), 5)],
                }
                t += n * pace
                record = {"v": 1, "kind": "window", "t": BEGAN + t, "rank": k, "step": step, "steps": n, "measured": n}
                file.write(json.dumps({**record, **parts, "memory": 2**30}) + "\n")
                step += n
    return path
