"""Asynchronous: nobody waits for anybody. Run: omnilearn run --nproc 3 examples/asynchronous.py

A worker may join later, also from another host: OMNILEARN_JOIN=HOST:PORT python examples/asynchronous.py
(the server's address is in server.json in the run's log folder).
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

digits = load_digits()
x_all, y_all = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set, test_set = TensorDataset(x_all[:1500], y_all[:1500]), TensorDataset(x_all[1500:], y_all[1500:])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

omni = OmniLearn(global_batch=128, mode="async", staleness="scale")
model, optimizer, scheduler = omni.prepare(model, optimizer, scheduler)
loader = omni.loader(train_set, shuffle=True)
tests = omni.loader(test_set, train=False)

for epoch in range(omni.epoch, 5):  # a worker that joins late begins with the epoch under way
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        omni.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    with torch.no_grad():
        right = [(model(x).argmax(dim=1) == y).float() for x, y in tests]  # this worker's part of the test set
    mine = torch.cat(right) if right else torch.zeros(0)
    accuracy = omni.mean(mine.sum() / max(len(mine), 1), weight=len(mine))
    if omni.is_main:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} with {omni.world_size} workers, batches {omni.plan.batches}")
