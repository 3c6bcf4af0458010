"""What events cost a training process: the engine's own way of writing them, timed without the training around it.

A difference between whole trainings would drown in noise: some microseconds in steps of milliseconds. So only what
events add to a step is run: keeping the loss, rounding, merging, encoding, writing to a real file. Times are of the
thread's own work, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

from omnilearn.bench.arguments import add_device, positive
from omnilearn.bench.record import Record, Row, median_and_spread
from omnilearn.engine.story import Story
from omnilearn.observe import EventLog
from omnilearn.pytorch.clock import later
from omnilearn.pytorch.world import World

GOAL = 0.005
"""Of the step time."""
EXCHANGE = 5
"""Steps between two exchanges of timings, after which the engine writes."""
BLOCK = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=positive, help=f"blocks of {BLOCK} steps (default: 200, quick: 20)")
    add_device(parser)


def run(args: argparse.Namespace) -> Record:
    blocks = args.blocks or (20 if args.quick else 200)
    world = World(args.device, timedelta(seconds=60))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="omnilearn-bench-") as folder:
        for part, steps in (("first steps, written as they come", 250), ("later steps, merged", blocks * BLOCK)):
            log = EventLog(Path(folder) / part[:5], 0)
            costs = _costs(Story(log, world), steps, world.device)
            log.close()
            size = sum(path.stat().st_size for path in (Path(folder) / part[:5]).iterdir())
            spread = {f"us_per_step_{name}": cost for name, cost in median_and_spread(costs).items()}
            rows.append({"part": part, **spread, "steps": steps, "bytes_per_step": size / steps})
    worst = max(row["us_per_step_median"] for row in rows)
    summary = {
        "device": args.device,
        "us_per_step": worst,
        "share_of_a_10_ms_step": worst / 1e4,
        "shortest_step_ms_within_goal": worst / 1e3 / GOAL,
        "goal": GOAL,
    }
    return Record("events", rows, summary)


def _costs(story: Story, steps: int, device: torch.device) -> list[float]:
    """Microseconds per step that events add, by exchange for the first steps and by block later."""
    loss, each = torch.tensor(0.25, device=device), 50 if steps < BLOCK else BLOCK
    costs, spent = [], 0.0
    for step in range(0, steps, EXCHANGE):
        begin = time.thread_time()
        kept = [later(loss) for _ in range(EXCHANGE)]
        story.steps(
            step,
            batch=[32] * EXCHANGE,
            busy=[round(0.0123456789 + 1e-7 * step, 6)] * EXCHANGE,
            wait=[round(0.00123456789, 6)] * EXCHANGE,
            data=[round(0.000123456789, 6)] * EXCHANGE,
            loss=[float(f"{float(value):.6g}") for value in kept],
        )
        spent += time.thread_time() - begin
        if (step + EXCHANGE) % each == 0:
            costs.append(1e6 * spent / each)
            spent = 0.0
    return costs
