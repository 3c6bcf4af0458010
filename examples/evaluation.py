"""Validation over all workers: each sample once, split by speed; the mean is the same on every worker.

Run: omnilearn run --nproc 2 examples/evaluation.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set, test_set = TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

omni = OmniLearn(global_batch=128)
model, optimizer = omni.prepare(model, optimizer)
train, test = omni.loader(train_set, shuffle=True), omni.loader(test_set, train=False)

for epoch in range(5):
    for inputs, targets in train:
        omni.backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    correct = seen = 0
    with torch.no_grad():
        for inputs, targets in test:
            correct += (model(inputs).argmax(dim=1) == targets).sum().item()
            seen += len(targets)
    accuracy = omni.mean(correct / max(seen, 1), weight=seen)  # called by all workers, the same on all
    if omni.is_main:
        print(f"epoch {epoch}: accuracy {accuracy:.3f} ({seen} of {len(test_set)} samples were evaluated here)")
