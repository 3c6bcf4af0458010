"""The check for gradients that are not finite: what it sees at once, what it sees a step later, what it looks at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from omnilearn.pytorch.finite import ALL_EVERY, FEW, Finite


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.Tanh())], nn.Linear(8, 3))


def backward(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 0])) * factor
    loss.backward()
    return loss.detach()


def test_a_loss_that_is_not_finite_is_seen_in_its_step() -> None:
    for every_time in (False, True):
        model = network()
        check = Finite(model, every_time)
        for step in range(3):
            assert check.check(step, backward(model)) is None
        loss = backward(model, float("nan"))
        assert check.check(3, loss) == (3, loss)


def test_one_weight_that_overflows_is_seen_a_step_later_at_the_latest() -> None:
    model = network()
    check, optimizer = Finite(model, every_time=False), torch.optim.SGD(model.parameters(), lr=0.1)
    check.check(0, backward(model))
    loss = backward(model)
    model[18].weight.grad[0, 0] = float("inf")
    seen = check.check(1, loss)
    optimizer.step()
    assert seen or check.check(2, backward(model))
    assert Finite(model, every_time=True).check(2, backward(model))


def test_few_small_tensors_are_looked_at_and_all_of_them_now_and_then() -> None:
    model = network()
    check = Finite(model, every_time=False)
    backward(model)
    counts = [len(check._looked_at()) for _ in range(ALL_EVERY + 1)]
    assert counts[0] == counts[ALL_EVERY] == len(list(model.parameters()))
    assert set(counts[1:ALL_EVERY]) == {FEW}
    assert check._few[0] is model[-1].bias


def test_large_values_are_no_fault() -> None:
    model = network()
    loss = backward(model)
    for p in model.parameters():
        p.grad.fill_(1e30)  # its square is infinite
    assert Finite(model, every_time=True).check(0, loss) is None


def test_a_model_of_one_tensor() -> None:
    model = nn.Linear(2, 1, bias=False)
    check = Finite(model, every_time=False)
    model(torch.ones(1, 2)).sum().backward()
    assert check.check(0, torch.tensor(0.0)) is None
    model.weight.grad.fill_(float("nan"))
    assert check.check(1, torch.tensor(0.0)) is not None
