"""The papers' models are the papers' models: published parameter counts, outputs of the right shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from omnilearn.bench import models
from omnilearn.errors import InfeasibleError


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (models.resnet18, 11_689_512),
        (models.resnet50, 25_557_032),
        (models.Vgg11, 132_863_336),
        (models.AlexNet, 61_100_840),
        (models.Gpt2, 124_439_808),
        (models.Mlp, 4_208_650),
        (models.ConvNet, 78_122),
        (lambda: models.ConvNet(depth=2, kernel=3), 19_722),
        (models.Cnn, 140_458),
    ],
)
def test_parameter_counts(build: Callable[[], Any], count: int) -> None:
    with torch.device("meta"):
        assert models.parameters(build()) == count


@pytest.mark.parametrize("build", [models.resnet18, models.resnet50, models.Vgg11, models.AlexNet])
def test_published_image_models_take_224(build: Callable[[], Any]) -> None:
    with torch.device("meta"):
        assert build()(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


@pytest.mark.parametrize("build", [models.resnet18, models.resnet50, models.Vgg11, models.AlexNet])
@pytest.mark.parametrize("width", [0.1, 0.25, 1.0])
def test_small_images_take_32(build: Callable[..., Any], width: float) -> None:
    with torch.device("meta"):
        model = build(classes=7, width=width, small_images=True)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(("name", "stride", "spatial"), [("resnet18", 32, 7), ("resnet50", 32, 7)])
def test_resnet_ends_at_a_32nd_of_the_image(name: str, stride: int, spatial: int) -> None:
    with torch.device("meta"):
        features = getattr(models, name)().features(torch.empty(1, 3, stride * spatial, stride * spatial))
    assert features.shape[2:] == (spatial, spatial)


def test_a_width_that_is_no_size_is_refused() -> None:
    for width in (0.0, -1.0, float("nan")):
        with pytest.raises(InfeasibleError, match="width"):
            models.resnet18(width=width)


def _gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    return models.Gpt2(**{"layers": 2, "heads": 2, "width": 16, "context": 12, "vocabulary": 20, **options}).eval()


def test_gpt2_never_looks_ahead() -> None:
    model, tokens = _gpt2(), torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 19
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert before.shape == (1, 8, 20)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt2_starts_at_chance_and_is_tied() -> None:
    model = _gpt2()
    with torch.no_grad():
        assert model(torch.zeros(1, 4, dtype=torch.long)).softmax(-1).max() < 0.1
    assert not [name for name, _ in model.named_parameters() if "head" in name]


def test_gpt2_dropout_only_while_training() -> None:
    model, tokens = _gpt2(dropout=0.5), torch.arange(8).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens))
        model.train()
        assert not torch.allclose(model(tokens), model(tokens))


def test_gpt2_refuses_what_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="context of 12"):
        _gpt2()(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(InfeasibleError, match="multiple of heads"):
        _gpt2(heads=3)
