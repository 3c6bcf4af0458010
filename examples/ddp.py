"""Plain DistributedDataParallel on scikit-learn's digits. Run: torchrun --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data import TensorDataset

digits = load_digits()
x_all, y_all = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
train_set = TensorDataset(x_all, y_all)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)

dist.init_process_group("gloo")
model = DistributedDataParallel(model)
sampler = DistributedSampler(train_set)
loader = DataLoader(train_set, batch_size=128 // dist.get_world_size(), sampler=sampler)

for epoch in range(5):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {(model(x_all).argmax(dim=1) == y_all).float().mean():.3f}")

del model  # gloo's threads, which it would keep, must end before Python does
dist.destroy_process_group()
