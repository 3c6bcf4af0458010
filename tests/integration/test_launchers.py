"""Scripts as users start them: by torchrun itself, by bare processes. They end by themselves, also without close()."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
from tests.integration.common import Script, blobs, mlp
from torch.nn import functional as F
from omnilearn import OmniLearn

omni = OmniLearn(12, policy=Script([[6, 6], [0, 12]]), timeout=60)
model, optimizer = omni.prepare(model := mlp(), torch.optim.Adam(model.parameters()))
steps = 0
for x, y in omni.loader(blobs()):
    omni.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if steps == 4:
        break
print(f"rank {omni.rank} of {omni.world_size}: {steps} steps", flush=True)
"""


def environment(**settings: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings}


def test_plain_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2: 4 steps" in done.stdout


def test_plain_torchrun_says_where_a_script_failed(tmp_path: Path) -> None:
    failing = SCRIPT.replace("    if steps == 4:\n        break", "    raise ValueError('a bad sample')")
    (tmp_path / "script.py").write_text(failing)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), text=True, capture_output=True, timeout=120)
    assert done.returncode == 1
    summary = done.stderr.partition("Root Cause")[2]
    assert "raise ValueError('a bad sample')" in summary
    assert "NoneType: None" not in summary


def test_a_break_before_the_end_of_a_script_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Rank 0 is parked when rank 1 breaks out of the loop and ends, without another word to it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env=environment(RANK=str(rank), TORCHELASTIC_USE_AGENT_STORE="True", **settings),
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0]
    steps = [int(text.split(": ")[1].split()[0]) for text in said]
    assert steps[1] == 4
    assert steps[0] < 4, "it was parked"
