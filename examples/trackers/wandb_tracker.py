"""Send a run to Weights & Biases: as it goes from your script, or afterwards from its log folder.

In a script:   omni.track(Wandb(wandb.run))      # after wandb.init() on rank 0
Afterwards:    python wandb_tracker.py runs/20261115-053049     (WANDB_MODE=offline works too)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from omnilearn.observe import replay


class Wandb:
    """A tracker: ``log`` and ``close`` are all it takes."""

    def __init__(self, run: Any) -> None:
        self._run = run
        # Workers report at their own steps, W&B's count must not go back: an axis of our own.
        run.define_metric("omnilearn/step")
        run.define_metric("omnilearn/*", step_metric="omnilearn/step")

    def log(self, values: Mapping[str, float], step: int, t: float) -> None:
        self._run.log({"omnilearn/step": step, **{f"omnilearn/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """The run belongs to the script, which ends it."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    with wandb.init(project="omnilearn", name=folder.name) as run:
        replay(folder, Wandb(run))
