"""Stop at any step and go on: weights, optimizer, data position, controller and random numbers are saved.

Run: omnilearn run --nproc 2 examples/checkpoint.py FOLDER    and the same command again to continue where it stopped
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

folder, stop_after, epochs = Path(sys.argv[1]), 10, 4
generator = torch.Generator().manual_seed(0)
x = torch.randn(512, 16, generator=generator)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))

torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

omni = OmniLearn(global_batch=64, park=False)  # nobody sits out, so that all stop at the same step
model, optimizer = omni.prepare(model, optimizer)
loader = omni.loader(data, shuffle=True)
steps = 0
if (folder / "checkpoint.pt").exists():
    steps = omni.load(folder)["steps"]
    print(f"continuing after step {steps}, in epoch {omni.epoch}")

for epoch in range(omni.epoch, epochs):
    for inputs, targets in loader:
        omni.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % stop_after == 0:
            omni.save(folder, steps=steps)  # a crash while saving leaves the checkpoint before it whole
            print(f"saved after step {steps}, in epoch {epoch}")
            raise SystemExit  # as if the machine had been taken away
print(f"done after step {steps}")
