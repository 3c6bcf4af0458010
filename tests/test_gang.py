"""What the other tests run on: a data worker that never answers is noticed, ended, and tried once more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests import gang
from tests.waiting import gone


class StuckOnce(Dataset[torch.Tensor]):
    """Its first reader never comes back."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        if not os.path.exists(self.flag):
            Path(self.flag).write_text(str(os.getpid()))
            time.sleep(600)
        return torch.tensor(i)


def total(flag: str) -> int:
    return sum(int(batch.sum()) for batch in DataLoader(StuckOnce(flag), batch_size=2, num_workers=1))


class Impatient(gang.Gang):
    """Waits as long as usual once it has seen something hang."""

    usual = gang.LIMIT

    def _where(self, pids: list[int]) -> str:
        gang.LIMIT = self.usual
        return super()._where(pids)


def test_a_data_worker_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    own = Impatient()
    try:
        own.run(1, os.getpid)  # the process is there
        monkeypatch.setattr(gang, "SLICE", 1.0)
        monkeypatch.setattr(gang, "LIMIT", 3.0)
        with pytest.warns(UserWarning, match=r"(?s)did not finish total.*test_gang.py.*in __getitem__.*_try_get_data"):
            assert own.run(1, total, str(flag)) == [6]
        gone([int(flag.read_text())])  # the stuck one does not outlive its rank
    finally:
        own.close()
