"""What people write in their loops: all of it works, and means what it means on one machine or with raw DDP."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from omnilearn import OmniLearn
from tests.gang import Gang, WorkerError
from tests.integration.common import Numbered, Script, blobs, equal, mlp, norm_net, run_epochs, snapshot

CHANGING = [[6, 6], [2, 10], [9, 3], [5, 7], [3, 9]]


# Equal machines: raw DDP


def parity(kind: str, momentum: float) -> Any:
    model = {"plain": mlp, "norm": norm_net}[kind]()
    raw = copy.deepcopy(model)
    with OmniLearn(32, policy="uniform") as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
        seen = []
        for _ in range(4):
            for x, y in omni.loader(blobs(128), shuffle=True):
                seen.append((x, y))
                omni.backward(F.cross_entropy(model(x), y))
                opt.step()
                opt.zero_grad()
        assert list(model.state_dict()) == list(raw.state_dict()), "no prefixes"
        wrapped = DistributedDataParallel(raw)
        opt = torch.optim.SGD(raw.parameters(), lr=0.1, momentum=momentum)
        for x, y in seen:
            F.cross_entropy(wrapped(x), y).backward()
            opt.step()
            opt.zero_grad()
        ours, theirs = [list(m.parameters()) for m in (model.module, raw)]
        return [(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True)], snapshot(model)


@pytest.mark.parametrize(("size", "kind"), [(2, "plain"), (4, "norm")])
def test_equal_machines_give_raw_ddps_weights(gang: Gang, size: int, kind: str) -> None:
    results = gang.run(size, parity, kind, 0.9)
    for ours, theirs in results[0][0]:
        if size == 2:
            assert torch.equal(ours, theirs)
        else:  # more than two are added up in an order that depends on DDP's buckets
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(equal(results[0][1], state) for _, state in results), "all ranks alike, buffers too"


# Schedulers, scalers, parameters


def scheduled(plans: list[list[int]], micro: int | None) -> Any:
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 7], gamma=0.5)
    with OmniLearn(12, policy=Script(plans), micro_batch=micro) as omni:
        model, optimizer, scheduler = omni.prepare(model, optimizer, scheduler)
        rates = []
        for x, y in omni.loader(blobs()):
            omni.backward(F.cross_entropy(model(x), y))
            omni.clip_grad_norm_(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append([group["lr"] for group in optimizer.param_groups])
        return rates[-1], scheduler.last_epoch, snapshot(model, optimizer)


@pytest.mark.parametrize("micro", [None, 2])
def test_scheduler_steps_once_per_global_step(gang: Gang, micro: int | None) -> None:
    (reference,) = gang.run(1, scheduled, [[12]], None)
    results = gang.run(2, scheduled, CHANGING, micro)
    assert reference[:2] == ([0.1 / 8, 0.01 / 8], 8)
    for rates, steps, state in results:
        assert (rates, steps) == reference[:2]
        for ours, theirs in zip(state, reference[2], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def scaled(plans: list[list[int]], micro: int | None, amp: bool, first_scale: float, fused: bool = False) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=first_scale, growth_interval=3)
    with OmniLearn(12, policy=Script(plans), micro_batch=micro) as omni:
        model, optimizer, scaler = omni.prepare(model, optimizer, scaler)
        done = 0
        for _ in range(2):
            for x, y in omni.loader(blobs()):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                    loss = F.cross_entropy(model(x), y)
                omni.backward(scaler.scale(loss))
                scaler.unscale_(optimizer)
                omni.clip_grad_norm_(1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                done += not omni.accumulating
        return scaler.get_scale(), snapshot(model), done


PARKING = [[6, 6], [12, 0], [12, 0], [12, 0], [12, 0], [5, 7], [0, 12], [4, 8]]


@pytest.mark.parametrize(("plans", "micro"), [(CHANGING, None), (CHANGING, 2), (PARKING, None)])
def test_grad_scaler(gang: Gang, plans: list[list[int]], micro: int | None) -> None:
    (reference,) = gang.run(1, scaled, [[12]], None, False, 2.0**10)
    for scale, state, _ in gang.run(2, scaled, plans, micro, False, 2.0**10):
        assert scale == reference[0] > 2.0**10, "it grew, also on a worker that was parked meanwhile"
        for ours, theirs in zip(state, reference[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_may_skip_steps_by_itself(gang: Gang, fused: bool) -> None:
    """A scale that overflows is the scaler's business, no reason to raise; fused optimizers would skip inside."""
    results = gang.run(2, scaled, CHANGING, None, False, 3.3e38, fused)
    assert results[0][0] == results[1][0] < 3.3e38
    assert equal(results[0][1], results[1][1])
    assert all(torch.isfinite(t).all() for t in results[0][1])


def test_autocast(gang: Gang) -> None:
    results = gang.run(2, scaled, CHANGING, None, True, 2.0**10)
    assert equal(results[0][1], results[1][1])


class Partly(nn.Module):
    """``spare`` is used by nobody, ``sometimes`` only where the first sample is even; ``frozen`` is frozen."""

    def __init__(self, which: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.which = which
        self.first, self.spare, self.sometimes, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        out = self.frozen(self.first(x)).sum(dim=1)
        return out + self.sometimes(x).sum(dim=1) if use else out


def partly(which: str) -> Any:
    with OmniLearn(8, policy=Script([[5, 3], [2, 6], [4, 4]])) as omni:
        model = Partly(which)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        before = snapshot(model)
        model, optimizer = omni.prepare(model, optimizer)
        for x, _ in omni.loader(Numbered(40)):
            use = which == "all" or (which == "one rank" and omni.rank == 1)
            omni.backward(model(x, use).mean())
            optimizer.step()
            optimizer.zero_grad()
        names = sorted(model.state_dict())
        return {n: torch.equal(a, b) for n, a, b in zip(names, before, snapshot(model), strict=True)}, snapshot(model)


@pytest.mark.parametrize("which", ["nobody", "one rank", "all"])
def test_frozen_and_unused_parameters(gang: Gang, which: str) -> None:
    (same, one), (_, other) = gang.run(2, partly, which)
    assert equal(one, other)
    assert same["frozen.weight"]
    assert same["spare.weight"]
    assert not same["first.weight"]
    assert same["sometimes.weight"] == (which == "nobody")


# Batches of any shape


class Pair(NamedTuple):
    x: torch.Tensor
    rest: dict[str, Any]


class Nested(Numbered):
    def __getitem__(self, i: int) -> Any:
        x, i = super().__getitem__(i)
        return Pair(x, {"i": i, "more": [x, (x, f"sample {i}")]})


def odd_collate(samples: list[Any]) -> Any:
    return {"x": torch.stack([x for x, _ in samples]), "ids": [i for _, i in samples]}


def nested() -> Any:
    with OmniLearn(8, policy=Script([[5, 3], [2, 6]])) as omni:
        model = nn.Linear(4, 1)
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ids: list[list[int]] = [[], []]
        for batch in omni.loader(Nested(20), num_workers=1):
            assert type(batch) is Pair
            assert list(batch.rest["more"][1][1]) == [f"sample {int(i)}" for i in batch.rest["i"]]
            omni.step(lambda b: model(b.rest["more"][0]).mean(), batch)
            ids[0] += batch.rest["i"].tolist()
        for batch in omni.loader(Numbered(20), collate_fn=odd_collate):
            omni.step(lambda b: model(b["x"]).mean(), batch)
            ids[1] += batch["ids"]
        return ids


def test_nested_batches_and_collate(gang: Gang) -> None:
    one, other = gang.run(2, nested)
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(mine + theirs) == list(range(20))


# Streams


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        data = Numbered(self.size)
        return (data[i] for i in range(self.size))


def stream(size: int, workers: int, plans: list[list[int]]) -> Any:
    with OmniLearn(8, policy=Script(plans), min_batch=2) as omni:
        model = nn.Linear(4, 1)
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        seen, sizes = [], []
        loader = omni.loader(Stream(size), num_workers=workers)
        for epoch in range(3):
            assert omni.epoch == epoch
            for x, i in loader:
                omni.step(lambda x: model(x).mean(), x)
                seen += i.tolist()[: omni.samples]
                sizes.append(omni.samples)
        return seen, sizes, snapshot(model)


@pytest.mark.parametrize(("size", "workers"), [(34, 0), (30, 1)])
def test_stream_is_read_exactly_once(gang: Gang, size: int, workers: int) -> None:
    results = gang.run(2, stream, size, workers, [[5, 3], [2, 6], [8, 0], [3, 5]])
    assert sorted(i for seen, _, _ in results for i in seen) == sorted([*range(size)] * 3)
    assert min(n for _, sizes, _ in results for n in sizes if n) >= 2, "also at the end of the stream"
    assert equal(results[0][2], results[1][2])


def test_stream_with_several_workers_is_refused(gang: Gang) -> None:
    with pytest.raises(WorkerError, match="num_workers=2 cannot be read exactly once") as raised:
        gang.run(2, stream, 16, 2, [[4, 4]])
    assert set(raised.value.errors) == {0, 1}


# Existing DataLoaders


def taken_over(shuffle: bool, sampler: bool) -> Any:
    data = Numbered(24)
    kind = {"sampler": WeightedRandomSampler([1.0] * 24, 24)} if sampler else {"shuffle": shuffle}
    existing = DataLoader(data, batch_size=4, collate_fn=odd_collate, num_workers=1, persistent_workers=True, **kind)
    with OmniLearn(8, policy=Script([[5, 3]]), seed=4) as omni:
        model = nn.Linear(4, 1)
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = omni.loader(existing)
        assert loader.dataloader.num_workers == 1
        assert loader.dataloader.persistent_workers
        epochs = []
        for _ in range(2):
            ids = []
            for batch in loader:
                omni.step(lambda b: model(b["x"]).mean(), batch)
                ids.append(batch["ids"])
            epochs.append(ids)
        return epochs


def test_an_existing_dataloader_is_taken_over(gang: Gang) -> None:
    (first, second), _ = gang.run(2, taken_over, False, False)
    assert first == second == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12], [16, 17, 18, 19, 20]]
    one, other = gang.run(2, taken_over, True, False)
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(i for batch in mine + theirs for i in batch) == list(range(24))
    assert one[0] != one[1], "shuffled anew"


def test_a_custom_sampler_is_refused(gang: Gang) -> None:
    with pytest.raises(WorkerError, match="WeightedRandomSampler cannot be kept") as raised:
        gang.run(2, taken_over, False, True)
    assert set(raised.value.errors) == {0, 1}


# Prefetching: nothing fetched twice, nothing thrown away


class Counting(Numbered):
    """Writes down which process fetched which sample."""

    def __init__(self, size: int, path: str) -> None:
        super().__init__(size)
        self.path = path

    def __getitem__(self, i: int) -> Any:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()} {i}\n")
        return super().__getitem__(i)


def prefetching(folder: str, workers: int) -> Any:
    path = f"{folder}/{os.environ['RANK']}"
    plans = [[6, 2], [2, 6], [5, 3], [8, 0], [1, 7], [4, 4], [0, 8], [3, 5], [7, 1]]
    with OmniLearn(8, policy=Script(plans)) as omni:
        model = nn.Linear(4, 1)
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        keep = {"persistent_workers": True} if workers else {}
        loader = omni.loader(Counting(61, path), shuffle=True, num_workers=workers, check_data=False, **keep)
        inner, used, followed = loader.dataloader, [], set()
        for _ in range(3):
            for x, i in loader:
                omni.step(lambda x: model(x).mean(), x)
                used += i.tolist()
                followed.add(len(i))
        assert loader.dataloader is inner
    fetched = [line.split() for line in Path(path).read_text().splitlines()]
    return used, [int(i) for _, i in fetched], {int(pid) for pid, _ in fetched}, followed, os.getpid()


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
def test_plans_change_without_waste(gang: Gang, tmp_path: Any, workers: int) -> None:
    results = gang.run(2, prefetching, str(tmp_path), workers)
    assert sorted(i for used, *_ in results for i in used) == sorted([*range(61)] * 3), "used once per epoch"
    for used, fetched, pids, followed, me in results:
        assert sorted(fetched) == sorted(used), "what was fetched was used"
        assert len(followed) >= 4, "the plans really changed"
        assert len(pids) <= workers if workers else pids == {me}, "no worker was started anew"


# torch.compile


def compiled(order: str) -> Any:
    import torch._dynamo

    torch._dynamo.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    plans = [[12, 12], *[[b, 24 - b] for b in (3, 7, 17, 5, 20, 9, 15, 4, 11, 6, 13, 8)]]
    with OmniLearn(24, policy=Script(plans)) as omni:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if order == "before":
            model = torch.compile(model, backend=backend)
        model, optimizer = omni.prepare(model, optimizer)
        used = torch.compile(model, backend=backend) if order == "after" else model
        sizes = set()
        counts = []
        for _ in range(2):
            for x, y in omni.loader(blobs(240)):
                omni.backward(F.cross_entropy(used(x), y))
                optimizer.step()
                optimizer.zero_grad()
                sizes.add(len(x))
            counts.append(len(graphs))
        return counts, len(sizes), snapshot(model)


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_models_are_not_compiled_for_every_batch_size(gang: Gang, order: str) -> None:
    results = gang.run(2, compiled, order)
    for counts, sizes, _ in results:
        assert sizes >= 10
        assert 1 <= counts[1] <= 6, f"{counts} graphs for {sizes} batch sizes"
    assert equal(results[0][2], results[1][2])


# Deciding


def thinking() -> Any:
    with OmniLearn(8, park=False) as omni:
        model, optimizer = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        assert omni._engine is not None
        planner, read = omni._engine.planner, []
        for x, y in omni.loader(blobs(96), shuffle=True):
            before = planner._exchange
            time.sleep(0.05)  # the others' timings are there
            omni.backward(F.cross_entropy(model(x), y))
            if before is not None:
                read.append(before.answer is not None)
            optimizer.step()
            optimizer.zero_grad()
        return planner.thinker(()), read, planner.state.state_dict()


def test_batches_are_decided_on_by_one_while_it_waits_for_gradients(gang: Gang) -> None:
    results = gang.run(2, thinking)
    for rank, (thinker, read, known) in enumerate(results):
        assert any(read) == (rank == thinker == 0)
        assert known == results[0][2], "what it knows, all know: a checkpoint may be written by any"


def side_by_side() -> Any:
    """Two models trained in turn, each with its own plan: when a loop ends, an exchange is often under way."""
    plans = [[3, 3, 2], [2, 3, 3]], [[4, 4, 4], [6, 2, 4]]
    with OmniLearn(8, policy=Script(plans[0], 2)) as first, OmniLearn(12, policy=Script(plans[1], 3)) as second:
        pairs = []
        for omni, seed in ((first, 0), (second, 1)):
            torch.manual_seed(seed)
            model, optimizer = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
            pairs.append((omni, model, optimizer, omni.loader(blobs(36), shuffle=True)))
        under_way = 0
        for _ in range(6):
            for omni, model, optimizer, loader in pairs:
                for x, y in loader:
                    omni.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                under_way += omni._engine.planner._exchange is not None
        states = [tensor for _, model, *_ in pairs for tensor in snapshot(model)]
        return under_way, states, [omni.plan.batches for omni, *_ in pairs]


def test_two_of_them_side_by_side(gang: Gang) -> None:
    results = gang.run(3, side_by_side)
    for under_way, states, plans in results:
        assert under_way > 1, "messages of both were on their way at the same time"
        assert equal(states, results[0][1])
        assert plans == results[0][2]
        assert [sum(plan) for plan in plans] == [8, 12]


# BatchNorm


def normed() -> Any:
    with OmniLearn(8, park=False) as omni:
        model, _ = omni.prepare(model := norm_net(), torch.optim.SGD(model.parameters(), lr=0.1))
        assert omni._engine is not None
        assert omni._engine.planner.problem.minimum.tolist() == [2, 2, 2]
        sizes: list[int] = []
        loader = omni.loader(blobs(50), shuffle=True)  # 50 = 6·8 + 2: two samples for three workers in the end
        for _ in range(4):
            for x, y in loader:
                omni.step(lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y))
                sizes.append((len(x), omni.samples))
        return sizes, snapshot(model)


def test_batchnorm_never_gets_a_single_sample(gang: Gang) -> None:
    results = gang.run(3, normed)
    sizes = [size for seen, _ in results for size in seen]
    assert min(computed for computed, _ in sizes) >= 2
    assert sum(counted for _, counted in sizes) == 4 * 50
    assert any(counted == 0 for _, counted in sizes), "in the last step of an epoch there is not enough for all"
    assert all(equal(results[0][1], state) for _, state in results), "running statistics too"


# The same script without a launcher


def test_alone_without_a_launcher() -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    assert not any(name in os.environ for name in names)
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in DataLoader(blobs(), batch_size=16):
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    omni = OmniLearn(16)
    model, optimizer = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    run_epochs(omni, model, optimizer, omni.loader(blobs()))
    assert equal(snapshot(reference), snapshot(model))
    assert (omni.rank, omni.world_size, omni.is_main, omni.batch) == (0, 1, True, 16)
    assert omni.plan.batches == (16,)
    assert not dist.is_initialized()
    omni.close()


def test_same_seed_and_plans_give_the_same_bits(gang: Gang) -> None:
    first, second = ([run[0] for run in gang.run(3, once)] for _ in range(2))
    assert all(equal(a, b) for a, b in zip(first, second, strict=True))
    assert equal(first[0], first[1])


def once() -> Any:
    with OmniLearn(24, policy=Script([[8, 8, 8], [4, 15, 5], [12, 0, 12], [2, 11, 11]]), seed=3) as omni:
        model, opt = omni.prepare(model := mlp(dropout=0.2), torch.optim.Adam(model.parameters(), lr=0.01))
        torch.manual_seed(100 + omni.rank)
        run_epochs(omni, model, opt, omni.loader(blobs(), shuffle=True, num_workers=1), 3)
        return [snapshot(model, opt)]
