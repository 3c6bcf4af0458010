"""A parked worker costs nothing, knows what is going on, comes back with the same state, and is never left hanging."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn import functional as F

from omnilearn import OmniLearn
from tests.gang import Gang, WorkerError
from tests.integration.common import Numbered, Script, blobs, equal, mlp, norm_net, run_epochs, snapshot
from tests.waiting import wait_for

# Rank 1 is out, then 0 and 1, then only 0; everybody is back at the end.
PARKING = [[6, 5, 5], [8, 0, 8], [8, 0, 8], [0, 0, 16], [0, 8, 8], [0, 8, 8], [6, 4, 6]]


def epochs_with_parking(optimizer: str, workers: int) -> Any:
    torch.manual_seed(0)
    with OmniLearn(16, policy=Script(PARKING), seed=1) as omni:
        model = norm_net()
        opt: Any = {
            "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        }[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        model, opt, scheduler = omni.prepare(model, opt, scheduler)
        loader = omni.loader(blobs(40), shuffle=True, num_workers=workers)
        states, took = [], []
        for _ in range(4):
            steps = 0
            for x, y in loader:
                omni.backward(F.cross_entropy(model(x), y))
                opt.step()
                scheduler.step()
                opt.zero_grad()
                steps += 1
            states.append(snapshot(model, opt))
            took.append(steps)
            assert len(omni.plan.batches) == 3
        return states, took, scheduler.last_epoch


@pytest.mark.parametrize(("optimizer", "workers"), [("adam", 0), ("momentum", 2)])
def test_everything_is_alike_after_every_epoch(gang: Gang, optimizer: str, workers: int) -> None:
    results = gang.run(3, epochs_with_parking, optimizer, workers)
    assert any(took != results[2][1] for _, took, _ in results), "somebody was really parked"
    for epoch in range(4):
        for states, _, _ in results[1:]:
            assert equal(results[0][0][epoch], states[epoch]), f"after epoch {epoch}"
    assert {steps for *_, steps in results} == {12}, "the scheduler of a parked worker too"


def with_a_scheduler_of_its_own() -> None:
    with OmniLearn(16, policy=Script(PARKING), seed=1) as omni:
        model = mlp()
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
        model, opt = omni.prepare(model, opt)
        run_epochs(omni, model, opt, omni.loader(blobs(400), shuffle=True), after=scheduler.step)


def test_a_scheduler_that_is_not_known_is_noticed_before_models_differ_for_long(gang: Gang) -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 0: .*learning rates differ .* rank 2: .*learning rates differ"):
        gang.run(3, with_a_scheduler_of_its_own)


def without_threads() -> Any:
    """As at the end of a script from Python 3.12 on: no thread can be started any more."""

    def start(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omnilearn.pytorch.membership._Delivery.start", start)
        return epochs_with_parking("adam", 0)


def test_the_parked_get_their_copy_without_threads_too(gang: Gang) -> None:
    results = gang.run(3, without_threads)
    assert all(equal(results[0][0][-1], states[-1]) for states, *_ in results)


def idle() -> Any:
    with OmniLearn(8, policy=Script([[4, 4], [8, 0]])) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        took = 0
        cpu, wall = sum(psutil.Process().cpu_times()[:2]), time.monotonic()
        for x, y in omni.loader(blobs(160)):
            omni.backward(F.cross_entropy(model(x), y))
            opt.step()
            opt.zero_grad()
            took += 1
            if took > 3:
                time.sleep(0.2)
        return took, sum(psutil.Process().cpu_times()[:2]) - cpu, time.monotonic() - wall, omni.plan.parked, omni.batch


def test_a_parked_worker_uses_no_cpu_to_speak_of(gang: Gang) -> None:
    _, (took, cpu, wall, parked, batch) = gang.run(2, idle)
    assert took < 5
    assert wall > 3
    assert cpu < 0.25 * wall + 0.3, f"{cpu:.2f} s of CPU in {wall:.2f} s"
    assert parked == (1,)
    assert batch == 0


def late(folder: str, brings_back: bool) -> Any:
    """Ranks 0 and 1 are parked. After the first epoch one of them takes in the others' state only when those are well
    into the next: would they wait for it, it would wait in vain."""
    plans = [[0, 0, 16]] * 60 + ([[4, 4, 8]] if brings_back else [])
    with OmniLearn(16, policy=Script(plans), seed=1) as omni:
        model, opt = omni.prepare(model := norm_net(), torch.optim.Adam(model.parameters(), lr=0.01))
        loader = omni.loader(blobs(480), shuffle=True)
        steps, further, received = [0], Path(folder) / "further", [0]
        membership = omni._engine.membership
        unpack = membership._unpack

        def unpack_late(state: Any) -> None:
            received[0] += 1
            if received[0] == 1 and omni.rank == 0:
                wait_for("steps of the next epoch", further.exists)
            unpack(state)

        def after() -> None:
            steps[0] += 1
            if steps[0] == 50:  # of 30 in an epoch
                further.touch()

        membership._unpack = unpack_late
        states = []
        for _ in range(4):
            run_epochs(omni, model, opt, loader, 1, after)
            states.append(snapshot(model, opt))
        return states, steps[0], received[0]


@pytest.mark.parametrize("brings_back", [False, True])
def test_nobody_waits_for_a_parked_worker(gang: Gang, tmp_path: Path, brings_back: bool) -> None:
    results = gang.run(3, late, str(tmp_path), brings_back)
    (_, first, received), (_, second, _), (_, third, nothing) = results
    assert third == 120
    assert nothing == 0
    assert received > 0, "it was late"
    assert (first, second) == ((0, 0), (first, first))[brings_back]
    assert bool(first) == brings_back
    for states, *_ in results[:2]:
        assert all(map(equal, states, results[2][0])), "after every epoch, however late"


def broken(plans: list[list[int]], at: int, interval: int, then: str) -> Any:
    """Break out at step ``at`` where others are parked; they must notice, wherever they wait."""
    with OmniLearn(12, policy=Script(plans, interval)) as omni:
        model, opt = omni.prepare(model := norm_net(), torch.optim.Adam(model.parameters(), lr=0.01))
        loader = omni.loader(blobs(72))
        for epoch in range(2):
            for x, y in loader:
                omni.step(lambda b: F.cross_entropy(model(b[0]), b[1]), (x, y))
                if loader.sampler.step >= at + 6 * epoch and epoch == 0:
                    break
            if then == "mean":
                assert omni.mean(float(omni.rank)) == (omni.world_size - 1) / 2
            assert omni.epoch == epoch + 1
        if then == "evaluate":
            seen = [int(i) for _, ids in omni.loader(Numbered(11), train=False) for i in ids]
        else:
            seen = []
        if then != "nothing":
            omni.mean(1.0)
        return loader.sampler.step, snapshot(model, opt), seen


@pytest.mark.parametrize("interval", [1, 3, 50])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_break_frees_the_parked(gang: Gang, at: int, interval: int) -> None:
    plans = [[4, 4, 4], [6, 0, 6], [0, 0, 12], [4, 4, 4]] if interval == 1 else [[6, 0, 6], [0, 0, 12], [6, 6, 0]]
    results = gang.run(3, broken, plans, at, interval, "evaluate")
    steps = {step for step, _, _ in results}
    assert steps == {at + 6}, "the same position on all ranks"
    assert sorted(i for *_, seen in results for i in seen) == list(range(11))
    assert all(equal(results[0][1], state) for _, state, _ in results)


def test_a_break_and_then_the_end(gang: Gang) -> None:
    gang.run(2, broken, [[0, 12]], 2, 50, "nothing")


def unhurried() -> Any:
    """The real policy, with one worker made slow: it must be parked, and come back when it is fast again."""
    slow = [True]
    with OmniLearn(16) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        plans = []
        omni.on_plan(lambda plan, step: plans.append(plan.batches))
        loader = omni.loader(blobs(960), shuffle=True)

        def wait() -> None:
            time.sleep(0.05 if omni.rank == 1 and slow[0] else 0.002)

        run_epochs(omni, model, opt, loader, 1, wait)
        return plans, snapshot(model)


def test_a_worker_that_slows_the_others_down_is_parked(gang: Gang) -> None:
    results = gang.run(2, unhurried)
    assert results[0][0] == results[1][0]
    assert any(plan[1] == 0 for plan in results[0][0]), results[0][0]
    assert equal(results[0][1], results[1][1])
