"""What the picture of a report in the README shows. Run by: make picture

The benchmark's "heavy" work on four unequal workers, from equal batches on, so that the gain is measured in the run.
"""

from __future__ import annotations

from omnilearn import OmniLearn
from omnilearn.bench.workloads import workload
from omnilearn.control import Optimal

STEPS = 80

work = workload("heavy")
model = work.model()
with OmniLearn(work.global_batch, policy=Optimal(first="uniform")) as omni:
    model, optimizer = omni.prepare(model, work.optimizer(model.parameters()))
    for x, y in omni.loader(work.dataset(STEPS * work.global_batch), shuffle=True):
        omni.backward(work.loss(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
