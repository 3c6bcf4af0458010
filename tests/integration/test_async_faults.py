"""Bad luck in asynchronous mode: the others go on, and every sample is used exactly once all the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from omnilearn import OmniLearn, OmniLearnError
from omnilearn.pytorch import checkpoint
from omnilearn.pytorch.asynchronous import wire
from omnilearn.pytorch.asynchronous.gradient import SWITCH as EARLY
from omnilearn.pytorch.asynchronous.shared import SWITCH
from tests.integration.asynchronous import Counter, Crew, count_epochs, counting, crew, uses

SIZE = 96


def train(folder: Path, epochs: int = 2, fault: str = "", **options: Any) -> Any:
    """A worker: counts its samples, and has an accident at its third step."""
    steps = 0
    omni, model, optimizer, loader = counting(SIZE, **options)

    def accident() -> None:
        nonlocal steps
        steps += 1
        if fault == "pace":
            time.sleep(0.02)
        if steps != 3 or not fault or fault == "pace":
            return
        (folder / fault).write_text(str(os.getpid()))
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "mid-push":
            send = wire.Pair.send

            def half(self: Any, header: Any, parts: Any) -> None:
                send(self, header)  # the gradient has gone ahead of it, flags and buffers do not come
                os.kill(os.getpid(), signal.SIGKILL)

            wire.Pair.send = half  # type: ignore[method-assign]
        if fault == "mid-backward":
            die_sending(omni, lambda: os.kill(os.getpid(), signal.SIGKILL))
        if fault == "nan":
            model.uses.grad.fill_(float("nan"))
        if fault == "nonsense":
            omni._worker._ask(wire.PUSH, "lying", omni._worker._tensors.beside([True]), parts=7, leases=5, samples=1)

    count_epochs(model, optimizer, omni, loader, epochs, accident)
    omni.close()
    return {"uses": uses(model), "late": omni._worker.late, "skipped": omni.skipped, "version": omni._worker.version}


def die_sending(omni: Any, accident: Callable[[], None]) -> None:
    """Have an accident in the next backward pass, when a part of a bucket has been sent."""
    gradient = omni._worker.gradient
    send = gradient._send

    def part(number: int, bucket: torch.Tensor) -> None:
        assert any("run_backward" in frame.name for frame in traceback.extract_stack()), "not in the backward pass"
        gradient._send = send
        send(number, bucket[: wire.BUCKET])
        accident()
        send(number, bucket[wire.BUCKET :])

    gradient._send = part


def three(team: Crew, fault: str, where: int = 1, **options: Any) -> None:
    environment = {SWITCH: "0", EARLY: "1"} if fault.startswith("mid-") else {}  # in shared memory there is no middle
    for rank in range(3):
        options_here = {"fault": fault if rank == where else "pace", **options}
        team.start(f"worker {rank}", _call, options_here, rank=rank, size=3, **environment)


def _call(folder: Path, options: dict[str, Any]) -> Any:
    return train(folder, **options)


@pytest.mark.parametrize(
    ("fault", "victim", "ballast"),
    [("kill", 1, 0), ("mid-push", 2, 3_000_000), ("mid-backward", 1, 3_000_000), ("kill", 0, 0)],
)
def test_a_killed_worker_costs_nothing(tmp_path: Path, fault: str, victim: int, ballast: int) -> None:
    """Also rank 0, which started the server."""
    with crew(tmp_path) as team:
        three(team, fault, victim, ballast=ballast)
        results = [team.result(f"worker {rank}") for rank in range(3) if rank != victim]
        assert team.mark(fault)
        assert team.processes[f"worker {victim}"].exitcode == -signal.SIGKILL
        for result in results:
            assert result["uses"] == [2.0] * SIZE


def test_a_frozen_worker_loses_its_samples_and_comes_back(tmp_path: Path) -> None:
    with crew(tmp_path) as team:
        three(team, "freeze", 1, lease_timeout=0.5, epochs=3)
        team.wait(lambda: team.mark("freeze"), "the freeze")
        frozen = team.processes["worker 1"]
        team.wait(lambda: "given out again" in team.said("worker 0"), "its lease to be given out again")
        assert frozen.is_alive()
        os.kill(frozen.pid, signal.SIGCONT)
        results = [team.result(f"worker {rank}") for rank in range(3)]
        assert results[1]["late"] == 1, "its late gradient is dropped"
        for result in results:
            assert result["uses"] == [3.0] * SIZE


def test_a_nan_is_refused_and_its_worker_named(tmp_path: Path) -> None:
    with crew(tmp_path) as team:
        three(team, "nan", 2)
        for rank in (0, 1):
            counts = team.result(f"worker {rank}")["uses"]
            assert sum(counts) == 2 * SIZE - 8, "the batch of the bad gradient, and no other"
        assert team.mark("nan")
        team.wait(lambda: not team.processes["worker 2"].is_alive(), "the culprit to stop")
        assert team.processes["worker 2"].exitcode == 1
        assert "NonFiniteError: the gradient of worker 2 is not finite" in team.said("worker 2")
        assert "gradient of rank 2 (127.0.0.1) is not finite" in team.said("worker 0")


def test_a_lying_worker_is_disconnected(tmp_path: Path) -> None:
    with crew(tmp_path) as team:
        three(team, "nonsense", 2)
        for rank in (0, 1):
            assert team.result(f"worker {rank}")["uses"] == [2.0] * SIZE
        assert team.mark("nonsense")
        assert "sent nonsense" in team.said("worker 0")
        team.wait(lambda: not team.processes["worker 2"].is_alive(), "the liar to stop")
        assert "PeerFailure" in team.said("worker 2")


def endless(folder: Path) -> None:
    omni, model, optimizer, loader = counting(SIZE)
    for epoch in range(100_000):
        count_epochs(model, optimizer, omni, loader, 1, lambda: time.sleep(0.01))
        if epoch == 0:
            omni.save(folder / "checkpoint", epoch=epoch)
            (folder / f"saved {omni.rank}").touch()


def test_when_the_server_dies_the_workers_stop(tmp_path: Path) -> None:
    with crew(tmp_path) as team:
        for rank in range(2):
            team.start(f"worker {rank}", endless, rank=rank, size=2)
        team.wait(lambda: team.mark("saved 0") and team.mark("saved 1"), "a checkpoint")
        os.kill(team.server["pid"], signal.SIGKILL)
        for rank in range(2):
            team.wait(lambda rank=rank: not team.processes[f"worker {rank}"].is_alive(), "the workers to stop")
            assert team.processes[f"worker {rank}"].exitcode == 1
            assert "PeerFailure: the server at 127.0.0.1" in team.said(f"worker {rank}")
            assert "last checkpoint" in team.said(f"worker {rank}")
        assert checkpoint.read(tmp_path / "checkpoint")["extra"] == {"epoch": 0}


def bereaved(folder: Path, how: int) -> None:
    """The server is killed or frozen while a gradient leaves, in the backward pass."""
    wire.PROMPT = timedelta(seconds=2)
    omni, model, optimizer, loader = counting(SIZE, ballast=5_000_000)
    pid = json.loads((folder / "server.json").read_text())["pid"]
    die_sending(omni, lambda: os.kill(pid, how))
    count_epochs(model, optimizer, omni, loader, 1, lambda: (folder / "went on").touch())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_server_dies_in_the_middle_of_a_gradient(tmp_path: Path, how: int) -> None:
    """The backward pass itself ends well; the step says it."""
    with crew(tmp_path) as team:
        team.start("worker", bereaved, how, **{SWITCH: "0", EARLY: "1"})
        try:
            team.wait(lambda: not team.processes["worker"].is_alive(), "the worker to stop")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(team.server["pid"], signal.SIGKILL)
        assert team.mark("went on")
        assert "PeerFailure: the server at 127.0.0.1" in team.said("worker")
        assert "sending a gradient" in team.said("worker")


def late(folder: Path, address: str) -> Any:
    omni, model, optimizer, loader = counting(SIZE, join=address)
    (folder / "joined").write_text(str(omni.rank))
    first = omni.epoch
    count_epochs(model, optimizer, omni, loader, 4 - first)
    omni.close()
    return {"uses": uses(model), "steps": omni._worker._step, "rank": omni.rank}


def until_joined(folder: Path) -> Any:
    omni, model, optimizer, loader = counting(SIZE)
    for _ in range(4):
        count_epochs(model, optimizer, omni, loader, 1)
        deadline = time.monotonic() + 30
        while not (folder / "joined").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    omni.close()
    return {"uses": uses(model)}


def garbage(address: str) -> None:
    """What somebody might say at the door: noise, another protocol, too much, nothing, half of it, the wrong thing."""
    host, _, port = address.rpartition(":")
    for words in (
        os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"{" * 100_000 + b"\n", b"", b'{"omnilearn": 2', b"[]\n",
        b'{"omnilearn": 99, "want": "join"}\n', b'{"omnilearn": 2, "want": "join", "rank": "x"}\n', b"null\n",
        b'{"omnilearn": 2, "want": "join", "rank": 5, "passport": {}, "resources": 3}\n', b"\x80\x04\x95" * 50 + b"\n",
    ):  # fmt: skip
        with socket.create_connection((host, int(port)), timeout=10) as peer:
            peer.sendall(words)


def test_join_late_past_a_peer_that_speaks_garbage(tmp_path: Path) -> None:
    with crew(tmp_path) as team:
        team.start("first", until_joined)
        address = team.server["address"]
        garbage(address)
        team.start("other model", other_model, address)
        assert "models differ: uses is" in team.result("other model")  # while the first waits for the second
        team.start("second", late, address)
        first, second = team.result("first"), team.result("second")
        assert team.mark("joined")
        assert second["rank"] > 0
        assert second["steps"] > 0, "the newcomer took part"
        assert first["uses"] == second["uses"] == [4.0] * SIZE
        assert "was let go" in team.said("first")


def other_model(folder: Path, address: str) -> str:
    omni = OmniLearn(24, mode="async", policy="uniform", lr_scaling="none", timeout=60, join=address)
    model = Counter(SIZE + 1)
    try:
        omni.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    except OmniLearnError as error:
        return str(error)
    return "was let in"


def test_no_server_is_said_plainly() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OmniLearnError, match=f"no asynchronous server answers at {address}"):
            OmniLearn(24, mode="async", join=address)
    with pytest.raises(OmniLearnError, match="give HOST:PORT"):
        OmniLearn(24, mode="async", join="nowhere")
