"""Asynchronous mode where nothing goes wrong: the same loop, every sample once, no update lost."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import IterableDataset, TensorDataset

from omnilearn import OmniLearn, OmniLearnError
from omnilearn.observe import read
from omnilearn.pytorch.asynchronous import process
from omnilearn.pytorch.asynchronous.gradient import SWITCH as EARLY
from omnilearn.pytorch.asynchronous.shared import SWITCH
from tests.gang import Gang, WorkerError
from tests.integration.asynchronous import count_epochs, counting, uses
from tests.integration.common import Numbered, blobs, equal, mlp, norm_net, run_epochs, snapshot

# One worker: the same as plain PyTorch


def alone(kind: str, micro: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def optimizer_of(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p]} for p in model.parameters()]
        groups[0] |= {"lr": 0.02}
        if kind == "adam":
            return torch.optim.Adam(groups, lr=0.01)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)

    data = blobs(90)
    with OmniLearn(24, mode="async", lr_scaling="none", micro_batch=micro) as omni:
        model = mlp().double()
        model, optimizer = omni.prepare(model, optimizer_of(model))
        order = []
        for x, y in omni.loader(data, shuffle=True):
            order.append((x, y))
            omni.backward(F.cross_entropy(model(x.double()), y))
            omni.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert order[-1][0].shape[0] == (90 % 24 if micro is None else 90 % 24 % micro)
        ours = snapshot(model)
    twin = mlp().double()
    plain = optimizer_of(twin)
    for x, y in order if micro is None else _joined(order, 24):
        F.cross_entropy(twin(x.double()), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
    return ours, snapshot(twin)


def served(threads: int, folder: str) -> tuple[list[torch.Tensor], int]:
    """The weights, and how many threads the server had, when it was to compute with so many."""
    with (
        mock.patch.object(process, "threads", return_value=threads),
        OmniLearn(24, mode="async", lr_scaling="none", log_dir=folder) as omni,
    ):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 4)).double()
        model, optimizer = omni.prepare(model, torch.optim.AdamW(model.parameters()))
        for x, y in omni.loader(blobs(96), shuffle=True):
            omni.backward(F.cross_entropy(model(x.double()), y))
            optimizer.step()
            optimizer.zero_grad()
        server = json.loads(Path(folder, "server.json").read_text())["pid"]
        return snapshot(model), len(os.listdir(f"/proc/{server}/task"))


def test_a_server_may_compute_with_several_threads(gang: Gang, tmp_path: Path) -> None:
    """It is forked, and torch's threads do not survive that: those that serve workers have their own."""
    ((one, few),) = gang.run(1, served, 1, str(tmp_path / "one"))
    ((three, more),) = gang.run(1, served, 3, str(tmp_path / "three"))
    assert equal(one, three)
    assert more == few + 2


def test_the_server_has_threads_where_the_workers_leave_cores_free() -> None:
    assert [process.threads("cpu", 64), process.threads("cuda", 2), process.threads("cuda", 16)] == [1, 1, 4]
    assert process.threads("cuda", 200) == process.MOST_THREADS


def _joined(parts: list[Any], size: int) -> list[Any]:
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    return list(zip(x.split(size), y.split(size), strict=True))


@pytest.mark.parametrize(("kind", "micro"), [("sgd", None), ("adam", None), ("adam", 7)])
def test_one_worker_equals_plain_pytorch(gang: Gang, kind: str, micro: int | None) -> None:
    ((ours, theirs),) = gang.run(1, alone, kind, micro)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def early_or_not(clip: bool, micro: int | None) -> Any:
    """Weights after some steps, how many buckets left early, and whether they still may."""
    with OmniLearn(24, mode="async", lr_scaling="none", micro_batch=micro) as omni:
        torch.manual_seed(2)
        model: Any = nn.Sequential(nn.Linear(8, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
        model, optimizer = omni.prepare(model.double(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for x, y in omni.loader(blobs(96), shuffle=True):
            omni.backward(F.cross_entropy(model(x.double()), y))
            omni.mean(1.0)  # another message, between the gradient and its step
            if clip:
                omni.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        gradient = omni._worker.gradient
        return snapshot(model), gradient.early, bool(gradient._hooks)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("micro", [None, 8])
def test_a_gradient_that_leaves_early_is_the_same(gang: Gang, clip: bool, micro: int | None) -> None:
    sent, shared = {SWITCH: "0", EARLY: "1"}, {SWITCH: "1", EARLY: "1"}
    runs = [
        gang.run(1, early_or_not, clip, micro, environment={0: how}) for how in (sent, {**sent, EARLY: "0"}, shared)
    ]
    (early, left, on), (late, none, _), (in_memory, nothing, _) = [results[0] for results in runs]
    assert equal(early, late)
    assert equal(early, in_memory)
    assert (none, nothing) == (0, 0)
    assert left == (3 if clip else 12), "three buckets, in every one of four steps; with clipping, in the first"
    assert on != clip


def careless(habit: str) -> Any:
    """What a loop may do, in its second batch, with a gradient that has left; then two epochs as they should be."""
    omni, model, optimizer, loader = counting(96, ballast=600_000)

    def fail(_: torch.Tensor) -> None:
        raise ArithmeticError("in user code")

    with omni:
        used = 0
        for batch, x in enumerate(loader):
            hook = model.module.uses.register_hook(fail) if habit == "error" and batch == 1 else None
            with contextlib.suppress(ArithmeticError):
                omni.backward(model(x))
            if hook is not None:
                hook.remove()
            if batch == 0:
                assert omni._worker.gradient.early == 2
            if batch == 1 and habit == "break":
                optimizer.zero_grad()
                break
            if batch == 1 and habit == "accumulate":
                continue
            if batch != 1:
                optimizer.step()
                used += 2 * len(x) if batch == 2 and habit == "accumulate" else len(x)
            optimizer.zero_grad()
        omni.mean(0.0)
        first = uses(model)
        count_epochs(model, optimizer, omni, loader, 2)
        return used, first, uses(model)


@pytest.mark.parametrize("habit", ["break", "skip", "error", "accumulate"])
def test_a_gradient_that_left_early_and_was_not_used(gang: Gang, habit: str) -> None:
    ((used, first, last),) = gang.run(1, careless, habit, environment={0: {SWITCH: "0", EARLY: "1"}})
    assert sum(first) == used == {"break": 24, "accumulate": 96}.get(habit, 72)
    assert set(first) <= {0.0, 1.0}
    assert last == [count + 2 for count in first]


# Three workers


def together(log: str, options: dict[str, Any], epochs: int) -> Any:
    large = "ballast" in options
    omni, model, optimizer, loader = counting(120, log_dir=log, **options)
    with omni:
        count_epochs(model, optimizer, omni, loader, epochs)
        assert len(loader) == 5
        assert omni._worker._tensors.shared == (os.environ.get(SWITCH) != "0")
        assert bool(omni._worker.gradient.early) == (large and not omni._worker._tensors.shared)
        return uses(model), omni._worker._step, omni._worker.version, snapshot(model), omni.epoch, omni.world_size


@pytest.mark.parametrize(
    ("options", "sent_by"),
    [({}, ()), ({"num_workers": 2}, ()), ({}, (0, 1, 2)), ({}, (1,)), ({"ballast": 600_000}, (0, 2))],
)
def test_every_sample_once_and_no_update_lost(
    gang: Gang, tmp_path: Path, options: dict[str, Any], sent_by: tuple[int, ...]
) -> None:
    """Whether gradients and parameters are sent, early or not, or lie in memory that is shared with the server."""
    epochs = 3
    options = {"policy": "optimal", **options}
    environment = {rank: {SWITCH: "0"} for rank in sent_by}
    results = gang.run(3, together, str(tmp_path), options, epochs, environment=environment)
    for counts, _, version, state, epoch, _ in results:
        assert counts == [float(epochs)] * 120
        assert version == sum(steps for _, steps, *_ in results), "each gradient is one update"
        assert equal(state, results[0][3])
        assert epoch == epochs
    events = read(tmp_path)
    updates = [e for e in events if e["kind"] == "updates"]
    assert sum(len(e["worker"]) for e in updates) == results[0][2]
    assert sum(sum(e["batch"]) for e in updates) == epochs * 120
    assert max(max(e["staleness"]) for e in updates) > 0, "they ran at the same time"
    run = next(e for e in events if e["kind"] == "run")
    assert (run["mode"], len(run["workers"])) == ("async", 3)
    assert all(sum(e["batches"]) == 24 for e in events if e["kind"] == "plan")
    assert [e["epoch"] for e in events if e["kind"] == "epoch"] == [0, 1, 2]


def linear(log: str) -> Any:
    """With linear scaling and a mean loss, a sample weighs the same in whatever batch it is."""
    omni, model, optimizer, loader = counting(120, lr_scaling="linear", log_dir=log)
    with omni:
        for x in loader:
            omni.backward(model(x) / len(x))
            optimizer.step()
            optimizer.zero_grad()
        return uses(model)


def test_the_learning_rate_follows_the_batch(gang: Gang, tmp_path: Path) -> None:
    for counts in gang.run(3, linear, str(tmp_path)):
        np.testing.assert_allclose(counts, [1 / 8] * 120, rtol=1e-12)


def unequal(log: str, options: dict[str, Any], slow: float, size: int = 240, epochs: int = 4) -> Any:
    """Worker 2 needs longer for every sample."""
    import time

    omni, model, optimizer, loader = counting(size, log_dir=log, **options)
    with omni:
        for _ in range(epochs):
            for x in loader:
                time.sleep((slow if omni.rank == 2 else 0.0005) * len(x))
                omni.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()
                plan = omni.plan.batches
        return uses(model), plan, omni._worker.discarded, omni._worker._step


def test_batches_follow_the_speeds(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(3, unequal, str(tmp_path), {"policy": "optimal"}, 0.005)
    for counts, batches, _, _ in results:
        assert counts == [4.0] * 240
        assert sum(batches) == 24
        assert batches[2] < 8 < max(batches), "the slow one has less than an equal share"


def updates_of(log: Path, key: str) -> list[Any]:
    return [value for e in read(log) if e["kind"] == "updates" for value in e[key]]


def test_late_gradients_weigh_less(gang: Gang, tmp_path: Path) -> None:
    gang.run(3, unequal, str(tmp_path), {"staleness": "scale"}, 0.005)
    staleness, weights = updates_of(tmp_path, "staleness"), updates_of(tmp_path, "weight")
    assert weights == [round(1 / (1 + value), 4) for value in staleness]
    assert max(staleness) > 2


def test_late_gradients_are_discarded(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(3, unequal, str(tmp_path), {"staleness": "discard", "threshold": 2}, 0.005)
    staleness, weights = updates_of(tmp_path, "staleness"), updates_of(tmp_path, "weight")
    assert weights == [float(value <= 2) for value in staleness]
    assert sum(discarded for _, _, discarded, _ in results) == weights.count(0.0) > 0


def test_nobody_goes_on_who_is_too_far_ahead(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(3, unequal, str(tmp_path), {"staleness": "bounded", "threshold": 2}, 0.005, 960, 1)
    assert set(updates_of(tmp_path, "weight")) == {1.0}
    assert results[0][0] == [1.0] * 960
    workers, steps, checked = updates_of(tmp_path, "worker"), [0, 0, 0], [0, 0, 0]
    for worker in workers[: 3 * len(workers) // 4]:  # not the end, where the slow one has nothing left to do
        if min(steps) > 0:  # before that somebody has not begun, and nobody waits for them
            if checked[worker]:  # the first was perhaps under way when the last one began
                assert steps[worker] - min(steps) <= 2
            checked[worker] += 1
        steps[worker] += 1
    assert min(checked) > 2


# The rest of the loop


def scheduled(kind: str) -> Any:
    """Learning rates after each epoch, as the worker sees them."""
    with OmniLearn(24, mode="async", policy="uniform") as omni:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler: Any = (
            ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            if kind == "plateau"
            else LambdaLR(optimizer, lambda step: 0.5**step if kind == "epoch" else 1 - step / 100)
        )
        model, optimizer, scheduler = omni.prepare(model, optimizer, scheduler)
        loader, seen = omni.loader(blobs(96)), []
        for _ in range(3):
            for x, y in loader:
                omni.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if kind == "step":
                    scheduler.step()
            if kind == "epoch":
                scheduler.step()
            if kind == "plateau":
                scheduler.step(1.0)
            omni.mean(0.0)
            seen.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [seen[-1]]
        return seen


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("epoch", [0.5, 0.25, 0.125]), ("step", [0.96, 0.92, 0.88]), ("plateau", [1.0, 0.5, 0.25])],
)
def test_schedulers_follow_the_global_progress(gang: Gang, kind: str, expected: list[float]) -> None:
    """Four global batches an epoch, whatever the number of workers."""
    for seen in gang.run(2, scheduled, kind):
        assert seen == pytest.approx(expected)


def scaled() -> Any:
    """The first step of each worker overflows, and its GradScaler leaves it out."""
    with OmniLearn(24, mode="async") as omni:
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-120)
        before = snapshot(model)
        model, optimizer, scaler = omni.prepare(model, torch.optim.Adam(model.parameters(), fused=True), scaler)
        batches = 0
        for x, y in omni.loader(blobs(96), shuffle=True):
            omni.backward(scaler.scale(100 * F.cross_entropy(model(x), y)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            batches += 1
        assert not equal(before, snapshot(model))
        return batches - omni._worker._step, snapshot(model), omni._worker._outstanding


def test_a_step_that_the_scaler_leaves_out(gang: Gang) -> None:
    results = gang.run(2, scaled)
    for left_out, state, outstanding in results:
        assert left_out == 1
        assert equal(state, results[0][1])
        assert all(torch.isfinite(tensor).all() for tensor in state)
        assert outstanding == 0


def by_hand() -> Any:
    """Things a script may do: its own learning rate, unused and frozen parameters, tokens as weights, an early end."""
    with OmniLearn(12, mode="async", policy="uniform", micro_batch=3) as omni:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(4, 1), "unused": nn.Linear(3, 3), "frozen": nn.Linear(4, 1)})
        model["frozen"].requires_grad_(False)
        before = snapshot(model["unused"]) + snapshot(model["frozen"])
        optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.5, weight_decay=0.1)
        optimizer.add_param_group({"params": list(model["unused"].parameters())})

        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = model

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner["a"](x) + self.inner["frozen"](x)

        wrapped, optimizer = omni.prepare(Wrapped(), optimizer)
        loader = omni.loader(Numbered(48))
        losses = []
        for x, i in loader:
            loss = wrapped(x).square().mean()
            omni.backward(loss, weight=float(i.sum()) + 1)
            losses.append(omni.mean(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.25
        assert equal(before, snapshot(model["unused"]) + snapshot(model["frozen"])), "not even decayed"
        for steps, _ in enumerate(loader):
            omni.backward(wrapped(x).square().mean())
            if steps == 1:
                break
        mean = omni.mean([1.0, float(omni.rank)])
        x, _ = next(iter(omni.loader(Numbered(6), train=False)))
        for batch in loader:
            omni.step(lambda batch: wrapped(batch[0]).square().mean(), batch)
        return losses[-1], optimizer.param_groups[0]["lr"], mean.tolist(), snapshot(wrapped), len(x)


def test_what_scripts_do(gang: Gang) -> None:
    results = gang.run(2, by_hand)
    for loss, rate, mean, state, _ in results:
        assert loss > 0
        assert rate == 0.25
        assert mean == [1.0, 0.5]
        assert torch.isfinite(state[0]).all()


def evaluated(rank_breaks: int) -> Any:
    with OmniLearn(24, mode="async", policy="uniform") as omni:
        model = norm_net()
        model, optimizer = omni.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        loader, tests = omni.loader(blobs(97), shuffle=True), omni.loader(Numbered(31), train=False, batch_size=4)
        steps = [0]

        def count() -> bool:
            steps[0] += 1
            return steps[0] == 3 and omni.rank <= rank_breaks

        run_epochs(omni, model, optimizer, loader, after=count)
        seen = [int(i) for _, numbers in tests for i in numbers]
        share = omni.mean(1.0, weight=len(seen))
        run_epochs(omni, model, optimizer, loader)
        return seen, share, snapshot(model), model.module[1].num_batches_tracked.item()


@pytest.mark.parametrize("rank_breaks", [-1, 0, 1])
def test_evaluation_buffers_and_breaks(gang: Gang, rank_breaks: int) -> None:
    """Nobody breaks out of the first loop, one does, or both."""
    results = gang.run(2, evaluated, rank_breaks)
    assert sorted(results[0][0] + results[1][0]) == list(range(31))
    assert all(result[1] == 1.0 for result in results)
    assert equal(results[0][2], results[1][2]), "parameters and running statistics"
    assert results[0][3] > 0


# Checkpoints


def first_half(folder: str, mode: str, inside: bool) -> Any:
    omni, model, optimizer, loader = counting(120, mode=mode, lr_scaling="none")
    with omni:
        if not inside:
            count_epochs(model, optimizer, omni, loader, 1)
            omni.save(folder, note=torch.arange(3), name="half")
            return None
        for step, x in enumerate(loader):
            omni.backward(model(x) if mode == "async" else model(x) * omni.world_size)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                omni.save(folder, note=torch.arange(3), name="half")
                break
        return None


def second_half(folder: str, mode: str) -> Any:
    omni, model, optimizer, loader = counting(120, mode=mode, lr_scaling="none")
    with omni:
        extra = omni.load(folder)
        before, first = uses(model), omni.epoch
        if mode == "sync":
            return before, [], extra["name"], first
        count_epochs(model, optimizer, omni, loader, 2 - first)
        return before, uses(model), extra["name"], first


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_exactly_once(gang: Gang, tmp_path: Path) -> None:
    gang.run(2, first_half, str(tmp_path), "async", True)
    for before, after, name, first in gang.run(3, second_half, str(tmp_path), "async"):
        assert 0 < sum(before) < 120, "some are used, none twice"
        assert set(before) <= {0.0, 1.0}
        assert after == [2.0] * 120
        assert (name, first) == ("half", 0)


def test_a_synchronous_run_continues_an_asynchronous_one(gang: Gang, tmp_path: Path) -> None:
    gang.run(2, first_half, str(tmp_path), "async", False)
    for before, _, name, first in gang.run(2, second_half, str(tmp_path), "sync"):
        assert before == [1.0] * 120
        assert (name, first) == ("half", 1)


def test_an_asynchronous_run_continues_a_synchronous_one(gang: Gang, tmp_path: Path) -> None:
    gang.run(2, first_half, str(tmp_path), "sync", True)
    for before, after, _, first in gang.run(2, second_half, str(tmp_path), "async"):
        used = sum(value > 0 for value in before)
        assert used == 48, "two steps of 24"
        assert all((b > 0) + (a - b) == pytest.approx(2.0) for b, a in zip(before, after, strict=True))
        assert first == 0


def broken_saves(folder: str) -> str:
    omni, model, optimizer, loader = counting(24)
    with omni:
        count_epochs(model, optimizer, omni, loader, 1)
        with pytest.raises(OmniLearnError, match="must be made of"):
            omni.save(folder, bad=object())
        with pytest.raises(OmniLearnError, match="cannot write a checkpoint") as raised:
            omni.save("/proc/nowhere")
        return str(raised.value)


def test_what_cannot_be_saved_is_said_to_all(gang: Gang, tmp_path: Path) -> None:
    assert all("/proc/nowhere" in text for text in gang.run(2, broken_saves, str(tmp_path)))


# Bad use


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(3))


def bad_use() -> None:
    with pytest.raises(OmniLearnError, match="mode 'later' is unknown"):
        OmniLearn(4, mode="later")
    with pytest.raises(OmniLearnError, match="belong to mode='async'"):
        OmniLearn(4, staleness="discard")
    with pytest.raises(OmniLearnError, match="join belongs to mode='async'"):
        OmniLearn(4, join="127.0.0.1:1")
    with pytest.raises(OmniLearnError, match="unknown staleness rule 'never'"):
        OmniLearn(4, mode="async", staleness="never")
    with pytest.raises(OmniLearnError, match="unknown lr_scaling"):
        OmniLearn(4, mode="async", lr_scaling="cubic")
    with pytest.raises(OmniLearnError, match="lease_timeout must be positive"):
        OmniLearn(4, mode="async", lease_timeout=0)
    with OmniLearn(4, mode="async") as omni:
        with pytest.raises(OmniLearnError, match="needs a prepared model"):
            _ = omni.plan
        model = nn.Embedding(8, 2, sparse=True)
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(OmniLearnError, match="no length"):
            omni.loader(Stream())
        with pytest.raises(OmniLearnError, match="belongs inside the loop"):
            optimizer.step()
        loader = omni.loader(TensorDataset(torch.arange(8)))
        for (x,) in loader:
            with pytest.raises(OmniLearnError, match=r"before omni\.backward"):
                optimizer.step()
            omni.backward(model(x).sum())
            with pytest.raises(OmniLearnError, match="sparse"):
                optimizer.step()
            break
        with pytest.raises(OmniLearnError, match="there is no checkpoint"):
            raise_late(omni)


def raise_late(omni: Any) -> None:
    with OmniLearn(4, mode="async") as fresh:
        model = mlp()
        fresh.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fresh.load("/nowhere")


def test_bad_use_is_explained(gang: Gang) -> None:
    gang.run(1, bad_use)


def different(what: str) -> None:
    import os

    rank = int(os.environ["RANK"])
    batch, size = 12 + (rank if what == "options" else 0), 48 + (rank if what == "data" else 0)
    with OmniLearn(batch, mode="async") as omni:
        model = mlp()
        model, optimizer = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run_epochs(omni, model, optimizer, omni.loader(blobs(size)))


@pytest.mark.parametrize(
    ("what", "told"), [("options", "global_batch is 12 at the server and 13"), ("data", "use the same everywhere")]
)
def test_a_worker_that_differs_is_told(gang: Gang, what: str, told: str) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, different, what)
    assert any(told in text for _, text in raised.value.errors.values()), raised.value
