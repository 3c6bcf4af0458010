"""Names that are known without a framework are those of the workloads."""

from __future__ import annotations

import pytest

from omnilearn import cli
from omnilearn.bench import names, tf_workloads


def test_names_are_those_of_the_workloads() -> None:
    assert tuple(tf_workloads._BUILDERS) == names.TF_NAMES
    assert names.NAMES == pytest.importorskip("omnilearn.bench.workloads").NAMES


@pytest.mark.parametrize("name", names.TF_NAMES)
def test_data_are_the_same_everywhere(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    (x, y), (again, _) = tf_workloads.workload(name).data(24), tf_workloads.workload(name).data(24)
    assert x.shape[0] == y.shape[0] == 24
    assert (x == again).all()


@pytest.mark.parametrize("bench", ["sync", "dynamic", "network", "async", "memory", "overhead"])
@pytest.mark.parametrize(
    ("model", "side", "message"),
    [
        ("gpt2", "64", "gpt2 has no image size to choose"),
        ("alexnet", "16", "alexnet needs larger images than --image 16"),
    ],
)
def test_a_size_that_a_workload_cannot_have_is_refused_before_anything_starts(
    bench: str,
    model: str,
    side: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("omnilearn.bench.gang.Gang.__enter__", lambda self: pytest.fail("workers were started"))
    assert cli.main(["bench", bench, "--model", f"resnet18,{model}", "--image", side]) == 2
    assert message in capsys.readouterr().err
