"""Whatever a loop zeroes, clips or adds up: its gradient is that of one process on the whole global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from omnilearn import OmniLearn, OmniLearnError
from omnilearn.pytorch.memory import Memory
from tests.gang import Gang
from tests.integration.common import Script, blobs, mlp, snapshot

SIZE, BATCH = 96, 12
CHANGING = [[6, 6], [2, 10], [9, 3], [5, 7]]
PARKING = [[6, 6], [12, 0], [12, 0], [12, 0], [5, 7], [0, 12], [4, 8]]


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_process(accumulate: int = 1, clip: float | None = None, weights: bool = False) -> list[torch.Tensor]:
    model, optimizer = make()
    x, y = blobs(SIZE).tensors
    for step in range(SIZE // BATCH):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss = F.cross_entropy(model(x[part].double()), y[part], reduction="none")
        w = weight_of(y[part])
        (((loss * w).sum() / w.sum()) if weights else loss.mean()).backward()
        if (step + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return snapshot(model, optimizer)


def weight_of(y: torch.Tensor) -> torch.Tensor:
    return 1.0 + y.double()


def zero(model: Any, optimizer: Any, how: str) -> None:
    if how == "optimizer":
        optimizer.zero_grad()
    elif how == "in place":
        optimizer.zero_grad(set_to_none=False)
    elif how == "model":
        model.zero_grad()
    else:
        for p in model.parameters():
            p.grad = None


def looped(
    plans: Any, micro: int | None, first: bool, how: str, clip: float | None = None, weights: bool = False
) -> Any:
    model, optimizer = make()
    with OmniLearn(BATCH, policy=Script(plans), micro_batch=micro) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        passes = 0
        for x, y in omni.loader(blobs(SIZE)):
            if first:
                zero(model, optimizer, how)
            loss = F.cross_entropy(model(x.double()), y, reduction="none")
            w = weight_of(y)
            if weights:
                omni.backward((loss * w).sum() / w.sum(), weight=float(w.sum()))
            else:
                omni.backward(loss.mean())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)  # torch's own
            optimizer.step()
            if not first:
                zero(model, optimizer, how)
            passes += 1
        return passes, snapshot(model, optimizer)


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("how", ["optimizer", "in place", "model", "by hand"])
@pytest.mark.parametrize("first", [True, False])
def test_zeroing_anywhere_loses_nothing(gang: Gang, first: bool, how: str) -> None:
    expected = one_process()
    for ranks, plans in ((1, [[12]]), (2, CHANGING), (2, PARKING)):
        results = gang.run(ranks, looped, plans, 2, first, how)
        assert max(passes for passes, _ in results) > SIZE // BATCH, "in micro-batches"
        for _, state in results:
            close(state, expected)


@pytest.mark.parametrize("first", [True, False])
def test_zeroing_with_weights(gang: Gang, first: bool) -> None:
    for _, state in gang.run(2, looped, PARKING, 4, first, "model", None, True):
        close(state, one_process(weights=True))


def test_torchs_own_clipping_clips_the_whole_step(gang: Gang) -> None:
    for micro in (None, 2):
        for _, state in gang.run(2, looped, CHANGING, micro, True, "optimizer", 0.05):
            close(state, one_process(clip=0.05))


def learned(limit: int, first: bool) -> Any:
    """Nobody asked for micro-batches: they were learned from memory (here it is told what it learned)."""
    model, optimizer = make()
    with OmniLearn(BATCH, policy="uniform") as omni:
        model, optimizer = omni.prepare(model, optimizer)
        memory: Memory = omni._engine.memory  # type: ignore[union-attr]
        memory.refuse(2 * limit)
        pieces = 0
        for x, y in omni.loader(blobs(SIZE)):
            if first:
                optimizer.zero_grad()
            omni.backward(F.cross_entropy(model(x.double()), y))
            optimizer.step()
            if not first:
                model.zero_grad()
            pieces += 1
        return pieces, snapshot(model, optimizer)


@pytest.mark.parametrize("first", [True, False])
def test_micro_batches_that_were_learned(gang: Gang, first: bool) -> None:
    for pieces, state in gang.run(2, learned, 2, first):
        assert pieces == 3 * SIZE // BATCH
        close(state, one_process())


def stepped(plans: Any, micro: int | None, accumulate: int) -> Any:
    """omni.step, zeroed from outside between its micro-batches, too."""
    model, optimizer = make()
    with OmniLearn(BATCH, policy=Script(plans), micro_batch=micro) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        for batch in omni.loader(blobs(SIZE)):
            omni.step(lambda b: F.cross_entropy(model(b[0].double()), b[1]), batch)
            model.zero_grad()
        return snapshot(model, optimizer)


def test_omni_step_with_zeroing_from_outside(gang: Gang) -> None:
    for state in gang.run(2, stepped, PARKING, 2, 1):
        close(state, one_process())


# The script's own accumulation


def accumulated(plans: Any, micro: int | None, every: int, weights: bool) -> Any:
    model, optimizer = make()
    with OmniLearn(BATCH, policy=Script(plans), micro_batch=micro) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.loader(blobs(SIZE)):
            loss, w = F.cross_entropy(model(x.double()), y, reduction="none"), weight_of(y)
            if weights:
                omni.backward((loss * w).sum() / w.sum(), weight=float(w.sum()))
            else:
                omni.backward(loss.mean())
            if not omni.accumulating and (omni.global_step + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        return snapshot(model, optimizer)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("micro", [None, 2])
def test_the_scripts_own_accumulation(gang: Gang, micro: int | None, weights: bool) -> None:
    """Who was parked meanwhile gets what the others have added up so far."""
    expected = one_process(accumulate=4, weights=weights)
    for plans in (CHANGING, PARKING):
        for state in gang.run(2, accumulated, plans, micro, 4, weights):
            close(state, expected)


def never(mode: str) -> Any:
    model, optimizer = make()
    with OmniLearn(4, policy="uniform", mode=mode) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.loader(blobs(4 * 70)):
            omni.backward(F.cross_entropy(model(x.double()), y))
        return None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_step_of_an_optimizer_is_noticed(caplog: pytest.LogCaptureFixture, mode: str) -> None:
    never(mode)
    assert any("64 batches without optimizer.step()" in record.getMessage() for record in caplog.records)


# Asynchronous mode


def asynchronous(micro: int | None, first: bool, how: str, accumulate: int, weights: bool) -> Any:
    """One worker: the server applies what it sends, so that the weights are those of plain PyTorch."""
    model, optimizer = make()
    with OmniLearn(BATCH, policy="uniform", mode="async", lr_scaling="none", micro_batch=micro) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        batches = 0
        for x, y in omni.loader(blobs(SIZE)):
            if first and accumulate == 1:
                zero(model, optimizer, how)
            loss, w = F.cross_entropy(model(x.double()), y, reduction="none"), weight_of(y)
            if weights:
                omni.backward((loss * w).sum() / w.sum(), weight=float(w.sum()))
            else:
                omni.backward(loss.mean())
            if omni.accumulating:
                optimizer.step()  # as a loop does that knows nothing of micro-batches
                zero(model, optimizer, how) if not first else None
                continue
            batches += 1
            if batches % accumulate == 0:
                optimizer.step()
                zero(model, optimizer, how)
        return snapshot(model)


@pytest.mark.parametrize("how", ["optimizer", "model"])
@pytest.mark.parametrize("first", [True, False])
def test_asynchronously_zeroing_loses_nothing(first: bool, how: str) -> None:
    close(asynchronous(3, first, how, 1, False), one_process()[:4])


@pytest.mark.parametrize("micro", [None, 4])
@pytest.mark.parametrize("weights", [False, True])
def test_asynchronously_the_scripts_own_accumulation(micro: int | None, weights: bool) -> None:
    close(asynchronous(micro, False, "by hand", 2, weights), one_process(accumulate=2, weights=weights)[:4])


# What cannot be done, yet


def two_cycles(mode: str) -> None:
    model, optimizer = make()
    with OmniLearn(BATCH, policy="uniform", mode=mode, micro_batch=4) as omni:
        model, optimizer = omni.prepare(model, optimizer)
        for x, y in omni.loader(blobs(SIZE)):
            for _ in range(2):
                omni.backward(F.cross_entropy(model(x.double()), y))
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_cycles_in_one_step_are_refused(mode: str) -> None:
    with pytest.raises(OmniLearnError, match="called twice for one batch"):
        two_cycles(mode)
