"""Sequences of unequal length: the gradient is the mean over all workers' tokens, not a mean of means.

Run: omnilearn run --nproc 2 examples/token_weights.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from omnilearn import OmniLearn

PAD, VOCABULARY = 0, 32
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(4, 40, (512,), generator=generator).tolist()
# Each token follows from the one before: there is something to learn.
texts = [torch.arange(n) * 5 % (VOCABULARY - 1) + 1 for n in lengths]

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

omni = OmniLearn(global_batch=64)
model, optimizer = omni.prepare(model, optimizer)
loader = omni.loader(texts, shuffle=True, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))

for epoch in range(4):
    for tokens in loader:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        loss = F.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=PAD)  # mean over real tokens
        omni.backward(loss, weight=(targets != PAD).sum())
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = omni.mean(loss, weight=(targets != PAD).sum().item())
    if omni.rank == omni.plan.active[0]:
        print(f"epoch {epoch}: loss per token {mean_loss:.3f}")
