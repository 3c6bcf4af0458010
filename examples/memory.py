"""Memory may differ from worker to worker: what does not fit at once is computed in parts, to the same gradient.

Nothing is configured. ``omni.step`` survives running out of memory, and learns how much fits; a worker with little
memory still gets the share that its speed deserves.

Run: omnilearn run --nproc 2 examples/memory.py
     omnilearn run --emulate examples/memory.toml examples/memory.py    # worker 1 has too little memory
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

generator = torch.Generator().manual_seed(0)
x = torch.randn(1024, 16, generator=generator)
data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 2**16), nn.Tanh(), nn.Linear(2**16, 1))  # some 0.7 MB per sample
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

omni = OmniLearn(global_batch=512)
model, optimizer = omni.prepare(model, optimizer)
loader = omni.loader(data, shuffle=True)


def compute_loss(batch):
    inputs, targets = batch  # all of this worker's share, or a part of it
    return F.mse_loss(model(inputs), targets)


for epoch in range(4):
    total = seen = 0
    for batch in loader:
        total += omni.step(compute_loss, batch).item() * len(batch[0])
        seen += len(batch[0])
    mean = omni.mean(total / max(seen, 1), weight=seen)  # a worker that was parked has seen nothing
    if omni.is_main:
        print(f"epoch {epoch}: loss {mean:.3f}, batches {omni.plan.batches}")
