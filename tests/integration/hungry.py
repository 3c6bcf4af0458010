"""A model that needs megabytes per sample, and a worker that runs short of them for real."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from omnilearn import OmniLearn
from omnilearn.bench.scarcity import Scarcity
from omnilearn.data import Sampler
from tests.integration.test_exact import FEATURES, SIZE, Data, Script

WIDTH = 2**14
PER_SAMPLE = 2 * 16 * WIDTH * 8
"""Bytes that the forward pass keeps per sample; the backward pass needs as much again for a while."""


class Hungry(nn.Module):
    """Two linear layers, with 16·WIDTH activations between them."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.norm(self.first(x)).repeat(1, WIDTH).tanh()
        return self.last(wide.view(len(x), WIDTH, 16).mean(dim=1))


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).pow(2).mean()


@lru_cache
def alone(epochs: int, batch: int, by_token: bool = False) -> list[torch.Tensor]:
    """One process, plain PyTorch, without any limit."""
    model = Hungry()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data, sampler = Data(), Sampler(SIZE, [batch], seed=11)
    for _ in range(epochs):
        for share in sampler.shares(0):
            x, y, tokens = (t[share.indices] for t in (data.x, data.y, data.tokens))
            per_sample = (model(x) - y).pow(2).mean(dim=1)
            weights = tokens.double() / tokens.sum() if by_token else torch.full_like(per_sample, 1 / len(x))
            (per_sample * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sampler.next_epoch()
    return [p.detach().clone() for p in model.parameters()]


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("omnilearn")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def train(
    plans: list[list[int]],
    *,
    short: dict[int, tuple[int, int]] | None = None,
    door: str = "step",
    epochs: int = 2,
    by_token: bool = False,
    norm: bool = False,
    log_dir: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train by ``plans``; rank k runs short at a step, with room for so many bytes: ``short={k: (step, bytes)}``."""
    shortage, passes = Scarcity(), []
    workers = options.pop("num_workers", 0)
    try:
        with log_lines() as lines, OmniLearn(
            sum(plans[0]), policy=Script(plans), seed=11, log_dir=log_dir, timeout=60, **options
        ) as omni:  # fmt: skip
            model = Hungry(norm).to(omni.device)
            model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))

            def compute(batch: Any) -> torch.Tensor:
                x, y, tokens = batch
                passes.append(len(x))
                per_sample = (model(x) - y).pow(2).mean(dim=1)
                return (per_sample * tokens).sum() / tokens.sum() if by_token else per_sample.mean()

            at, room = (short or {}).get(omni.rank, (-1, 0))
            step = 0
            loader = omni.loader(Data(), shuffle=True, num_workers=workers)
            for _ in range(epochs):
                if step == at:
                    shortage.begin(room, omni.device)
                for batch in loader:
                    if door == "opaque":
                        omni.step(lambda held: compute(held.batch), SimpleNamespace(batch=batch))
                    elif door == "step":
                        omni.step(compute, batch, weight=(lambda part: part[2].sum()) if by_token else None)
                    else:
                        omni.backward(compute(batch))
                        optimizer.step()
                        optimizer.zero_grad()
                    if not omni.accumulating:
                        step += 1
                        if step == at:
                            shortage.begin(room, omni.device)
            state = [p.detach().cpu().clone() for p in model.parameters()]
            buffers = [b.detach().cpu().clone() for b in model.buffers()]
            memory, problem = omni._engine.memory, omni._engine.planner.problem
            return {
                "parameters": state, "buffers": buffers, "passes": passes, "log": lines, "steps": step,
                "micro": memory.micro_batch, "known": None if problem.micro is None else problem.micro.tolist(),
            }  # fmt: skip
    finally:
        shortage.end()


def call(plans: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """``train``, for a gang, which has no keywords."""
    return train(plans, **options)


def hopeless(step: int, room: int) -> None:
    """One sample is too much for rank 1."""
    global WIDTH
    WIDTH, before = 2**18, WIDTH
    try:
        train([[1, 3]], short={1: (step, room)}, epochs=1)
    finally:
        WIDTH = before
