"""What a worker learns about its memory: enough to stay below the limit, from the passes it makes anyway."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnilearn.pytorch.gauge import Gauge
from omnilearn.pytorch.memory import LOOKS, Memory, is_out_of_memory


class Simulated(Gauge):
    """A device with a fixed part, which grows in the first step, a constant and a part per sample."""

    def __init__(self, limit: int, fixed: int, constant: int, per_sample: int, kills: bool) -> None:
        self.limit, self.fixed, self.constant, self.per_sample, self.kills = limit, fixed, constant, per_sample, kills
        self.running = self.looks = self.asked = 0

    def used(self) -> int:
        return self.fixed

    def free(self) -> int:
        self.asked += 1
        return self.limit - self.fixed

    def reset(self) -> None:
        self.looks += 1

    def peak(self) -> int:
        return self.fixed + self.constant + self.running * self.per_sample


def memory(gauge: Simulated, **options: int) -> Memory:
    learned = Memory(torch.device("meta"), **options)
    learned._gauge = gauge
    return learned


def run(learned: Memory, gauge: Simulated, samples: int) -> bool:
    """A pass, as it would go; whether it went well."""
    gauge.running = samples
    learned.begin(samples)
    if gauge.peak() > gauge.limit:
        learned.abandon()
        return False
    learned.end()
    return True


gauges = st.builds(
    Simulated,
    limit=st.integers(10_000, 100_000),
    fixed=st.integers(1, 5000),
    constant=st.integers(0, 500),
    per_sample=st.integers(1, 100),
    kills=st.booleans(),
)


@given(gauges, st.integers(1, 40), st.integers(41, 3000))
def test_what_it_allows_fits(gauge: Simulated, first: int, later: int) -> None:
    """Learned from a small share, a larger one is cut so that no pass runs out of memory, and is not cut needlessly."""
    learned = memory(gauge)
    assert learned.micro_batch is None
    assert run(learned, gauge, first)
    for _ in range(8):
        for part in learned.cut(later):
            assert run(learned, gauge, part), "it ran out of memory"
    fitting = (gauge.limit - gauge.fixed - gauge.constant) / gauge.per_sample
    assert learned.micro_batch is not None
    assert learned.micro_batch <= fitting
    assert max(learned.cut(later)) >= min(later / 2, 0.6 * fitting / 2), "as large as can be, nearly"


@given(gauges, st.integers(1, 4))
def test_refused_sizes_come_down_to_the_minimum(gauge: Simulated, minimum: int) -> None:
    learned = memory(gauge, minimum=minimum)
    size, tries = 4096, 0
    while size >= 2 * minimum:
        smaller = learned.refuse(size)
        assert minimum <= smaller < size
        assert learned.micro_batch == smaller
        size, tries = smaller, tries + 1
    assert tries <= 12
    assert learned.tight


def test_looking_costs_nothing_once_a_size_is_known() -> None:
    """Nor does it on a card that is nearly full."""
    gauge = Simulated(500, 100, 0, 10, False)
    learned = memory(gauge)
    for _ in range(50):
        assert run(learned, gauge, 32)
        assert run(learned, gauge, 16)
    assert gauge.looks == gauge.asked == LOOKS


@pytest.mark.parametrize("kills", [False, True])
def test_where_memory_is_plenty_it_is_looked_at_once(kills: bool) -> None:
    """A look on a CPU slows its step down: growing batches must not be slow for that alone."""
    gauge = Simulated(100_000, 100, 0, 10, kills)
    learned = memory(gauge)
    for samples in range(16, 2000):
        assert not learned.is_new(samples) or samples == 16
        assert run(learned, gauge, samples)
    assert gauge.looks == 1
    assert learned.proven == 1999
    assert run(learned, gauge, 4000), "it comes nearer to the limit"
    assert gauge.looks == 2


def test_memory_that_shrinks_is_no_longer_plenty() -> None:
    """Others may have taken it since: what is free is asked before each new size, not only at the first look."""
    gauge = Simulated(100_000, 100, 0, 10, True)
    learned = memory(gauge)
    assert run(learned, gauge, 16)
    assert not learned.is_new(100)
    gauge.limit = 2000
    assert learned.is_new(100)
    assert run(learned, gauge, 100)
    assert gauge.looks == 2


def test_what_ran_once_runs_again_where_nothing_kills() -> None:
    """Nine tenths of a card are in use, by the user's choice: that is no reason to cut."""
    card, group = Simulated(10_000, 0, 0, 95, False), Simulated(10_000, 0, 0, 95, True)
    on_card, in_group = memory(card), memory(group)
    for learned, gauge in ((on_card, card), (in_group, group)):
        gauge.fixed = 1
        assert run(learned, gauge, 100)
    assert on_card.cut(100) == [100]
    assert in_group.cut(100) == [50, 50]


def test_half_or_what_is_known_to_run() -> None:
    learned = memory(Simulated(10_000, 1, 0, 10, False))
    learned.proven = 48
    assert learned.refuse(64) == 48
    assert learned.refuse(48) == 24


def test_the_users_bound_and_all_together() -> None:
    assert memory(Simulated(1000, 1, 0, 1, False), most=8).cut(20) == [7, 7, 6]
    fixed = Memory(torch.device("meta"), fixed=True)
    fixed.refuse(8)
    assert fixed.cut(64) == [64], "SyncBatchNorm: all make the same passes"


def test_out_of_memory_by_its_type() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value), "what torch's CPU allocator really raises"
    assert not is_out_of_memory(RuntimeError("out of memory, says somebody else"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator"))
