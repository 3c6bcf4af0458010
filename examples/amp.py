"""Mixed precision: autocast and a GradScaler, as in plain PyTorch. Run: omnilearn run --nproc 2 examples/amp.py"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

generator = torch.Generator().manual_seed(0)
x = torch.randn(1024, 32, generator=generator)
data = TensorDataset(x, (x[:, 0] > 0).long())

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

omni = OmniLearn(global_batch=128)
half = torch.float16 if omni.device.type == "cuda" else torch.bfloat16
scaler = torch.amp.GradScaler(omni.device.type, enabled=half == torch.float16)
model, optimizer, scaler = omni.prepare(model, optimizer, scaler)
loader = omni.loader(data, shuffle=True)

for epoch in range(4):
    for inputs, targets in loader:
        with torch.autocast(omni.device.type, dtype=half):
            loss = F.cross_entropy(model(inputs), targets)
        omni.backward(scaler.scale(loss))
        scaler.unscale_(optimizer)
        omni.clip_grad_norm_(1.0)
        scaler.step(optimizer)  # steps with overflow are left out, on all workers alike
        scaler.update()
        optimizer.zero_grad()
    if omni.is_main:
        with torch.no_grad():
            correct = (model(x.to(omni.device)).argmax(dim=1).cpu() == data.tensors[1]).float().mean()
        print(f"epoch {epoch}: accuracy {correct:.3f}")
