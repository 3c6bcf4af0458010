"""A global batch larger than memory: shares are computed in micro-batches, reduced once per step, exactly.

``optimizer.step``, ``zero_grad`` and the scheduler act only at the end of a step, so the loop stays as it is.
Run: omnilearn run --nproc 2 examples/accumulation.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

generator = torch.Generator().manual_seed(0)
x = torch.randn(2048, 16, generator=generator)
data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)

omni = OmniLearn(global_batch=256, micro_batch=32)  # at most 32 samples at a time on each worker
model, optimizer, scheduler = omni.prepare(model, optimizer, scheduler)
loader = omni.loader(data, shuffle=True)

for epoch in range(5):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        omni.backward(loss)
        omni.clip_grad_norm_(1.0)  # of the whole step's gradient; omni.accumulating says whether more is to come
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if omni.is_main:
        print(f"epoch {epoch}: learning rate {scheduler.get_last_lr()[0]:.4f}")
