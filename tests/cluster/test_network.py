"""Namespaces carry gloo, and the token bucket limits it."""

from __future__ import annotations

import select
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_helpers import needs_network, run

from omnilearn.cluster import netns
from omnilearn.cluster.emulation import Emulation, Worker
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.owner import new_name

REDUCE = """
import sys, time, torch, torch.distributed as dist
store = dist.TCPStore(sys.argv[2], int(sys.argv[3]), 2, False)
dist.init_process_group("gloo", store=store, rank=int(sys.argv[1]), world_size=2)
for line in sys.stdin:
    x = torch.ones(250_000)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(x)
    print(time.perf_counter() - start, x[0].item(), flush=True)
dist.destroy_process_group()
"""


@needs_network
def test_all_reduce_crosses_the_namespaces_and_is_limited() -> None:
    """1 MB between two workers on fast links, then on links of 2 MB/s."""
    import torch.distributed as dist

    said: list[str] = []
    emulation = Emulation("test", (Worker(bandwidth=10**10, latency=0.001), Worker(bandwidth=10**10)))
    with ExitStack() as stack:
        emulator = stack.enter_context(Emulator(emulation, say=said.append))
        assert "network by namespaces" in said[0]
        assert emulator.latency != ("latency LEFT OUT: this kernel has no netem" in said[0])
        store = dist.TCPStore(emulator.host_address, 0, 2, True, wait_for_workers=False)
        arguments = [emulator.host_address, str(store.port)]
        workers = []
        for k in range(2):
            command = emulator.command(k, [sys.executable, "-c", REDUCE, str(k), *arguments])
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(worker)
            stack.callback(worker.kill)
            workers.append(worker)

        def reduce() -> float:
            for worker in workers:
                print("go", file=worker.stdin, flush=True)
            answers = [answer(worker) for worker in workers]
            assert [total for _, total in answers] == [2.0, 2.0]
            return max(seconds for seconds, _ in answers)

        reduce()
        fast = min(reduce() for _ in range(3))
        for k in range(2):
            emulator.change(worker=k, bandwidth=16 * 10**6)
        slow = reduce()
        for worker in workers:
            worker.communicate(timeout=30)
    assert slow > 0.25
    assert slow > 3 * fast


def answer(worker: subprocess.Popen[str]) -> tuple[float, float]:
    """The worker's next line, or a failure that says what was waited for."""
    assert worker.stdout is not None
    ready, _, _ = select.select([worker.stdout], [], [], 60)
    assert ready, "waited 60 s in vain for an all_reduce between namespaces"
    seconds, total = worker.stdout.readline().split()
    return float(seconds), float(total)


@needs_network
def test_bandwidth_can_change() -> None:
    with Emulator(Emulation("test", (Worker(bandwidth=10**8),) * 2)) as emulator:
        emulator.change(worker=1, bandwidth=5 * 10**6)
        names = [Path(emulator._network.door(k)).name for k in range(2)]  # type: ignore[union-attr]
        shown = [netns._run("tc", "-n", name, "qdisc", "show", "dev", "eth0") for name in names]
        assert "rate 100Mbit" in shown[0]
        assert "rate 5Mbit" in shown[1]
        assert emulator.address(0) != emulator.address(1) != emulator.host_address


@needs_network
def test_the_launcher_reaches_workers_in_namespaces(tmp_path: Path) -> None:
    (tmp_path / "net.toml").write_text('[[worker]]\nbandwidth = "100Mbit"\n' * 2)
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1000)\n"
        "dist.all_reduce(x)\n"
        "print('sum', x[0].item(), os.environ['MASTER_ADDR'], flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    code, out, err = run(tmp_path, "--emulate", "net.toml", "train.py")
    assert code == 0, err
    assert "[rank 1] sum 2.0 198.18." in out


@needs_network
@pytest.mark.parametrize("way", ["c10d", "static"])
def test_two_hosts_meet_though_their_names_mean_nothing(tmp_path: Path, way: str) -> None:
    """Two namespaces play two hosts; both hostnames resolve to the loopback address, as on many machines."""
    (tmp_path / "train.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print('sum', x.item(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    name = new_name()
    try:
        network = netns.Network(name, [Worker()] * 2)
        first, port = network.addresses[0], "29400"  # a port of the namespace's own
        meet = {
            "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:{port}", "--rdzv-id", "test"],
            "static": ["--master-addr", first, "--master-port", port],
        }[way]
        hosts = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{name}-{k}", sys.executable, "-m", "omnilearn", "run", "--nnodes", "2", *meet]
                + (["--node-rank", str(k), "train.py"] if way == "static" else ["train.py"]),
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for k in range(2)
        ]
        try:
            outputs = [host.communicate(timeout=60)[0] for host in hosts]
        finally:
            for host in hosts:
                host.kill()
    finally:
        netns.remove(name)
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "[rank 0] sum 2.0" in "".join(outputs)
    assert "[rank 1] sum 2.0" in "".join(outputs)
