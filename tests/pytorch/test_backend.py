"""What gradients are reduced with follows from who has which card. No card is needed to decide that."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from omnilearn.cluster.resources import Resources
from omnilearn.pytorch.world import backend

A1, A2, B1, CPU = ("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-3"), ("a", "")


def ranks(*places: tuple[str, str]) -> list[Resources]:
    return [Resources(host, 8, "cuda" if card else "cpu", "card", card, 2**30, 1.0) for host, card in places]


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([A1, A2], "nccl"),
        ([A1, A2, B1], "nccl"),
        ([A1], "nccl"),
        ([A1, A1], "gloo"),  # NCCL refuses two ranks on one card
        ([A1, A2, B1, A2], "gloo"),
        ([A1, CPU], "gloo"),
        ([CPU, CPU], "gloo"),
        ([A1, ("b", "GPU-1")], "nccl"),  # cards of two machines that only look alike
    ],
)
def test_backend_by_topology(monkeypatch: pytest.MonkeyPatch, places: list[tuple[str, str]], expected: str) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert backend(ranks(*places)) == expected
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend(ranks(*places)) == "gloo"
