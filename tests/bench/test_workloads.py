"""Workloads train, are the same everywhere, and say which there are when asked for another."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from omnilearn.bench import workloads
from omnilearn.bench.models import parameters
from omnilearn.bench.names import Size
from omnilearn.bench.workloads import NAMES, Pool, Workload, digits, expressions, images, text, workload
from omnilearn.errors import InfeasibleError


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    torch.set_num_threads(threads)


def losses(work: Workload, samples: int, batch: int, steps: int) -> list[float]:
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    loader = DataLoader(work.dataset(samples), batch_size=batch, shuffle=True)
    seen: list[float] = []
    while len(seen) < steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss = work.loss(model, x, y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return seen[:steps]


def test_names() -> None:
    assert NAMES == ("heavy", "even", "chatty", "digits", "resnet18", "resnet50", "vgg11", "alexnet", "gpt2", "trees")


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name: str) -> None:
    work = workload(name)
    assert work.name == name
    assert f"B = {work.global_batch}" in work.describe
    model = work.model()
    x, y = next(iter(DataLoader(work.dataset(4), batch_size=4)))
    loss = work.loss(model, x, y)
    assert loss.shape == ()
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", ["heavy", "even", "chatty", "digits", "gpt2", "trees"])
def test_the_loss_is_a_mean_over_samples(name: str) -> None:
    """What weighting relies on: the loss of a batch is the weighted mean of its parts' losses."""
    work = workload(name)
    model = work.model().eval()
    x, y = next(iter(DataLoader(work.dataset(6), batch_size=6)))
    with torch.no_grad():
        whole, few, rest = (work.loss(model, x[s], y[s]) for s in (slice(6), slice(2), slice(2, 6)))
    torch.testing.assert_close(whole, (2 * few + 4 * rest) / 6)


@pytest.mark.parametrize("name", NAMES)
def test_full_size(name: str) -> None:
    """Full models are larger, and take the full data's shape; counted without memory."""
    small, full = workload(name), workload(name, "full")
    x, y = full.dataset(2)[1]
    with torch.device("meta"):
        model = full.model()
        assert parameters(model) > parameters(small.model())
        # A tree has to be read; the others take any numbers.
        out = model(x.expand(2, -1) if name == "trees" else torch.empty(2, *x.shape, dtype=x.dtype))
    assert int(y.max()) < out.shape[-1]
    assert out.shape == ((2, out.shape[-1]) if y.dim() == 0 else (2, *y.shape, out.shape[-1]))


def test_sizes_that_make_the_three_regimes() -> None:
    assert parameters(workload("heavy").model()) < 100_000
    assert 128 <= workload("heavy").global_batch <= 256
    assert parameters(workload("even").model()) < 25_000
    assert round(parameters(workload("chatty").model()) / 1e6, 1) == 4.2
    assert workload("even").global_batch == workload("chatty").global_batch == 64
    assert workload("digits").global_batch == 128


@pytest.mark.parametrize(
    ("name", "batch", "steps", "factor"),
    [
        ("heavy", 32, 25, 0.85),
        ("even", 32, 30, 0.8),
        ("chatty", 32, 20, 0.8),
        ("resnet18", 16, 20, 0.8),
        ("gpt2", 8, 30, 0.85),
        ("trees", 16, 60, 0.97),
    ],
)
def test_the_loss_falls(name: str, batch: int, steps: int, factor: float) -> None:
    seen = losses(workload(name), 512, batch, steps)
    assert sum(seen[-5:]) < factor * sum(seen[:5]), seen


def test_digits_are_learned() -> None:
    """The demo's model on the demo's data, with the workload's own settings."""
    work, train, test = workload("digits"), digits(train=True), digits(train=False)
    model = work.model()
    optimizer = work.optimizer(model.parameters())
    for _ in range(10):
        for x, y in DataLoader(train, batch_size=work.global_batch, shuffle=True):
            optimizer.zero_grad()
            work.loss(model, x, y).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(test.x).argmax(1) == test.y).float().mean().item()
    assert accuracy >= 0.97


@pytest.mark.parametrize(("size", "shape"), [("small", (1, 8, 8)), ("full", (3, 32, 32))])
def test_digits_are_tested_with_others_than_they_are_trained_on(size: str, shape: tuple[int, ...]) -> None:
    work = workload("digits", size)
    assert work.test is not None
    train, test = work.dataset(5000), work.test()
    assert isinstance(train, Pool)
    assert (len(train.x), len(test), tuple(test.x.shape[1:])) == (1437, 360, shape)
    assert work.model()(test.x[:2]).shape == (2, 10)
    assert not (test.x[:1] == train.x).flatten(1).all(1).any()


def test_digits_split() -> None:
    train, test = digits(train=True), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    assert train[0][0].shape == (1, 8, 8)
    assert 0 <= float(train.x.min()) < float(train.x.max()) <= 1
    seen = {x.numpy().tobytes() for x in train.x}
    assert not any(x.numpy().tobytes() in seen for x in test.x)


@pytest.mark.parametrize("name", NAMES)
def test_data_are_the_same_every_time(name: str) -> None:
    before = torch.get_rng_state()
    first, second = workload(name).dataset(70), workload(name).dataset(70)
    assert len(first) == 70
    for i in (0, 1, 69):
        for one, other in zip(first[i], second[i], strict=True):
            assert torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state()), "making data must not move the caller's random state"


def test_patterns_do_not_depend_on_how_many_samples() -> None:
    """A longer data set is more of the same task, not another one."""
    few, many = images(400, shape=(1, 4, 4), classes=2), images(800, shape=(1, 4, 4), classes=2)
    for label in (0, 1):
        torch.testing.assert_close(few.x[few.y == label].mean(0), many.x[many.y == label].mean(0), atol=0.15, rtol=0)


def test_next_token_targets_are_the_next_tokens() -> None:
    data = text(50, context=16, vocabulary=30)
    x, y = data[3]
    assert torch.equal(x[1:], y[:-1])
    assert 0 <= int(data.x.min()) <= int(data.x.max()) < 30
    follow = (data.y == (data.x + 1) % 30).float().mean().item()
    assert 0.7 < follow < 0.85


def test_expressions_are_labelled_with_their_value() -> None:
    data = expressions(40, leaves=6)
    assert len({tuple(x.tolist()) for x, _ in data}) == 40
    for x, y in data:
        stack: list[int] = []
        for token in x.tolist():
            if token < 10:
                stack.append(token)
            else:
                right, left = stack.pop(), stack.pop()
                stack.append((left + right, left - right, left * right)[token - 10])
        assert len(stack) == 1
        assert stack[0] % 10 == int(y)


def test_shorter_sequences() -> None:
    short = workload("gpt2", Size("full", batch=12, length=256))
    assert short.dataset(2)[0][0].shape == (256,)
    assert "256 of 50257 tokens" in short.describe
    with pytest.raises(InfeasibleError, match="--length is for gpt2"):
        workload("heavy", Size(length=8))
    with pytest.raises(InfeasibleError, match="more than the model's context of 64"):
        workload("gpt2", Size(length=65))


def test_pool_by_one_and_by_many() -> None:
    pool = Pool(torch.arange(5.0), torch.arange(5), 12)
    assert len(pool) == 12
    assert [int(y) for _, y in pool] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    wanted = [11, 0, 7, -1]
    assert pool.__getitems__(wanted) == [pool[i] for i in wanted]
    assert pool.__getitems__([]) == []
    for outside in (12, -13):
        with pytest.raises(IndexError):
            pool[outside]
        with pytest.raises(IndexError):
            pool.__getitems__([0, outside])


def test_large_data_go_round_a_bounded_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "POOL_BYTES", 2**20)
    for name in ("heavy", "gpt2", "resnet50"):
        data = workload(name, "full").dataset(10_000_000)
        assert len(data) == 10_000_000
        assert data.x.untyped_storage().nbytes() <= 2**20
        assert torch.equal(data[0][0], data[len(data.x)][0])
    assert len(workload("digits").dataset(5000)) == 5000


def test_workloads_travel_to_other_processes() -> None:
    for name in NAMES:
        for size in ("small", "full"):
            assert pickle.loads(pickle.dumps(workload(name, size))).name == name


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(
        InfeasibleError, match="unknown workload 'resnet'; there are heavy, even, chatty, digits, resnet18"
    ):
        workload("resnet")
    with pytest.raises(InfeasibleError, match="unknown size 'huge' of workload heavy; there are small, full"):
        workload("heavy", "huge")
    with pytest.raises(InfeasibleError, match="n = 0"):
        workload("heavy").dataset(0)
