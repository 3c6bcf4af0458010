"""``omni.fit``: what Keras users know, on several workers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.tensorflow.gang import Gang
from tests.tensorflow.test_sync import same


def test_fit_honours_metrics_and_callbacks(workers: Gang, tmp_path: Path) -> None:
    results = workers.run("fitted", str(tmp_path), 5, False)
    for result in results:
        assert result["history"] == results[0]["history"]
        assert same(result["weights"], results[0]["weights"])
        assert set(result["history"]) >= {"loss", "accuracy", "val_loss", "val_accuracy"}
        assert len(result["history"]["loss"]) == 5
        assert result["history"]["loss"][-1] < result["history"]["loss"][0]
        # What our evaluation adds up over the workers is what Keras computes alone.
        assert result["ours"] == pytest.approx(result["plain"], rel=1e-5)
        assert result["history"]["val_loss"][-1] == pytest.approx(result["plain"]["loss"], rel=1e-5)
        assert result["lr"] < 0.5  # ReduceLROnPlateau, which never sees enough progress
    written = results[0]["files"]
    assert "0/best.weights.h5" in written
    assert "0.csv" in written
    assert find_spec("tensorboard") is None or any(path.startswith("board-0/train/") for path in written)
    assert not [path for path in written if path.startswith(("1", "2", "board-1", "board-2"))]


@pytest.mark.parametrize("kind", ["arrays", "sample weights", "tf.data", "pydataset"])
def test_fit_does_what_keras_does_alone(workers: Gang, kind: str) -> None:
    for result in workers.run("like_keras", kind):
        assert result["apart"] < 1e-2  # float32: near zero, rounding shows
        assert set(result["ours"]) == set(result["theirs"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
        for name, values in result["ours"].items():
            assert values == pytest.approx(result["theirs"][name], rel=1e-4)


def test_rank_0_draws_the_familiar_bar(workers: Gang) -> None:
    first, *others = workers.run("bar")
    assert "Epoch 1/2" in first
    assert "5/5" in first
    assert "━" in first
    assert others == ["", ""]


def test_early_stopping_stops_all(workers: Gang, tmp_path: Path) -> None:
    for result in workers.run("fitted", str(tmp_path), 4, True):
        assert len(result["history"]["loss"]) == 2
        assert [epoch for epoch, _ in result["seen"]] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("not compiled", "compile"),
        ("own step", "train_step of its own"),
        ("sum", "reduction='sum'"),
        ("backup", "omni.save"),
    ],
)
def test_what_fit_cannot_do_is_refused(workers: Gang, kind: str, words: str) -> None:
    for message in workers.run("refused_fit", kind):
        assert words in message
