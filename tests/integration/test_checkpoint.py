"""Stop and go on: bit for bit on as many workers, exactly once on another number, and never with a broken file."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from omnilearn import OmniLearn
from omnilearn.pytorch import checkpoint
from tests.gang import Gang, WorkerError
from tests.integration.asynchronous import Counter, OneHot, uses
from tests.integration.common import Numbered, Script, blobs, equal, mlp, norm_net, snapshot


def begin(kind: str, global_batch: int = 24) -> Any:
    omni = OmniLearn(global_batch, policy="uniform", seed=2)
    torch.manual_seed(10 + omni.rank)  # dropout differs between ranks, as it should
    state = torch.get_rng_state()
    model = norm_net() if kind == "norm" else mlp(dropout=0.3)
    torch.set_rng_state(state)
    optimizer: Any = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if kind == "norm"
        else torch.optim.Adam(model.parameters(), lr=0.01)
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6], gamma=0.5)
    return omni, *omni.prepare(model, optimizer, scheduler)


def session(kind: str, folder: str, save_at: int | None, resume: bool, end: int = 11) -> Any:
    """Train up to step ``end``; save at ``save_at``; with ``resume`` continue from what was saved."""
    omni, model, optimizer, scheduler = begin(kind)
    with omni:
        step, losses = 0, []
        loader = omni.loader(blobs(), shuffle=True, num_workers=1)
        if resume:
            step = omni.load(folder)["step"]
        while step < end:
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                omni.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                losses.append(float(loss))
                if step == save_at and step % 4:  # in the middle of an epoch: it has four steps
                    omni.save(folder, step=step)
                if step == end:
                    break
            if step == save_at and step % 4 == 0:
                omni.save(folder, step=step)
        return losses, snapshot(model, optimizer), omni.epoch


@pytest.mark.parametrize(("kind", "size", "at"), [("dropout", 2, 6), ("dropout", 4, 4), ("norm", 3, 5), ("norm", 2, 8)])
def test_a_continued_run_is_the_uninterrupted_one(gang: Gang, tmp_path: Path, kind: str, size: int, at: int) -> None:
    whole = gang.run(size, session, kind, str(tmp_path), at, False)
    continued = gang.run(size, session, kind, str(tmp_path), None, True)
    for (losses, state, epoch), (rest, other, later) in zip(whole, continued, strict=True):
        assert losses[at:] == rest, "bit for bit"
        assert equal(state, other), "bit for bit"
        assert epoch == later
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["extra"] == {"step": at}


def part(folder: str, stop: int | None, batch: int) -> Any:
    with OmniLearn(batch, policy="uniform", seed=5) as omni:
        model, _ = omni.prepare(model := mlp(4), torch.optim.Adam(model.parameters()))
        loader = omni.loader(Numbered(50), shuffle=True)
        if stop is None:
            omni.load(folder)
        seen: list[int] = []
        for x, i in loader:
            omni.step(lambda x: model(x).mean(), x)
            seen += i.tolist()[: omni.samples]
            if stop is not None and loader.sampler.step == stop:
                omni.save(folder)
                break
        return seen, omni.epoch


@pytest.mark.parametrize(("before", "after", "batch"), [(2, 3, 12), (3, 1, 12), (1, 2, 8)])
def test_on_another_number_of_workers(gang: Gang, tmp_path: Path, before: int, after: int, batch: int) -> None:
    first = gang.run(before, part, str(tmp_path), 2, 12)
    second = gang.run(after, part, str(tmp_path), None, batch)
    assert sorted(i for seen, _ in first + second for i in seen) == list(range(50)), "the rest, exactly once"
    assert {epoch for _, epoch in second} == {1}


def saving_now_and_then(folder: str, plans: list[list[int]], micro: int | None) -> Any:
    """Saves every third step of the job; returns what this worker saw of them."""
    with OmniLearn(8, policy=Script(plans), micro_batch=micro, seed=5) as omni:
        model, optimizer = omni.prepare(model := mlp(4), torch.optim.Adam(model.parameters()))
        nothing, seen = omni.resume(folder), []
        for x, _ in omni.loader(Numbered(72), shuffle=True):
            omni.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            omni.save(folder, every=3, at=omni.global_step)
            seen.append(omni.global_step)
        return nothing, seen, omni.global_step, omni.resume(folder)


@pytest.mark.parametrize("micro", [None, 2])
def test_all_save_at_the_same_steps_whoever_was_parked(gang: Gang, tmp_path: Path, micro: int | None) -> None:
    results = gang.run(2, saving_now_and_then, str(tmp_path), [[4, 4], [8, 0], [8, 0], [8, 0], [4, 4]], micro)
    assert [(nothing, last, extra) for nothing, _, last, extra in results] == [(None, 9, {"at": 9})] * 2
    everything, some = (sorted(set(seen)) for _, seen, *_ in results)
    assert everything[-9:] == list(range(1, 10))
    assert set(some) < set(everything), "it was parked"


def accumulating_by_hand(folder: str, every: int, together: int, stop: int | None) -> Any:
    """Steps once for so many batches, as scripts without OmniLearn do. What was used in all, and the steps saved at."""
    size, saved = 96, []
    with OmniLearn(8, policy="uniform", seed=5) as omni:
        model, optimizer = omni.prepare(model := Counter(size), torch.optim.SGD(model.parameters(), lr=8.0))
        loader = omni.loader(OneHot(size), shuffle=True)
        omni.resume(folder)
        done = omni.global_step
        for i, x in enumerate(loader, start=done + 1):
            omni.backward(model(x) / len(x))
            if i % together == 0:
                optimizer.step()
                optimizer.zero_grad()
            before = torch.load(path)["sampler"] if (path := Path(folder, "checkpoint.pt")).exists() else None
            omni.save(folder, every=every)
            if path.exists() and torch.load(path)["sampler"] != before:
                saved.append(i)
            if i == stop:
                break
        return uses(model), saved


@pytest.mark.parametrize(
    ("together", "every", "saved"), [(4, 5, [8, 12]), (3, 4, [6, 9, 12]), (2, 2, [2, 4, 6, 8, 10, 12])]
)
def test_a_checkpoint_is_behind_a_step_that_was_made(
    gang: Gang, tmp_path: Path, together: int, every: int, saved: list[int]
) -> None:
    """Where the script itself makes a step only now and then: nothing that is in no weight yet counts as used."""
    ((_, first),) = gang.run(1, accumulating_by_hand, str(tmp_path), every, together, 11)
    ((used, second),) = gang.run(1, accumulating_by_hand, str(tmp_path), every, together, None)
    assert first + second == saved
    assert used == [1.0] * 96


def leaving_out(folder: str) -> Any:
    saved, omni = [], OmniLearn(8, policy="uniform", seed=5, nonfinite="skip")
    with omni:
        model, optimizer = omni.prepare(model := mlp(4), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, _ in omni.loader(Numbered(64), shuffle=True):
            omni.backward(model(x).mean() * (float("inf") if omni.global_step == 3 else 1.0))
            optimizer.step()
            with mock.patch.object(checkpoint, "write", side_effect=lambda *_: saved.append(omni.global_step)):
                omni.save(folder, every=2)
            optimizer.zero_grad()
        return saved, omni.skipped


def test_a_step_that_was_left_out_counts_as_one(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(2, leaving_out, str(tmp_path)) == [([2, 4, 6, 8], 1), ([], 1)]


def broken_off(folder: str, what: str) -> Any:
    """Leaves a loop in which rank 1 is parked, and at once does something that all do together."""
    with OmniLearn(8, policy=Script([[4, 4], [8, 0]]), seed=5, timeout=20) as omni:
        model, optimizer = omni.prepare(model := mlp(4), torch.optim.Adam(model.parameters()))
        for x, _ in omni.loader(Numbered(400), shuffle=True):
            omni.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            if omni.global_step == 20:
                omni.save(folder)
                break
        if what == "resume":
            return omni.resume(folder), omni.global_step
        return len(omni.loader(Numbered(400), shuffle=True)), omni.global_step


@pytest.mark.parametrize(("what", "result"), [("resume", ({}, 20)), ("loader", (50, 20))])
def test_the_parked_hear_of_a_break_before_what_is_done_together(
    gang: Gang, tmp_path: Path, what: str, result: Any
) -> None:
    assert gang.run(2, broken_off, str(tmp_path), what) == [result] * 2


def every_outside(folder: str, mode: str) -> None:
    with OmniLearn(8, mode=mode) as omni:
        omni.prepare(model := mlp(4), torch.optim.Adam(model.parameters()))
        omni.loader(Numbered(16))
        omni.save(folder, every=2)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_counts_the_steps_of_a_loop(gang: Gang, tmp_path: Path, mode: str) -> None:
    with pytest.raises(WorkerError, match="counts the steps of the training loop: call it there"):
        gang.run(1, every_outside, str(tmp_path), mode)


def test_every_must_be_a_number_of_steps(gang: Gang, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="every must be a whole number of at least 1, got 0"):
        gang.run(1, save, str(tmp_path), {"every": 0})


# Bad files, bad folders


def load(folder: str, other_model: bool = False) -> Any:
    omni, model, *_ = begin("norm" if other_model else "dropout")
    with omni:
        return omni.load(folder), snapshot(model)


def save(folder: str, extra: Any, limit: int | None = None) -> Any:
    """Save; ``limit`` is the size at which the disk is full."""
    omni, model, *_ = begin("dropout")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with omni:
        try:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            omni.save(folder, **extra)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return snapshot(model)


def same_error(gang: Gang, match: str, function: Any, *args: Any) -> None:
    with pytest.raises(WorkerError, match=match) as raised:
        gang.run(2, function, *args)
    last = [text.strip().splitlines()[-1] for _, text in raised.value.errors.values()]
    assert len(last) == 2
    assert last[0] == last[1]


def test_files_that_are_no_checkpoints(gang: Gang, tmp_path: Path) -> None:
    same_error(gang, "there is no checkpoint in", load, str(tmp_path))
    (tmp_path / ".checkpoint.pt.tmp").write_bytes(b"half")
    same_error(gang, "there is no checkpoint in", load, str(tmp_path))
    (tmp_path / "checkpoint.pt").write_bytes(b"garbage")
    same_error(gang, "cannot be read as a checkpoint", load, str(tmp_path))
    torch.save({"model": {}}, tmp_path / "checkpoint.pt")
    same_error(gang, r"was not written by omni.save", load, str(tmp_path))
    torch.save({"version": 99}, tmp_path / "checkpoint.pt")
    same_error(gang, "version 99", load, str(tmp_path))


def test_what_was_saved_is_kept_and_given_back(gang: Gang, tmp_path: Path) -> None:
    extra = {"best": 0.5, "name": "run", "history": [1, 2]}
    (state, _) = gang.run(2, save, str(tmp_path), extra)
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    same_error(gang, "does not fit this model", load, str(tmp_path), True)
    # A full disk, a folder that cannot be, and something that could be written but never read.
    same_error(gang, "cannot write a checkpoint", save, str(tmp_path), {}, 2000)
    same_error(gang, "cannot write a checkpoint", save, str(tmp_path / "checkpoint.pt"), {})
    same_error(gang, r"extra.bad is a PosixPath.* must be made of", save, str(tmp_path), {"bad": Path("x")})
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept
    for given, loaded in gang.run(2, load, str(tmp_path)):
        assert given == extra
        assert equal(state, loaded)


WRITER = """
import sys, torch
from omnilearn import OmniLearn
model = torch.nn.Linear(3000, 3000, bias=False)
omni = OmniLearn(8)
model, opt = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
number = 0
while True:
    number += 1
    model.weight.data.fill_(number)
    omni.save(sys.argv[1], number=number)
    print(number, flush=True)
"""


def test_killed_while_saving(tmp_path: Path) -> None:
    unfinished, whole = tmp_path / ".checkpoint.pt.tmp", tmp_path / "checkpoint.pt"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        deadline = time.monotonic() + 30
        while True:  # until it is in the middle of writing
            assert time.monotonic() < deadline
            try:
                if unfinished.stat().st_size > 1000:
                    break
            except FileNotFoundError:
                continue
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    state = torch.load(whole, weights_only=True)
    assert (state["model"]["weight"] == state["extra"]["number"]).all()
    omni = OmniLearn(8)
    model = torch.nn.Linear(3000, 3000, bias=False)
    model, _ = omni.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert omni.load(tmp_path) == state["extra"]
    omni.save(tmp_path, number=0)
    assert os.listdir(tmp_path) == ["checkpoint.pt"], "what the crash left is gone"
    omni.close()
