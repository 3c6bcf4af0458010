"""Leases: every sample once, whatever is taken, finished and given back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnilearn.data.leases import Lease, Leases
from omnilearn.errors import InfeasibleError, UsageError


def test_an_epoch_in_order() -> None:
    epoch = Leases(10, 3)
    taken = [epoch.take("a", 4), epoch.take("b", 4), epoch.take("a", 4), epoch.take("b", 4)]
    assert taken == [Lease(3, 0, 4), Lease(3, 4, 8), Lease(3, 8, 10), None]
    assert not epoch.over
    assert (epoch.free, epoch.lent) == (0, 10)
    assert all(epoch.finish(who, lease) for who, lease in zip("aba", taken, strict=False) if lease)
    assert epoch.over


def test_what_is_given_back_is_lent_again() -> None:
    epoch = Leases(12)
    first, second = epoch.take("a", 4), epoch.take("b", 4)
    assert epoch.give_back("a") == 4
    assert not epoch.finish("a", first), "it is no longer its own"
    assert epoch.take("b", 3) == Lease(0, 0, 3)
    assert epoch.finish("b", second)
    assert epoch.take("c", 9) == Lease(0, 3, 4)
    assert not epoch.finish("b", Lease(0, 3, 4)), "it is somebody else's"


def test_no_rest_is_smaller_than_the_minimum() -> None:
    assert [Leases(9, minimum=2).take("a", 8), Leases(3, minimum=2).take("a", 2)] == [Lease(0, 0, 7), Lease(0, 0, 3)]
    assert Leases(1, minimum=2).take("a", 2) == Lease(0, 0, 1)


def test_position_and_resuming() -> None:
    epoch = Leases(20)
    first, _, third = (epoch.take(who, 4) for who in "abc")
    epoch.finish("a", first)
    epoch.finish("c", third)
    offset, ahead = epoch.position
    assert (offset, ahead) == (4, [(8, 12)])
    again = Leases(20, done=[(0, offset), *ahead])
    assert [again.take("a", 8), again.take("a", 8)] == [Lease(0, 4, 8), Lease(0, 12, 20)]


def test_bad_values_are_named() -> None:
    with pytest.raises(InfeasibleError, match="0 samples"):
        Leases(0)
    with pytest.raises(UsageError, match="at least one sample"):
        Leases(4).take("a", 0)
    with pytest.raises(UsageError, match="not within 4"):
        Leases(4, done=[(2, 6)])


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 200),
    minimum=st.integers(1, 4),
    script=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.sampled_from(["take", "die", "finish"]))),
)
def test_every_sample_once(size: int, minimum: int, script: list[tuple[int, int, str]]) -> None:
    epoch, used, held = Leases(size, minimum=minimum), [0] * size, {k: [] for k in range(3)}

    def finish(worker: int) -> None:
        lease = held[worker].pop(0)
        assert epoch.finish(worker, lease)
        assert not epoch.finish(worker, lease)
        for i in range(lease.start, lease.stop):
            used[i] += 1

    def take(worker: int, count: int) -> None:
        lease = epoch.take(worker, count)
        if lease is not None:
            assert lease.size >= min(minimum, size)
            held[worker].append(lease)

    for worker, count, what in script:
        if what == "take":
            take(worker, count)
        elif what == "die":
            assert epoch.give_back(worker) == sum(lease.size for lease in held[worker])
            held[worker].clear()
        elif held[worker]:
            finish(worker)
        offset, ahead = epoch.position
        done = sum(used)
        assert done == offset + sum(b - a for a, b in ahead) == size - epoch.free - epoch.lent
        assert used[:offset] == [1] * offset
    while not epoch.over:
        for worker in held:
            while held[worker]:
                finish(worker)
        take(0, 7)
    assert used == [1] * size
