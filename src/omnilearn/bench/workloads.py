"""What the benchmarks and the demo train: model, data, loss, global batch and optimizer under one name.

Data lie in memory and cost next to nothing to index, so that a benchmark times training and not loading. They
are the same in every process and can be learned, so that a falling loss means something. *heavy*, *even* and
*chatty* are the three regimes of balancing; *digits* is real data, *trees* suits CPUs as
well as cards; the others are the papers' models. Where
they run is left to the benchmarks; first weights come from torch's random state, which the caller seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from omnilearn.bench import models
from omnilearn.bench.names import ANY_IMAGE, Size
from omnilearn.errors import InfeasibleError, UsageError

POOL_BYTES = 256 * 2**20
"""At most this much generated data is held per process; a longer data set goes round it."""
PROCESS_BYTES = 400 * 2**20
"""What a process takes before it has a model: PyTorch."""


@dataclass(frozen=True)
class Workload:
    """One thing to train. Everything in it can be pickled."""

    name: str
    model: Callable[[], nn.Module]
    dataset: Callable[[int], Dataset]
    """A map-style data set of so many samples ``(x, y)``, the same whenever and wherever it is made."""
    loss: Callable[[Any, Any, Any], Tensor]
    """``loss(model, x, y)``: the mean over the samples of a batch."""
    global_batch: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    describe: str
    test: Callable[[], Pool] | None = None
    """Samples that are not trained on, where there are any."""

    def memory(self, models: int) -> int:
        """Bytes that a process with so many of the model takes at least: parameters, DDP's buckets and what the
        optimizer keeps of each, and the gradients of one. Activations come on top."""
        with torch.device("meta"):
            model = self.model()
        kept = 2 if isinstance(self.optimizer(model.parameters()), torch.optim.Adam) else 1
        return PROCESS_BYTES + ((2 + kept) * models + 1) * sum(p.nbytes for p in model.parameters())


def workload(name: str, size: str | Size = "small") -> Workload:
    """The workload of that name and size.

    >>> workload("heavy").global_batch, workload("heavy", Size(batch=96)).global_batch
    (192, 96)
    """
    if isinstance(size, Size):
        return _changed(workload(name, size.kind), size)
    if name not in _BUILDERS:
        raise InfeasibleError(f"unknown workload {name!r}; there are {', '.join(NAMES)}")
    if size not in ("small", "full"):
        raise InfeasibleError(f"unknown size {size!r} of workload {name}; there are small, full")
    return _BUILDERS[name](size == "full")


def _changed(what: Workload, size: Size) -> Workload:
    said = what.describe
    if size.batch is not None:
        rate = partial(_slower, what.optimizer, min(1.0, size.batch / what.global_batch))
        what = replace(what, global_batch=size.batch, optimizer=rate)
        said = re.sub(r"B = \d+", f"B = {size.batch}", said)
    if size.image is not None:
        if what.name not in ANY_IMAGE:
            raise InfeasibleError(f"{what.name} has no image size to choose: --image is for {', '.join(ANY_IMAGE)}")
        assert isinstance(what.dataset, partial)
        channels = what.dataset.keywords["shape"][0]
        shape = (channels, size.image, size.image)
        _check_image(what, shape)
        what = replace(what, dataset=partial(images, **{**what.dataset.keywords, "shape": shape}))
        said = re.sub(r"\d+×\d+×\d+", "×".join(map(str, shape)), said)
    if size.length is not None:
        if what.name != "gpt2":
            raise InfeasibleError(f"{what.name} has no sequence length to choose: --length is for gpt2")
        assert isinstance(what.dataset, partial)
        longest = what.dataset.keywords["context"]
        if size.length > longest:
            raise InfeasibleError(f"--length {size.length} is more than the model's context of {longest}")
        what = replace(what, dataset=partial(text, **{**what.dataset.keywords, "context": size.length}))
        said = said.replace(f", {longest} of", f", {size.length} of")
    if size.bf16:
        what, said = replace(what, loss=partial(_in_bf16, what.loss)), f"{said}, bfloat16"
    return replace(what, describe=said)


def _check_image(what: Workload, shape: tuple[int, ...]) -> None:
    """Refuse images of which nothing is left on the way through the model; computes shapes only."""
    with torch.device("meta"):
        model, image = what.model(), torch.empty(2, *shape)
    try:
        model(image)
    except RuntimeError as error:
        raise InfeasibleError(f"{what.name} needs larger images than --image {shape[-1]}") from error


# --- data ---------------------------------------------------------------------------------------------------


class Pool(Dataset):
    """``n`` samples out of a pool of tensors, which is gone round when ``n`` is larger."""

    def __init__(self, x: Tensor, y: Tensor, n: int) -> None:
        self.x, self.y, self.n = x, y, _positive(n)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self.n <= index < self.n:
            raise IndexError(f"sample {index} of a data set of {self.n}")
        at = index % self.n % len(self.x)
        return self.x[at], self.y[at]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """A batch at once, which torch's DataLoader asks for where it can."""
        at = torch.as_tensor(indices, dtype=torch.long)
        if len(at) and not (-self.n <= int(at.min()) and int(at.max()) < self.n):
            raise IndexError(f"samples {int(at.min())} to {int(at.max())} of a data set of {self.n}")
        at = at % self.n % len(self.x)
        return list(zip(self.x[at].unbind(), self.y[at].unbind(), strict=True))


def digits(train: bool, *, side: int = 8, channels: int = 1) -> Pool:
    """Scikit-learn's handwritten digits, 1×8×8 in [0, 1] or scaled up: 1437 to train on, or 360 others to test with."""
    x, y = _digits(train)
    if side != 8:
        x = F.interpolate(x, size=(side, side), mode="bilinear")
    return Pool(x.expand(-1, channels, -1, -1).contiguous(), y, len(x))


def images(n: int, *, shape: tuple[int, int, int], classes: int) -> Pool:
    """Noisy images of ``classes`` coarse coloured patterns: the pattern is the label."""
    channels, height, width = shape
    held = min(_positive(n), _pool_size(4 * math.prod(shape)))
    draw = torch.Generator().manual_seed(0)
    colours = torch.randn(classes, channels, 1, 1, generator=draw)
    patterns = colours + torch.randn(classes, channels, 4, 4, generator=draw)
    y = torch.randint(classes, (held,), generator=draw)
    x = torch.randn(held, channels, height, width, generator=draw)
    for part, labels in zip(x.split(64), y.split(64), strict=True):
        part.mul_(0.5).add_(F.interpolate(patterns[labels], size=(height, width)))
    return Pool(x, y, n)


def text(n: int, *, context: int, vocabulary: int) -> Pool:
    """Token sequences and the same one token on: t + 1 follows t three times in four."""
    held = min(_positive(n), _pool_size(8 * (context + 1)))
    draw = torch.Generator().manual_seed(0)
    fresh = (vocabulary * torch.rand(held, context + 1, generator=draw) ** 4).long().clamp_(max=vocabulary - 1)
    follows = torch.rand(held, context + 1, generator=draw) < 0.75
    for i in range(1, context + 1):
        fresh[:, i] = torch.where(follows[:, i], (fresh[:, i - 1] + 1) % vocabulary, fresh[:, i])
    return Pool(fresh[:, :-1], fresh[:, 1:], n)


def expressions(n: int, *, leaves: int) -> Pool:
    """Sums, differences and products of ``leaves`` digits in postfix notation, each of another shape: value mod 10."""
    length = 2 * leaves - 1
    held = min(_positive(n), _pool_size(8 * length))
    draw = torch.Generator().manual_seed(0)
    x, stack = torch.zeros(held, length, dtype=torch.long), torch.zeros(held, leaves + 1, dtype=torch.long)
    depth, pushed, rows = torch.zeros(held, dtype=torch.long), torch.zeros(held, dtype=torch.long), torch.arange(held)
    for i in range(length):
        join = (depth >= 2) & ((pushed == leaves) | (torch.rand(held, generator=draw) < 0.5))
        digit, kind = torch.randint(10, (held,), generator=draw), torch.randint(3, (held,), generator=draw)
        left, right = stack[rows, (depth - 2).clamp(min=0)], stack[rows, (depth - 1).clamp(min=0)]
        joined = torch.stack([left + right, left - right, left * right])[kind, rows] % 10
        x[:, i] = torch.where(join, 10 + kind, digit)
        stack[rows, torch.where(join, depth - 2, depth)] = torch.where(join, joined, digit)
        depth, pushed = depth + torch.where(join, -1, 1), pushed + (~join).long()
    return Pool(x, stack[:, 0].clone(), n)


def _digits(train: bool) -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the digits need scikit-learn: pip install -e '.[demo]' in a checkout of OmniLearn") from error
    raw = load_digits()
    x = torch.as_tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.as_tensor(raw.target, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut = len(x) * 4 // 5
    part = order[:cut] if train else order[cut:]
    return x[part], y[part]


def _some_digits(n: int, **size: int) -> Pool:
    held = digits(True, **size)
    return Pool(held.x, held.y, n)


def _positive(n: int) -> int:
    if n < 1:
        raise InfeasibleError(f"a data set needs at least one sample, got n = {n}")
    return n


def _pool_size(sample_bytes: int) -> int:
    return max(1, POOL_BYTES // sample_bytes)


# --- losses and optimizers ----------------------------------------------------------------------------------


def classification(model: Any, x: Any, y: Any) -> Tensor:
    """Cross-entropy, the mean over the samples."""
    return F.cross_entropy(model(x), y)


def next_token(model: Any, x: Any, y: Any) -> Tensor:
    """Cross-entropy, the mean over tokens; all samples have as many, so it is the mean over samples too."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _in_bf16(loss: Callable[[Any, Any, Any], Tensor], model: Any, x: Any, y: Any) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return loss(model, x, y)


def _sgd(lr: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return partial(torch.optim.SGD, lr=lr, momentum=0.9)


def _slower(
    build: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], factor: float, parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer with its learning rate scaled: a rate for a large batch makes a small one diverge."""
    optimizer = build(parameters)
    for group in optimizer.param_groups:
        group["lr"] *= factor
    return optimizer


def _adam(lr: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    return partial(torch.optim.Adam, lr=lr)


# --- the workloads ------------------------------------------------------------------------------------------


def _vision(
    name: str,
    model: Callable[[], nn.Module],
    shape: tuple[int, int, int],
    classes: int,
    batch: int,
    lr: float,
    why: str,
) -> Workload:
    return Workload(
        name=name,
        model=model,
        dataset=partial(images, shape=shape, classes=classes),
        loss=classification,
        global_batch=batch,
        optimizer=_sgd(lr),
        describe=f"{why}, {'×'.join(map(str, shape))}, B = {batch}",
    )


def _heavy(full: bool) -> Workload:
    # α is under 1% of β·B at one thread: even the slowest of HL8, a twelfth of the machine, earns its place.
    if full:
        model, shape, batch = partial(models.ConvNet, width=64, depth=6), (3, 64, 64), 512
    else:
        model, shape, batch = partial(models.ConvNet, width=32, depth=3), (3, 24, 24), 192
    return _vision(
        "heavy", model, shape, 10, batch, 0.02, "5×5 conv net, nearly all compute: everybody is worth having"
    )


def _even(full: bool) -> Workload:
    width, shape, batch = (64, (3, 64, 64), 256) if full else (32, (3, 32, 32), 64)
    model = partial(models.ConvNet, width=width, depth=2, kernel=3)
    return _vision("even", model, shape, 10, batch, 0.02, "3-layer conv net: who takes part hardly matters")


def _chatty(full: bool) -> Workload:
    side = 64 if full else 32
    model = partial(models.Mlp, width=side * side)
    why = f"MLP with {'67' if full else '4.2'}M parameters: communication costs most, parking is right"
    return _vision("chatty", model, (1, side, side), 10, 64, 0.02, why)


def _digits_workload(full: bool) -> Workload:
    size: dict[str, int] = {}
    model: Callable[[], nn.Module] = partial(models.Cnn, width=48)
    title, shape = "CNN of width 48", "1×8×8"
    if full:
        size = {"side": 32, "channels": 3}
        model = partial(models.resnet18, classes=10, width=0.25, small_images=True)
        title, shape = "ResNet-18 at 0.25 of its width", "scaled to 3×32×32"
    return Workload(
        name="digits",
        model=model,
        dataset=partial(_some_digits, **size),
        loss=classification,
        global_batch=128,
        optimizer=_adam(0.002),
        describe=f"{title} on scikit-learn's handwritten digits (real data), {shape}, B = 128",
        test=partial(digits, False, **size),
    )


def _published(
    name: str,
    build: Callable[..., nn.Module],
    title: str,
    width: float,
    small: int,
    large: int,
    lr: float,
    full: bool,
) -> Workload:
    """One of the papers' image models: as published at 224×224, or ``width`` times as wide at 32×32."""
    if full:
        return _vision(name, build, (3, 224, 224), 1000, large, lr, f"{title} as published")
    model = partial(build, classes=10, width=width, small_images=True)
    return _vision(name, model, (3, 32, 32), 10, small, lr, f"{title} at {width:g} of its width")


def _gpt2(full: bool) -> Workload:
    model: Callable[[], nn.Module]
    if full:
        context, vocabulary, batch, lr = 1024, 50257, 32, 3e-4
        model, title = models.Gpt2, "GPT-2 small as published"
    else:
        context, vocabulary, batch, lr = 64, 512, 32, 1e-3
        model = partial(models.Gpt2, layers=4, heads=4, width=128, context=context, vocabulary=vocabulary, dropout=0.0)
        title = "GPT-2 of 4 layers, 128 wide"
    return Workload(
        name="gpt2",
        model=model,
        dataset=partial(text, context=context, vocabulary=vocabulary),
        loss=next_token,
        global_batch=batch,
        optimizer=partial(torch.optim.AdamW, lr=lr),
        describe=f"{title}, {context} of {vocabulary} tokens, B = {batch}",
    )


def _trees(full: bool) -> Workload:
    width, leaves, batch = (192, 32, 64) if full else (128, 16, 64)
    return Workload(
        name="trees",
        model=partial(models.TreeNet, width=width),
        dataset=partial(expressions, leaves=leaves),
        loss=classification,
        global_batch=batch,
        optimizer=_sgd(0.02),
        describe=f"recursive net of width {width} on expressions of {leaves} digits, a tree per sample, B = {batch}",
    )


_BUILDERS: dict[str, Callable[[bool], Workload]] = {
    "heavy": _heavy,
    "even": _even,
    "chatty": _chatty,
    "digits": _digits_workload,
    "resnet18": partial(_published, "resnet18", models.resnet18, "ResNet-18", 0.25, 64, 512, 0.05),
    "resnet50": partial(_published, "resnet50", models.resnet50, "ResNet-50", 0.25, 32, 512, 0.05),
    "vgg11": partial(_published, "vgg11", models.Vgg11, "VGG-11", 0.25, 64, 256, 0.01),
    "alexnet": partial(_published, "alexnet", models.AlexNet, "AlexNet", 0.5, 64, 512, 0.01),
    "gpt2": _gpt2,
    "trees": _trees,
}

NAMES: tuple[str, ...] = tuple(_BUILDERS)
