"""Resources: what limits a worker is seen, and the papers' rule for a first guess."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cluster_helpers import needs_groups

from omnilearn.cluster.emulation import Emulation, Worker
from omnilearn.cluster.emulator import Emulator
from omnilearn.cluster.resources import Resources, detect, measure_flops, speeds
from omnilearn.errors import InfeasibleError


def make(device: str = "cpu", cores: float = 1.0, flops: float | None = None) -> Resources:
    return Resources("host", cores, device, "name", "", 1, flops)


def test_detect_sees_this_machine() -> None:
    here = detect()
    assert 0 < here.cores <= len(os.sched_getaffinity(0))
    assert here.device == "cpu"
    assert here.memory > 2**20
    assert here.device_name
    assert here.flops is None


def test_measured_flops_are_plausible() -> None:
    assert 1e7 < measure_flops("cpu") < 1e15


@needs_groups
def test_detect_sees_the_limits_of_its_group() -> None:
    code = "from omnilearn.cluster.resources import detect; r = detect(); print(r.cores, r.memory)"
    with Emulator(Emulation("test", (Worker(cpu=0.5, memory=300_003_328),))) as emulator:
        words = subprocess.check_output(emulator.command(0, [sys.executable, "-c", code]), timeout=60).split()
    assert float(words[0]) == 0.5
    assert int(words[1]) == 300_003_328


def test_importing_the_launcher_side_needs_neither_torch_nor_psutil() -> None:
    code = (
        "import sys, omnilearn.cluster.emulator, omnilearn.cluster.run, omnilearn.cluster.resources;"
        "print([m for m in ('torch', 'psutil', 'rich') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60).decode().strip() == "[]"


def test_speeds_are_cores_among_cpus_and_flops_in_a_mix() -> None:
    assert speeds([make(cores=2, flops=5), make(cores=6, flops=1)]) == (2, 6)
    assert speeds([make("cuda", 2, 5e12), make("cpu", 6, 1e11)]) == (5e12, 1e11)
    with pytest.raises(InfeasibleError, match="measure=True"):
        speeds([make("cuda", 2, 5e12), make("cpu", 6)])
