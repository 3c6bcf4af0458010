"""What workers do together: in other places on other ranks it ends with words, and who only works is waited for."""

from __future__ import annotations

import logging
import os
import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from omnilearn import OmniLearn, OmniLearnError
from omnilearn.pytorch import watch
from tests.gang import Gang, WorkerError
from tests.integration.common import Script, blobs, mlp, snapshot


def quickly() -> None:
    """In this process the watch looks sooner. It ends with the gang, which each test here closes."""
    watch.TICK, watch.COMPARE_AFTER, watch.SURE_AFTER, watch.NAME_AFTER, watch.ANSWER_WITHIN = 0.1, 0.6, 1.5, 2.0, 0.5


@pytest.fixture
def quick(gang: Gang) -> Any:
    yield gang
    gang.close(kill=True)


def begin(plans: Any, interval: int = 3, **options: Any) -> Any:
    quickly()
    options = {"timeout": 40, **options}
    omni = OmniLearn(12, policy=Script(plans, interval) if plans else "uniform", **options)
    model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
    return omni, model, opt


def step(omni: Any, model: Any, opt: Any, x: Any, y: Any) -> None:
    omni.backward(F.cross_entropy(model(x), y))
    opt.step()
    opt.zero_grad()


EQUAL, PARKED = [[6, 6]], [[6, 6], [12, 0], [12, 0], [6, 6]]


def mistake(name: str, folder: str) -> Any:
    omni, model, opt = begin(PARKED if name == "enumerate" else EQUAL)
    with omni:
        test = omni.loader(blobs(64), train=False)
        loader = omni.loader(blobs(12 * 40))
        for i, (x, y) in enumerate(loader):
            step(omni, model, opt, x, y)
            alone = omni.rank == 1 and omni.global_step == 5
            if name == "enumerate" and i % 5 == 4:
                omni.mean(1.0)
            if name == "mean on one" and alone:
                omni.mean(1.0)
            if name == "evaluation on one" and alone:
                list(test)
            if name == "save on one" and alone:
                omni.save(folder)
            if name.startswith("break") and omni.rank == 1 and omni.global_step == 5:
                break
            if name == "unlike" and omni.global_step == 5:
                omni.mean(1.0) if omni.rank else omni.save(folder)
        if name == "break, then mean":
            omni.mean(1.0)
        if name == "break, then a loop":
            list(loader)
        if name == "after the loop" and omni.rank == 1:
            omni.mean(1.0)
        if name == "after the loop" and omni.rank == 0:
            omni.save(folder)


WORDS = {
    "enumerate": ("mean()", "reducing gradients"),
    "mean on one": ("mean() of a number (step 4)", "reducing gradients (step 5"),
    "evaluation on one": ("evaluation (step 4, 64 samples)", "reducing gradients"),
    "save on one": ("save() (step 4)", "reducing gradients"),
    "break, then mean": ("mean(), after a loop was left (step 5", "reducing gradients (step 5"),
    "break, then a loop": ("a training loop, after a loop was left", "reducing gradients"),
    "break, then the end": ("the end of the script, or close(), after a loop was left", "reducing gradients"),
    "unlike": ("mean() of a number (step 4)", "save() (step 4)"),
    "after the loop": ("mean() of a number (step 40)", "save() (step 40)"),
}


@pytest.mark.parametrize("name", WORDS)
def test_places_that_differ_are_named_on_all(quick: Gang, name: str, tmp_path: Any) -> None:
    began = time.monotonic()
    with pytest.raises(WorkerError) as raised:
        quick.run(2, mistake, name, str(tmp_path))
    assert time.monotonic() - began < 30, "long before the timeout of 40 s"
    assert len(raised.value.errors) == 2, "on both"
    assert any(kind == "OutOfStepError" for kind, _ in raised.value.errors.values())
    for kind, text in raised.value.errors.values():
        assert kind in ("OutOfStepError", "PeerFailure"), text
        for words in WORDS[name]:
            assert words in text
        assert "test_together.py:" in text.strip().splitlines()[-1], "which line of the script"


# Who is only at work is waited for


def long_work(how: str) -> Any:
    omni, model, opt = begin([[6, 6], [12, 0]] if how == "parked" else EQUAL, timeout=6)
    if how == "named":
        omni._world.timeout = omni._world.timeout * 10
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("omnilearn").addHandler(Heard())
    with omni:
        for x, y in omni.loader(blobs(12 * 20)):
            step(omni, model, opt, x, y)
            if omni.global_step == 12 and (how == "parked" or omni.rank == 1):
                deadline = time.monotonic() + (14 if how == "parked" else 5)
                while time.monotonic() < deadline:  # an evaluation inside the loop, a slow save
                    time.sleep(0.01)
        return [line for line in heard if "waits in" in line], snapshot(model)


def test_the_parked_wait_longer_than_the_timeout_for_who_is_at_work(quick: Gang) -> None:
    (_, one), (_, other) = quick.run(2, long_work, "parked")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_who_keeps_the_others_waiting_is_named_once(quick: Gang) -> None:
    (lines, _), (none, _) = quick.run(2, long_work, "named")
    assert none == []
    (line,) = lines
    assert re.match(r"rank 0 waits in (reducing gradients|exchanging timings) \(step 12", line)
    assert "for rank 1, which is at work, test_together.py:" in line


# Ends


def leaving(how: str) -> Any:
    omni, model, opt = begin(EQUAL)
    with omni:
        for x, y in omni.loader(blobs(12 * 20)):
            step(omni, model, opt, x, y)
            if omni.rank == 1 and omni.global_step == 5:
                if how == "word":
                    raise RuntimeError("skip connection: the peer of shape (3, 8) timed out")
                omni._events.close()
                raise SystemExit(3)


@pytest.mark.parametrize("how", ["word", "exit"])
def test_the_one_that_ends_is_named_by_the_others(quick: Gang, how: str) -> None:
    with pytest.raises(WorkerError) as raised:
        quick.run(2, leaving, how)
    kind, text = raised.value.errors[0]
    assert kind == "PeerFailure"
    assert "rank 1 failed" in text
    assert ("skip connection" if how == "word" else "SystemExit: 3") in text
    assert raised.value.errors[1][0] == ("RuntimeError" if how == "word" else "SystemExit")


class Throws(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.environ["RANK"] == "1" and self.calls == 3:
            raise RuntimeError("skip connection: shapes do not match")
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)

    calls = 0


def own_error() -> Any:
    quickly()
    with OmniLearn(12, policy="uniform", timeout=30) as omni:
        model, opt = omni.prepare(model := Throws(8, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in omni.loader(blobs(120)):
            step(omni, model, opt, x, y)


def test_an_error_of_the_script_stays_its_own_whatever_its_words(quick: Gang) -> None:
    with pytest.raises(WorkerError) as raised:
        quick.run(2, own_error)
    kind, text = raised.value.errors[1]
    assert kind == "RuntimeError"
    assert text.strip().endswith("RuntimeError: skip connection: shapes do not match")
    assert "rank 1 failed" in raised.value.errors[0][1]


def own_rates() -> Any:
    """A counter of the script's own: rank 1 is parked, and behind when it comes back."""
    omni, model, opt = begin(PARKED)
    with omni:
        for i, (x, y) in enumerate(omni.loader(blobs(12 * 40))):
            opt.param_groups[0]["lr"] = 0.1 * 0.9**i
            step(omni, model, opt, x, y)


def test_a_learning_rate_by_a_counter_of_ones_own_is_found(quick: Gang) -> None:
    with pytest.raises(WorkerError, match=r"learning rates differ between workers .*omni.global_step") as raised:
        quick.run(2, own_rates)
    assert len(raised.value.errors) == 2


# Non-finite gradients where some look later


def late_look(how: str) -> Any:
    quickly()
    if os.environ["RANK"] == "1":  # as a worker on a card would be described
        from omnilearn.cluster import resources

        detect = resources.detect
        resources.detect = lambda *a, **k: __import__("dataclasses").replace(detect(*a, **k), device="xpu")
    with OmniLearn(12, policy="uniform", nonfinite=how, timeout=30) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in omni.loader(blobs(12 * 20)):
            loss = F.cross_entropy(model(x), y)
            omni.backward(loss * (float("nan") if omni.global_step == 10 and omni.rank == 1 else 1.0))
            opt.step()
            opt.zero_grad()
        return omni.skipped


def test_a_cpu_beside_a_card_looks_when_the_card_does(quick: Gang) -> None:
    with pytest.raises(WorkerError, match="the gradient of step 10 is not finite") as raised:
        quick.run(2, late_look, "raise")
    assert [kind for kind, _ in raised.value.errors.values()] == ["NonFiniteError"] * 2
    assert quick.run(2, late_look, "skip") == [1, 1]


# agree, print, is_main


def agreeing() -> Any:
    with OmniLearn(12, policy=Script(PARKED, 3)) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        seen = []
        for x, y in omni.loader(blobs(12 * 40)):
            step(omni, model, opt, x, y)
            here = omni._engine.active  # type: ignore[union-attr]
            seen.append((len(here), omni.agree(omni.rank == 1), omni.agree(omni.rank == 1, how="all")))
            if omni.agree(omni.rank == 0 and omni.global_step == 22):
                break
        both = omni.agree(omni.rank == 1), omni.agree(True, how="all")
        with pytest.raises(OmniLearnError, match="how='any' or how='all'"):
            omni.agree(True, how="most")
        return omni.global_step, set(seen), both, snapshot(model)


def test_agreeing_on_when_to_stop(gang: Gang) -> None:
    one, other = gang.run(2, agreeing)
    assert one[0] == other[0] == 22
    assert one[1] == {(2, True, False), (1, False, False)}
    assert other[1] == {(2, True, False)}, "it was parked meanwhile"
    assert one[2] == other[2] == (True, True)
    assert all(torch.equal(a, b) for a, b in zip(one[3], other[3], strict=True))


def printing(capture: str) -> Any:
    import contextlib
    import io

    text, heard = io.StringIO(), []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("omnilearn").addHandler(handler := Heard())
    with contextlib.redirect_stdout(text), OmniLearn(12, policy=Script([[6, 6], [0, 12], [0, 12], [6, 6]], 3)) as omni:
        model, opt = omni.prepare(model := mlp(), torch.optim.SGD(model.parameters(), lr=0.1))
        omni.print("before")
        for x, y in omni.loader(blobs(12 * 20)):
            step(omni, model, opt, x, y)
            omni.print("step", omni.global_step, sep="=")
            if capture == "main" and omni.is_main:
                pass
        omni.print("behind")
        assert omni.is_main == (omni.rank == 0)
    logging.getLogger("omnilearn").removeHandler(handler)
    return text.getvalue().split(), [line for line in heard if "is_main" in line]


def test_print_speaks_once_a_step_and_who_asks_for_rank_0_is_told(gang: Gang) -> None:
    (one, told), (other, nothing) = gang.run(2, printing, "main")
    steps = sorted(int(word.partition("=")[2]) for word in [*one, *other] if "=" in word)
    assert steps == list(range(1, 21)), "once for every step"
    assert one[0] == "before"
    assert one[-1] == "behind"
    assert any("=" in word for word in other), "while rank 0 was parked"
    (line,) = told
    assert "rank 0 is parked from step" in line
    assert "omni.print" in line
    assert nothing == []
    assert [lines for _, lines in gang.run(2, printing, "no")] == [[], []]
