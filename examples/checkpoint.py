"""Stop at any moment and go on: weights, optimizer, data position, controller and random numbers are saved.

Run: omnilearn run --nproc 2 examples/checkpoint.py FOLDER                     and again to continue where it stopped
     omnilearn run --nproc 2 --max-restarts 1 examples/checkpoint.py FOLDER 15    a worker dies in step 15; all go on
"""

import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

folder, dies_in, epochs = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None, 4
generator = torch.Generator().manual_seed(0)
x = torch.randn(512, 16, generator=generator)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))

torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

omni = OmniLearn(global_batch=64)
model, optimizer = omni.prepare(model, optimizer)
loader = omni.loader(data, shuffle=True)
if omni.resume(folder) is not None and omni.is_main:  # None: there is no checkpoint yet
    print(f"continuing after step {omni.global_step}, in epoch {omni.epoch}")

for _ in range(omni.epoch, epochs):
    for inputs, targets in loader:
        omni.backward(F.mse_loss(model(inputs), targets))
        if omni.global_step + 1 == dies_in and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)  # as if the machine had been taken away
        optimizer.step()
        optimizer.zero_grad()
        omni.save(folder, every=10)  # a crash while saving leaves the checkpoint before it whole
if omni.is_main:
    print(f"done after step {omni.global_step}")
