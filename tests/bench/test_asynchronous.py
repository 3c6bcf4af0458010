"""What ``bench async`` makes of its runs, and what it trains."""

from __future__ import annotations

import argparse

import pytest

from omnilearn.bench.asynchronous import History, add_arguments, size_for
from omnilearn.bench.workloads import workload


def test_accuracy_is_over_the_second_half_of_the_time_that_all_had() -> None:
    history = History(points=[(1.0, 0.5), (2.0, 0.9), (4.0, 0.9)])
    assert history.accuracy_within(2.0) == pytest.approx(0.7), "the time before and after does not count"
    assert history.accuracy_within(4.0) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("line", "side"), [((), 16), (("--image", "20"), 20), (("--size", "full"), 64), (("--batch", "96"), 16)]
)
def test_heavy_has_small_images_unless_told(line: tuple[str, ...], side: int) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    what = workload("heavy", size_for("heavy", parser.parse_args(line)))
    assert what.dataset(1)[0][0].shape == (3, side, side)
    assert what.global_batch == (96 if line[:1] == ("--batch",) else 512 if "full" in line else 192)
