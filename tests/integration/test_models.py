"""Models and buffers stay the user's own, and differences between workers are named instead of being trained."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from omnilearn import OmniLearn, OmniLearnError
from tests.gang import Gang, WorkerError
from tests.integration.common import Script, blobs, equal, mlp, norm_net, run_epochs, snapshot

# Buffers


class Buffered(nn.Module):
    """Constants of all kinds beside running statistics, and one that the model keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)
        self.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("big", torch.tensor([2**60 + 1, 12345]))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)), persistent=False)
        self.register_buffer("third", torch.full((2,), 1 / 3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1.0 + float(x.shape[0])
        return self.norm(self.layer(x))


def with_buffers(plans: Any, mode: str) -> Any:
    model = Buffered()
    before = {name: b.clone() for name, b in model.named_buffers()}
    with OmniLearn(12, policy=Script(plans) if mode == "sync" else "uniform", mode=mode) as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run_epochs(omni, model, opt, omni.loader(blobs(48)), 2)
        omni.mean(1.0)
        after = dict(model.named_buffers())
        same = {name: torch.equal(before[name], after[name]) for name in before}
        return same, {name: b.clone() for name, b in after.items()}


@pytest.mark.parametrize(
    ("plans", "mode"), [([[6, 6], [3, 9]], "sync"), ([[6, 6], [12, 0], [4, 8]], "sync"), ([], "async")]
)
def test_only_running_statistics_are_averaged(gang: Gang, plans: Any, mode: str) -> None:
    results = gang.run(2, with_buffers, plans, mode)
    for same, after in results:
        assert [name for name, kept in same.items() if kept] == ["freqs_cis", "big", "mask", "third"]
        assert after["seen"].dtype == torch.bfloat16
        if mode == "sync":
            for name, buffer in after.items():
                assert torch.equal(buffer, results[0][1][name]), name


def odd_buffer() -> Any:
    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    heard: list[str] = []
    logging.getLogger("omnilearn").addHandler(handler := Heard())
    model = Buffered()
    with OmniLearn(12, policy="uniform") as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.mask.fill_(omni.rank == 1)
        run_epochs(omni, model, opt, omni.loader(blobs(24)), 2)
        logging.getLogger("omnilearn").removeHandler(handler)
        return model.mask.float().mean().item(), sum("left as they are" in line for line in heard)


def test_other_buffers_are_compared_once(gang: Gang) -> None:
    assert gang.run(2, odd_buffer) == [(0.0, 1), (1.0, 1)]


def again() -> Any:
    """Memory runs out in the first try of every step, behind the forward pass; nothing is left of it."""
    model = norm_net()
    twin = copy.deepcopy(model)
    with OmniLearn(12, policy="uniform") as omni:
        model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        failed, done = [], []
        for batch in omni.loader(blobs(48)):
            done.append(batch)

            def compute(part: Any) -> torch.Tensor:
                loss = F.cross_entropy(model(part[0]), part[1])
                if len(failed) < len(done) and len(part[0]) == 12:
                    failed.append(1)
                    raise torch.OutOfMemoryError("pretended")
                return loss

            memory = omni._engine.memory  # type: ignore[union-attr]
            memory.proven = 12
            omni.step(compute, batch)
            memory._cap, memory.proven = None, 12  # the size is not new, and is tried again
    twin.train()
    for x, _ in done:
        for part in x.split(6):
            twin(part)
    ours, theirs = dict(model.named_buffers()), dict(twin.named_buffers())
    return len(failed), {name: (ours[name], theirs[name]) for name in ours}


def test_a_pass_computed_again_counts_once_in_running_statistics() -> None:
    failed, buffers = again()
    assert failed == 4
    for name, (ours, theirs) in buffers.items():
        torch.testing.assert_close(ours, theirs, msg=name)


# Memory formats


def in_formats(odd: bool) -> Any:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    with OmniLearn(8, policy="uniform") as omni:
        if odd == (omni.rank == 0) or not odd:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        before = model[0].weight.detach().clone()
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert torch.equal(before, model[0].weight)
        x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 3
        run_epochs(omni, model, opt, omni.loader(TensorDataset(x, y), check_data=False))
        return snapshot(model)


def test_memory_formats_that_differ_are_named(gang: Gang) -> None:
    with pytest.raises(
        WorkerError, match=r"models differ between ranks: 0.weight .*dimensions \[0, 2, 3, 1\].* on rank 0"
    ):
        gang.run(2, in_formats, True)
    one, other = gang.run(2, in_formats, False)
    assert equal(one, other)


# requires_grad


def unfreezing(plans: Any, inside: bool, only: int | None) -> Any:
    model = mlp().double()
    for p in model[0].parameters():
        p.requires_grad_(False)
    with OmniLearn(12, policy=Script(plans)) as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        loader = omni.loader(blobs(96))
        for epoch in range(2):
            if epoch == 1 and not inside:
                model[0].requires_grad_(True)
            for x, y in loader:
                if inside and omni.global_step == 4 and only in (None, omni.rank):
                    model[0].requires_grad_(True)
                omni.backward(F.cross_entropy(model(x.double()), y))
                opt.step()
                opt.zero_grad()
        return snapshot(model)


@pytest.mark.parametrize("inside", [False, True])
def test_parameters_may_be_unfrozen(gang: Gang, inside: bool) -> None:
    """By all workers that take part, also while one is parked."""
    (expected,) = gang.run(1, unfreezing, [[12]], inside, None)
    for plans in ([[6, 6], [2, 10]], [[6, 6], [12, 0], [12, 0], [12, 0], [5, 7]]):
        for state in gang.run(2, unfreezing, plans, inside, None):
            for ours, theirs in zip(state, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def unfreezing_alone() -> Any:
    from omnilearn.pytorch import watch

    watch.TICK, watch.COMPARE_AFTER = 0.1, 0.5
    return unfreezing([[6, 6]], True, 1)


def test_one_worker_that_unfreezes_alone_is_named(gang: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, unfreezing_alone)
    for kind, text in raised.value.errors.values():
        assert kind == "OutOfStepError" or "OutOfStepError" in text, text
        assert "parameters train" in text
    gang.close()  # the short times of the watch end with these processes


def test_asynchronously_it_is_an_error() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    with OmniLearn(12, policy="uniform", mode="async") as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model[0].requires_grad_(True)
        with pytest.raises(OmniLearnError, match="requires_grad of a parameter has changed"):
            run_epochs(omni, model, opt, omni.loader(blobs(24)))


# The prepared model


class Named(nn.Sequential):
    extra = 3

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(x), y)


def own_model(ddp: bool) -> Any:
    torch.manual_seed(3)
    model = Named(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    if ddp:
        dist.init_process_group("gloo")
    given = DistributedDataParallel(model) if ddp else model
    with OmniLearn(12, policy=Script([[6, 6], [3, 9]])) as omni:
        prepared, opt = omni.prepare(given, torch.optim.SGD(model.parameters(), lr=0.1))
        assert prepared is model
        assert prepared.module is model
        assert isinstance(prepared, Named)
        assert (len(prepared), prepared[0].in_features, prepared.extra) == (3, 8, 3)
        prepared.scale = 100
        assert model.scale == 100
        assert [name for name, _ in prepared.named_modules()] == ["", "0", "1", "2"]
        average = AveragedModel(prepared)
        for x, y in omni.loader(blobs(48)):
            omni.backward(prepared.loss(x, y))  # a method of its own counts as a call
            opt.step()
            opt.zero_grad()
            average.update_parameters(prepared)
        twin = copy.deepcopy(prepared)
        assert type(twin) is Named
        assert equal(snapshot(twin), snapshot(prepared))
        buffer = io.BytesIO()
        torch.save(prepared, buffer)
        read = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        assert equal(snapshot(read), snapshot(prepared))
        kept = copy.deepcopy(opt)
        assert type(kept) is torch.optim.SGD
        assert type(pickle.loads(pickle.dumps(opt))) is torch.optim.SGD
        state = snapshot(prepared)
    assert not hasattr(model, "module"), "as it was"
    if ddp:
        dist.destroy_process_group()
    return state


@pytest.mark.parametrize("ddp", [False, True])
def test_the_prepared_model_is_the_users_own(gang: Gang, ddp: bool) -> None:
    """Also where a DistributedDataParallel and its process group were left in the script."""
    (expected,) = gang.run(1, one_of_it)
    for state in gang.run(2, own_model, ddp):
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def one_of_it() -> Any:
    torch.manual_seed(3)
    model = Named(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = blobs(48).tensors
    for part in torch.arange(48).split(12):
        model.loss(x[part], y[part]).backward()
        opt.step()
        opt.zero_grad()
    return snapshot(model)


def test_a_wrapper_inside_a_model_is_refused() -> None:
    class Sharded(nn.Linear):
        pass

    Sharded.__name__ = "FSDPLinear"
    with OmniLearn(4) as omni:
        model = nn.Sequential(Sharded(2, 2))
        with pytest.raises(OmniLearnError, match=r"has a FSDPLinear inside \(0\)"):
            omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Layers that need care


class Words(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = kind(50, 8, sparse=True), nn.Linear(8, 3)  # type: ignore[call-arg]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table(x)
        return self.head(found.mean(1) if found.ndim == 3 else found)


def sparse(plans: Any, kind: type[nn.Module], nonfinite: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(0, 50, (64, 4), generator=generator), torch.randint(0, 3, (64,), generator=generator)
    with OmniLearn(16, policy=Script(plans), nonfinite=nonfinite) as omni:
        model, opt = omni.prepare(model := Words(kind).double(), torch.optim.SGD(model.parameters(), lr=0.1))
        assert sum(plans[0]) == 16
        for a, b in omni.loader(TensorDataset(x, y)):
            omni.backward(F.cross_entropy(model(a), b), weight=float(len(b)))
            opt.step()
            opt.zero_grad()
        return snapshot(model)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_sparse_embeddings(gang: Gang, kind: type[nn.Module], nonfinite: str) -> None:
    (expected,) = gang.run(1, sparse, [[16]], kind, nonfinite)
    for state in gang.run(2, sparse, [[8, 8], [3, 13], [12, 4]], kind, nonfinite):
        for ours, theirs in zip(state, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


class CpuSyncBatchNorm(nn.SyncBatchNorm):
    """Chooses its group as torch's does; the same statistics over it, on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized():
            group = self.process_group or dist.group.WORLD
            self.met = dist.get_world_size(group)
            if self.met > 1:
                own = torch.cat([x.mean(0), x.var(0, unbiased=False)]).detach()
                dist.all_gather([torch.empty_like(own) for _ in range(self.met)], own, group=group)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def synced() -> Any:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), CpuSyncBatchNorm(16), nn.ReLU(), nn.Linear(16, 3))
    with OmniLearn(12, policy=Script([[6, 6], [12, 0], [12, 0], [6, 6]], interval=2), timeout=20) as omni:
        model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        met = []
        for x, y in omni.loader(blobs(120)):
            omni.backward(F.cross_entropy(model(x), y))
            opt.step()
            opt.zero_grad()
            met.append(model[1].met)
        return met


def test_sync_batch_norm_alone_meets_nobody(gang: Gang) -> None:
    one, other = gang.run(2, synced)
    assert set(one) == {1, 2}, "alone for a while, and together"
    assert set(other) == {2}
    assert len(other) < len(one) == 10
