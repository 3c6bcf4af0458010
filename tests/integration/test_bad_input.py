"""What cannot work is refused: clearly, on all ranks alike, and before training where possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import omnilearn
from omnilearn import OmniLearn, control
from tests.gang import Gang, WorkerError
from tests.integration.common import Script, blobs, mlp, norm_net, run_epochs


def case(name: str) -> None:
    me = int(__import__("os").environ["RANK"])
    odd = me == 1
    version = omnilearn.__version__
    options: dict[str, Any] = {"global_batch": 12, "policy": Script([[6, 6]])}
    options |= {
        "no batch": {"global_batch": 0 if odd else 12},
        "unknown policy": {"policy": "best"},
        "unknown mode": {"mode": "magic"},
        "unknown nonfinite": {"nonfinite": "ignore"},
        "options": {"seed": me},
        "minimums": {"global_batch": 3, "policy": "uniform", "min_batch": 2},
        "norm minimums": {"global_batch": 3, "policy": "uniform"},
        "maximums": {"max_batch": 4},
        "multiple": {"multiple_of": 5},
        "device": {"device": "cuda:7" if odd else "cpu"},
        "unknown device": {"device": "gpu"},
        "no bool": {"park": "no"},
        "no seed": {"seed": "a"},
        "no timeout": {"timeout": "1h"},
        "half a sample": {"min_batch": 2.5},
    }.get(name, {})
    try:
        if name == "versions" and odd:
            omnilearn.__version__ = "0.0.1"
        omni = OmniLearn(**options)
    finally:
        omnilearn.__version__ = version
    with omni:
        model: nn.Module = norm_net() if name == "norm minimums" else mlp()
        if name == "models":
            model = mlp(classes=4 if odd else 3)
        if name == "more layers" and odd:
            model.append(nn.Linear(3, 3))
        optimizer = torch.optim.SGD((mlp() if name == "strangers" else model).parameters(), lr=0.1)
        if name == "no model":
            omni.prepare(optimizer, model)
        if name == "no scheduler":
            omni.prepare(model, optimizer, object())
        if name == "not prepared":
            omni.loader(blobs())
        model, optimizer = omni.prepare(model, optimizer)
        if name == "prepared twice":
            omni.prepare(model, optimizer)
        size = {"empty": 0, "different data": 24 + me, "one empty": 0 if odd else 24}.get(name, 24)
        keywords: Any = {"batch size": {"batch_size": 4}, "drop all": {"drop_last": True}}.get(name, {})
        loader = omni.loader(blobs(10 if name == "drop all" else size), **keywords)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            if name == "twice":
                omni.backward(loss)
            if name == "own loop":
                next(iter(loader))
            if name == "no grad":
                loss = loss.detach()
            if name == "another model":
                loss = F.cross_entropy(mlp()(x), y)
            if name == "vector":
                loss = F.cross_entropy(model(x), y, reduction="none")
            if name not in ("forgotten", "step first"):
                omni.backward(loss)
            if name != "forgotten":
                optimizer.step()
            optimizer.zero_grad()
        if name == "outside":
            omni.backward(F.cross_entropy(model(x), y))
        if name == "no weight":
            omni.mean(1.0, weight=0)


class Own:
    """A policy that a user wrote: no ``__repr__``."""

    def start(self, problem: Any) -> Any:
        return control.Uniform().start(problem)

    def update(self, problem: Any, state: Any, report: Any) -> Any:
        return state

    def restore(self, problem: Any, saved: Any) -> Any:
        return self.start(problem)


def own_policy() -> Any:
    with OmniLearn(12, policy=Own()) as omni:
        model, optimizer = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        run_epochs(omni, model, optimizer, omni.loader(blobs(24)))
        return omni.plan.batches


def test_a_policy_of_ones_own_is_the_same_on_all_ranks(gang: Gang) -> None:
    assert gang.run(2, own_policy) == [(6, 6)] * 2


CASES = {
    "no batch": "on rank 1: global_batch must be a whole number of at least 1, got 0",
    "unknown policy": "best",
    "unknown mode": "mode 'magic'",
    "unknown nonfinite": "nonfinite must be",
    "options": "OmniLearn's options differ between ranks: seed is 0 on rank 0 and 1 on rank 1",
    "versions": "package versions differ between ranks: omnilearn",
    "device": "on rank 1: device 'cuda:7' was asked for",
    "unknown device": "device 'gpu' is unknown: use 'cpu', 'cuda' or 'cuda:1'",
    "no bool": "park must be True or False, got 'no'",
    "no seed": "seed must be a whole number, got 'a'",
    "no timeout": "timeout must be a positive number of seconds, got '1h'",
    "half a sample": "min_batch must be a whole number of at least 1, got 2.5",
    "minimums": "global_batch 3 is below the sum of the workers' minimums 4",
    "norm minimums": "global_batch 3 is below the sum of the workers' minimums 4",
    "maximums": "maximums hold 8 samples",
    "multiple": "not a multiple of multiple_of 5",
    "models": "models differ between ranks: 3.weight",
    "more layers": "models differ between ranks: 4.weight is missing on rank 0",
    "strangers": "4 parameters that are not the model's",
    "no model": "prepare",
    "no scheduler": "must have state_dict",
    "not prepared": "call model, optimizer = omni.prepare",
    "prepared twice": "prepare.. was called before",
    "empty": "the dataset has 0 samples",
    "one empty": "on rank 1: the dataset has 0 samples",
    "different data": "number of samples is 24 on rank 0 and 25 on rank 1",
    "drop all": "drop_last would drop all",
    "batch size": "takes no batch_size",
    "twice": "backward.. was called twice for one batch .step 0",
    "forgotten": "was not called for the last batch .step 0",
    "step first": "optimizer.step.. before omni.backward.loss. in step 0",
    "own loop": "one training loop at a time",
    "no grad": "does not depend on any trainable parameter",
    "another model": "does not depend on any trainable parameter of the model that prepare.. got",
    "vector": "one number, got shape",
    "outside": "there is no batch under way",
    "no weight": "weights are all 0",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="one case asks for a card that is not there")
@pytest.mark.parametrize("name", CASES)
def test_refused_on_all_ranks(gang: Gang, name: str) -> None:
    with pytest.raises(WorkerError, match=CASES[name]) as raised:
        gang.run(2, case, name)
    errors = {text.strip().splitlines()[-1] for _, text in raised.value.errors.values()}
    assert len(raised.value.errors) == 2
    assert len(errors) == 1, "the same on all ranks"
    assert all(kind in ("UsageError", "InfeasibleError") for kind, _ in raised.value.errors.values())


def only_one(name: str) -> None:
    with OmniLearn(12, policy=Script([[6, 6]])) as omni:
        model, optimizer = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in omni.loader(blobs(48)):
            if not (omni.rank == 1 and name == "forgotten"):
                omni.backward(F.cross_entropy(model(x), y))
            if omni.rank == 1 and name == "twice":
                omni.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["forgotten", "twice"])
def test_a_mistake_on_one_rank_is_named_on_the_others(gang: Gang, name: str) -> None:
    with pytest.raises(WorkerError) as raised:
        gang.run(2, only_one, name)
    (kind, text), (own, _) = raised.value.errors[0], raised.value.errors[1]
    assert own == "UsageError"
    assert kind == "PeerFailure", text
    assert "rank 1 failed" in text
