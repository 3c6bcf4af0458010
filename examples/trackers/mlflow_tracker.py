"""Send a run to MLflow: as it goes from your script, or afterwards from its log folder.

In a script:   omni.track(Mlflow())              # after mlflow.start_run() on rank 0
Afterwards:    python mlflow_tracker.py runs/20261115-053049
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import mlflow

from omnilearn.observe import replay


class Mlflow:
    """A tracker: ``log`` and ``close`` are all it takes."""

    def __init__(self) -> None:
        run = mlflow.active_run()
        if run is None:
            raise RuntimeError("call mlflow.start_run() first")
        self._run = run.info.run_id  # an active run belongs to the thread that started it: name it

    def log(self, values: Mapping[str, float], step: int, t: float) -> None:
        mlflow.log_metrics(dict(values), step=step, timestamp=int(1000 * t), run_id=self._run)

    def close(self) -> None:
        """The run belongs to the script, which ends it."""


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    mlflow.set_experiment("omnilearn")
    with mlflow.start_run(run_name=folder.name):
        replay(folder, Mlflow())
