"""The cut of an epoch: exactly once under any plans, alike on all ranks, minimums kept where possible."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnilearn.data import Sampler, Share
from omnilearn.errors import InfeasibleError, UsageError


@dataclass(frozen=True)
class Cluster:
    """Minimums, and batches that respect them."""

    minimums: tuple[int, ...]
    batches: tuple[int, ...]

    @property
    def needs(self) -> int:
        return sum(low for low, batch in zip(self.minimums, self.batches, strict=True) if batch)


@st.composite
def plans(draw: st.DrawFn, minimums: Sequence[int], total: int | None = None) -> tuple[int, ...]:
    """Batches at or above the minimums, some parked; they add up to ``total`` where it is given."""
    active = draw(st.lists(st.booleans(), min_size=len(minimums), max_size=len(minimums)))
    active[draw(st.integers(0, len(minimums) - 1))] = True
    batches = [(low + draw(st.integers(0, 9))) if on else 0 for low, on in zip(minimums, active, strict=True)]
    if total is not None:
        batches = [low if on else 0 for low, on in zip(minimums, active, strict=True)]
        on = [k for k, batch in enumerate(batches) if batch]
        for k in on:
            batches[k] += draw(st.integers(0, total - sum(batches)))
        batches[on[-1]] += total - sum(batches)
    return tuple(batches)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    minimums = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    return Cluster(minimums, draw(plans(minimums)))


def epoch_of(sampler: Sampler, ranks: int) -> list[list[Share]]:
    """The rest of the epoch: for each step the shares of all ranks, checked and consumed."""
    steps = []
    for shares in zip(*(sampler.shares(rank) for rank in range(ranks)), strict=True):
        check_step(shares)
        sampler.consumed(shares[0])
        steps.append(list(shares))
    return steps


def check_step(shares: Sequence[Share]) -> None:
    """All ranks see one step alike, and each has as many samples as the step says."""
    assert len({(s.step, s.epoch, s.start, s.sizes, s.end) for s in shares}) == 1
    sizes = shares[0].sizes + (0,) * (len(shares) - len(shares[0].sizes))
    assert tuple(share.indices.size for share in shares) == sizes
    assert shares[0].total == sum(sizes) > 0


def indices(steps: Sequence[Sequence[Share]]) -> list[int]:
    return [int(i) for shares in steps for share in shares for i in share.indices]


def sizes(sampler: Sampler) -> list[tuple[int, ...]]:
    return [share.sizes for share in sampler.shares(0)]


# Exactly once


@given(data=st.data(), size=st.integers(1, 120), shuffle=st.booleans())
@settings(deadline=None, max_examples=100)
def test_exactly_once_under_any_plans_and_prefetching(data: st.DataObject, size: int, shuffle: bool) -> None:
    """Two epochs; each rank prefetches to its own depth; plans of any total come at any step still free."""
    cluster = data.draw(clusters())
    workers = len(cluster.minimums)
    assume(size >= max(cluster.minimums))
    sampler = Sampler(size, cluster.batches, minimum=cluster.minimums, shuffle=shuffle, seed=size)
    for epoch in range(2):
        iterators = [sampler.shares(rank) for rank in range(workers)]
        seen: list[list[Share]] = [[] for _ in range(workers)]
        done = [False] * workers
        consumed = 0
        while not all(done):
            rank = data.draw(st.sampled_from([k for k in range(workers) if not done[k]]))
            for _ in range(data.draw(st.integers(1, 4))):
                share = next(iterators[rank], None)
                if share is None:
                    done[rank] = True
                    break
                batches = sampler.batches_at(share.step)
                assert share.total <= sum(batches)
                assert share.sizes == batches or share.end == size
                seen[rank].append(share)
            while consumed < min(map(len, seen)):
                sampler.consumed(seen[0][consumed])
                consumed += 1
            if data.draw(st.booleans()):
                ahead = sampler.step - consumed + max(map(len, seen))
                batches = data.draw(plans(cluster.minimums))
                at = ahead + data.draw(st.integers(0, 3))
                sampler.schedule(batches, at)
                assert sampler.batches_at(at) == batches
        steps = list(zip(*seen, strict=True))
        for shares in steps:
            check_step(shares)
        found = indices(steps)
        assert sorted(found) == list(range(size))
        assert shuffle or found == sorted(found)
        assert {share.epoch for shares in steps for share in shares} == {epoch}
        assert sampler.offset == size
        sampler.next_epoch()


@given(data=st.data(), size=st.integers(1, 100))
@settings(deadline=None, max_examples=100)
def test_exactly_once_over_save_and_restore_onto_another_cluster(data: st.DataObject, size: int) -> None:
    """Stop after any step, some prefetched and lost; go on with other workers and another global batch."""
    before, after = data.draw(clusters()), data.draw(st.none() | clusters())
    after = after or before
    assume(size >= max(before.minimums + after.minimums))
    sampler = Sampler(size, before.batches, minimum=before.minimums, seed=3)
    sampler.next_epoch()
    stop = data.draw(st.integers(0, sampler.steps))
    iterators = [sampler.shares(rank) for rank in range(len(before.minimums))]
    first = [[next(iterator) for iterator in iterators] for _ in range(stop)]
    for shares in first:
        check_step(shares)
        sampler.consumed(shares[-1])
    for _ in range(data.draw(st.integers(0, 3))):
        next(iterators[0], None)
    state = sampler.state_dict()
    assert state["offset"] == len(indices(first))

    restored = Sampler(size, after.batches, minimum=after.minimums, seed=3)
    restored.load_state_dict(state)
    assert (restored.epoch, restored.step, restored.offset) == (1, stop, state["offset"])
    expected = restored.remaining_steps
    second = epoch_of(restored, len(after.minimums))
    assert sorted(indices(first) + indices(second)) == list(range(size))
    assert len(second) == expected
    assert [shares[0].step for shares in first + second] == list(range(stop + len(second)))
    restored.next_epoch()
    assert sorted(indices(epoch_of(restored, len(after.minimums)))) == list(range(size))


def test_another_order_each_epoch_and_the_same_in_each_run() -> None:
    def run(seed: int) -> list[list[int]]:
        sampler, epochs = Sampler(50, [4, 6], seed=seed), []
        for _ in range(2):
            epochs.append(indices(epoch_of(sampler, 2)))
            sampler.next_epoch()
        return epochs

    first, second = run(0)
    assert first != second
    assert run(0) == [first, second]
    assert run(1)[0] not in (first, second)


# The tail


@given(cluster=clusters(), size=st.integers(1, 200))
@settings(deadline=None, max_examples=200)
def test_the_last_step_is_what_is_left_and_those_who_take_part_stay(cluster: Cluster, size: int) -> None:
    total = sum(cluster.batches)
    sampler = Sampler(size, cluster.batches, minimum=cluster.minimums)
    active = tuple(k for k, batch in enumerate(cluster.batches) if batch)
    steps = list(zip(*(sampler.shares(rank) for rank in range(len(cluster.batches))), strict=True))
    assert len(steps) == sampler.steps == -(-size // total)
    assert [shares[0].total for shares in steps] == [total] * (size // total) + [size % total] * (size % total > 0)
    for shares in steps:
        sizes = shares[0].sizes
        assert all(share.active == active for share in shares)
        assert sizes == cluster.batches or sum(sizes) == size % total
        for rank, (got, batch, low) in enumerate(zip(sizes, cluster.batches, cluster.minimums, strict=True)):
            assert got == 0 or batch
            assert got == 0 or got >= low or sum(sizes) < min(cluster.minimums[k] for k in active)
            # Who has none of its own computes samples of this step, which do not count.
            assert len(shares[rank].lent) == (batch > 0 and got == 0)
            assert set(shares[rank].lent.tolist()) <= set(indices([shares]))
        if sum(sizes) >= cluster.needs:
            assert all(sizes[k] >= cluster.minimums[k] for k in active)


@given(data=st.data(), size=st.integers(1, 200), batch=st.integers(1, 40), last=st.sampled_from(["keep", "merge"]))
@settings(deadline=None, max_examples=200)
def test_global_batches_do_not_depend_on_the_workers(data: st.DataObject, size: int, batch: int, last: str) -> None:
    """The same samples in the same steps, for one worker and for several whose plans change."""
    workers = data.draw(st.integers(2, min(batch, 5) if batch > 1 else 2))

    def any_plan() -> tuple[int, ...]:
        return data.draw(plans([1] * workers, batch)) if workers <= batch else (batch,) + (0,) * (workers - 1)

    one = Sampler(size, [batch], seed=3, last=last)
    several = Sampler(size, any_plan(), seed=3, last=last)
    for alone, *shares in zip(one.shares(0), *(several.shares(rank) for rank in range(workers)), strict=True):
        assert alone.indices.tolist() == indices([shares])
        if data.draw(st.booleans()):
            several.schedule(any_plan(), at=alone.step + 1)


@pytest.mark.parametrize(
    ("size", "batches", "minimum", "expected"),
    [
        (12, (6, 2), 1, [(6, 2), (3, 1)]),  # the rest in proportion
        (13, (6, 2), 1, [(6, 2), (4, 1)]),
        (10, (6, 2), 2, [(6, 2), (2, 0)]),  # 2 left for two workers that need 2 each: one has them
        (12, (6, 2), 2, [(6, 2), (2, 2)]),
        (17, (8, 0), 4, [(8, 0), (8, 0), (1, 0)]),  # fewer than the minimum: a bound of shares, not of what can be done
        (5, (4, 4), 3, [(5, 0)]),  # an epoch of one step too small for both
        (3, (4, 6), 3, [(0, 3)]),  # the largest batch goes first
        (9, (4, 9, 6), (4, 9, 6), [(0, 9, 0)]),  # as many as fit, largest first
        (12, (4, 9, 6), (4, 9, 6), [(0, 12, 0)]),
        (13, (4, 9, 6), (4, 9, 6), [(4, 9, 0)]),
        (31, (10, 10, 10), 1, [(10, 10, 10), (1, 0, 0)]),
        (1, (2, 2), 1, [(1, 0)]),
    ],
)
def test_tail(
    size: int, batches: tuple[int, ...], minimum: int | tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    sampler = Sampler(size, batches, minimum=minimum)
    assert sizes(sampler) == expected
    assert sorted(indices(epoch_of(sampler, len(batches)))) == list(range(size))


def test_the_rest_may_be_merged_with_the_step_before() -> None:
    sampler = Sampler(31, (6, 2, 2), last="merge")
    assert sampler.steps == 3
    assert sizes(sampler) == [(6, 2, 2), (6, 2, 2), (7, 2, 2)]
    assert sorted(indices(epoch_of(sampler, 3))) == list(range(31))
    assert sizes(Sampler(7, (6, 2, 2), last="merge")) == [(4, 2, 1)], "an epoch that is smaller than a step"
    assert sizes(Sampler(20, (6, 2, 2), last="merge")) == [(6, 2, 2)] * 2


def test_a_last_step_too_small_for_the_model_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"31 samples, the last step of an epoch has 1 sample.*fewer than 2.*merge"
    ):
        Sampler(31, (6, 4), smallest=2)
    assert Sampler(31, (6, 4), smallest=2, last="merge").steps == 3
    assert Sampler(31, (6, 4), smallest=2, last="drop").steps == 3
    other = Sampler(31, (6, 3), smallest=2, seed=5)
    with pytest.raises(InfeasibleError, match="with 10 samples, the last step"):
        Sampler(31, (6, 3), smallest=2, seed=5).load_state_dict(other.state_dict() | {"offset": 21, "step": 2})
    with pytest.raises(InfeasibleError, match="last must be one of 'keep', 'merge', 'drop', got 'wrap'"):
        Sampler(31, (6, 4), last="wrap")


def test_a_restore_onto_a_bigger_world_in_the_last_step_lets_some_have_none() -> None:
    small = Sampler(20, [8, 8], minimum=2)
    small.consumed(next(small.shares(0)))
    big = Sampler(20, [4] * 8, minimum=3)
    big.load_state_dict(small.state_dict())
    assert sizes(big) == [(4, 0, 0, 0, 0, 0, 0, 0)]
    assert sorted(indices([[next(small.shares(rank)) for rank in range(2)]])) == sorted(indices(epoch_of(big, 8)))


def test_a_rest_below_every_minimum_goes_to_the_active_worker_that_misses_its_own_by_least() -> None:
    sampler = Sampler(20, [12, 8, 0], minimum=[6, 4, 1])
    sampler.load_state_dict(sampler.state_dict() | {"offset": 17})
    assert sizes(sampler) == [(0, 3, 0)]


@given(cluster=clusters(), size=st.integers(1, 200))
def test_drop_last_leaves_out_the_incomplete_step(cluster: Cluster, size: int) -> None:
    total = sum(cluster.batches)
    assume(size >= total)
    sampler = Sampler(size, cluster.batches, minimum=cluster.minimums, last="drop")
    assert sampler.steps == sampler.remaining_steps == size // total
    steps = epoch_of(sampler, len(cluster.batches))
    assert [shares[0].sizes for shares in steps] == [cluster.batches] * (size // total)
    found = indices(steps)
    assert len(set(found)) == len(found) == size // total * total
    assert sampler.remaining_steps == 0


# Plans


def test_a_plan_holds_from_its_step_on_also_behind_what_was_prefetched() -> None:
    sampler = Sampler(1000, [10, 10])
    shares = sampler.shares(0)
    prefetched = [next(shares) for _ in range(3)]
    sampler.schedule([5, 15], at=5)
    sampler.schedule([20, 0], at=3)
    sampler.schedule([1, 19], at=5)  # the later call wins
    assert [s.sizes for s in prefetched] == [(10, 10)] * 3
    assert [next(shares).sizes for _ in range(4)] == [(20, 0), (20, 0), (1, 19), (1, 19)]
    assert [sampler.batches_at(step) for step in (2, 3, 5, 99)] == [(10, 10), (20, 0), (1, 19), (1, 19)]


def test_a_parked_rank_still_counts_steps() -> None:
    shares = list(Sampler(30, [10, 0]).shares(1))
    assert [(s.step, s.sizes, s.indices.size) for s in shares] == [(k, (10, 0), 0) for k in range(3)]


def test_a_plan_for_a_step_handed_out_is_refused() -> None:
    sampler = Sampler(1000, [10, 10])
    shares = sampler.shares(1)
    for _ in range(3):
        next(shares)
    with pytest.raises(UsageError, match=r"step 2 .*before 3 .*step 3 or later"):
        sampler.schedule([5, 15], at=2)
    sampler.schedule([5, 15], at=3)
    assert next(shares).sizes == (5, 15)


def test_the_world_may_grow_and_shrink() -> None:
    sampler = Sampler(100, [10, 10], minimum=[2, 2])
    with pytest.raises(InfeasibleError, match="2 values for 3 workers"):
        sampler.schedule([10, 10, 10], at=1)
    sampler.schedule([10, 10, 10], at=1, minimum=[2, 2, 3])
    sampler.schedule([12, 10, 8], at=2)  # the minimum given last holds
    sampler.schedule([15], at=3, minimum=1)
    steps = epoch_of(sampler, 3)
    assert [s[0].sizes for s in steps] == [(10, 10), (10, 10, 10), (12, 10, 8), (15,), (5,)]
    assert sorted(indices(steps)) == list(range(100))
    with pytest.raises(UsageError, match=r"rank 1 .* 1 workers"):
        Sampler(100, [10]).shares(1)


def test_old_plans_are_forgotten() -> None:
    sampler = Sampler(100_000, [1, 1])
    for share in sampler.shares(0):
        sampler.consumed(share)
        sampler.schedule([1, 1], at=share.step + 2)
        if share.step == 100:
            break
    assert len(sampler._plans) <= 3
    with pytest.raises(UsageError, match=r"step 5 .* step 101"):
        sampler.batches_at(5)


# The position


def test_position_moves_with_what_is_consumed_not_with_what_is_prefetched() -> None:
    sampler = Sampler(25, [6, 4])
    shares = sampler.shares(0)
    first, second = next(shares), next(shares)
    assert (sampler.epoch, sampler.offset, sampler.step, sampler.remaining_steps) == (0, 0, 0, 3)
    sampler.consumed(first)
    assert (sampler.epoch, sampler.offset, sampler.step, sampler.remaining_steps) == (0, 10, 1, 2)
    sampler.consumed(second)
    sampler.consumed(first)  # behind the position: changes nothing
    assert (sampler.offset, sampler.step) == (20, 2)
    assert [share.start for share in sampler.shares(1)] == [20]
    sampler.next_epoch()
    assert (sampler.epoch, sampler.offset, sampler.step, sampler.remaining_steps) == (1, 0, 2, 3)
    assert [(share.epoch, share.step) for share in sampler.shares(1)] == [(1, 2), (1, 3), (1, 4)]
    with pytest.raises(UsageError, match=r"step 1 is of epoch 0.* epoch 1"):
        sampler.consumed(second)


def test_an_iterator_does_not_outlive_a_jump_of_the_position() -> None:
    sampler = Sampler(25, [6, 4], last="drop")
    shares, to_the_end = sampler.shares(0), sampler.shares(1)
    next(shares)
    for _ in range(2):
        sampler.consumed(next(to_the_end))
    sampler.next_epoch()
    assert next(to_the_end, None) is None
    with pytest.raises(UsageError, match=r"epoch 1, step 2 .* epoch 0 .* step 1"):
        next(shares)


def test_an_epoch_left_in_the_middle_frees_the_steps_prefetched() -> None:
    sampler = Sampler(1000, [10])
    shares = sampler.shares(0)
    first = next(shares)
    for _ in range(5):
        next(shares)
    sampler.consumed(first)
    sampler.next_epoch()
    sampler.schedule([20], at=1)
    assert next(sampler.shares(0)).sizes == (20,)


def test_state_is_plain_and_restores_in_place() -> None:
    sampler = Sampler(100, [10], seed=4)
    sampler.schedule([20], at=2)
    for share in sampler.shares(0):
        sampler.consumed(share)
        if share.step == 2:
            break
    state = sampler.state_dict()
    assert state == {
        "version": 1,
        "size": 100,
        "seed": 4,
        "shuffle": True,
        "epoch": 0,
        "offset": 40,
        "step": 3,
    }
    assert {type(value) for value in state.values()} <= {int, bool}
    rest = indices([list(sampler.shares(0))])
    assert [share.total for share in sampler.shares(0)] == [20, 20, 20]
    sampler.next_epoch()
    sampler.schedule([30], at=50)
    sampler.load_state_dict(state)
    assert indices([list(sampler.shares(0))]) == rest
    assert sampler.batches_at(50) == (20,)
    copy = pickle.loads(pickle.dumps(sampler))
    assert indices([list(copy.shares(0))]) == rest


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Sampler(99, [10], seed=4), "size 100, this sampler has size 99"),
        (Sampler(100, [10], seed=5), "seed 4, this sampler has seed 5"),
        (Sampler(100, [10], seed=4, shuffle=False), "shuffle True, this sampler has shuffle False"),
    ],
)
def test_a_position_in_another_order_is_refused(other: Sampler, match: str) -> None:
    state = Sampler(100, [10], seed=4).state_dict()
    with pytest.raises(UsageError, match=match):
        other.load_state_dict(state)


def test_a_broken_state_is_refused() -> None:
    sampler = Sampler(100, [10])
    state = sampler.state_dict()
    with pytest.raises(UsageError, match="lacks epoch, seed"):
        sampler.load_state_dict({key: state[key] for key in state if key not in ("epoch", "seed")})
    with pytest.raises(UsageError, match="version 2, this sampler has version 1"):
        sampler.load_state_dict(state | {"version": 2})
    with pytest.raises(UsageError, match="offset 101"):
        sampler.load_state_dict(state | {"offset": 101})


# Errors and cost


@pytest.mark.parametrize(
    ("size", "batches", "options", "match"),
    [
        (0, [1], {}, "0 samples"),
        (5, [1], {"seed": -1}, "got -1"),
        (5, [], {}, "no active worker among 0"),
        (5, [0, 0], {}, "no active worker among 2"),
        (5, [3, -2], {}, "worker 1: batch -2"),
        (5, [3, 2], {"minimum": [1, 0]}, "worker 1: .* minimum 0"),
        (5, [3, 2], {"minimum": 3}, "worker 1: batch 2 is below its minimum 3"),
        (5, [3, 2], {"minimum": [1]}, "1 values for 2 workers"),
        (5, [3, 3], {"last": "drop"}, "5 samples, the global batch is 6"),
    ],
)
def test_what_cannot_work_is_refused(size: int, batches: list[int], options: dict, match: str) -> None:
    with pytest.raises(InfeasibleError, match=match):
        Sampler(size, batches, **options)


def test_a_plan_that_cannot_work_is_refused_and_changes_nothing() -> None:
    sampler = Sampler(10, [5, 5], minimum=2, last="drop")
    for batches in ([10, 1], [-1, 11], [0, 0], [9, 1]):
        with pytest.raises(InfeasibleError):
            sampler.schedule(batches, at=0)
    assert sizes(sampler) == [(5, 5)]


def test_memory_and_work_do_not_grow_with_the_dataset() -> None:
    tracemalloc.start()
    try:
        sampler = Sampler(100_000_000, [2048, 1024, 512, 512])
        assert sampler.steps == 24415
        sampler.load_state_dict(sampler.state_dict() | {"offset": 99_995_000, "step": 24413})
        shares = list(sampler.shares(0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [share.total for share in shares] == [4096, 904]
    assert peak < 2_000_000
