"""The same with OmniLearn on scikit-learn's digits. Run: omnilearn run --nproc 2 examples/omni.py"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn

digits = load_digits()
x_all, y_all = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set = TensorDataset(x_all, y_all)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)

omni = OmniLearn(global_batch=128)
model, optimizer = omni.prepare(model, optimizer)
loader = omni.loader(train_set, shuffle=True)

for epoch in range(5):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        omni.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if omni.is_main:
        print(f"epoch {epoch}: accuracy {(model(x_all).argmax(dim=1) == y_all).float().mean():.3f}")
