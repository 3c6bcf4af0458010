"""The models the benchmarks train, in plain torch: the papers' five as published, and four small ones.

At their default sizes the five have the published architectures and parameter counts (VGG without batch norm,
AlexNet of "One weird trick", GPT-2 small with a tied head). ``width`` scales the channels, ``small_images``
fits the first layers to 32×32. Weights come from torch's random state: whoever wants the same ones twice
seeds it. Data, losses and optimizers are left to the workloads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omnilearn.errors import InfeasibleError


def _channels(base: int, width: float) -> int:
    """``base`` channels times ``width``, in eights (vector units like that), never below eight."""
    if not (math.isfinite(width) and width > 0):
        raise InfeasibleError(f"width must be a positive number, got {width}; 1.0 is the published size")
    return base if width == 1 else max(8, 8 * round(base * width / 8))


def _kaiming(model: nn.Module) -> None:
    """He initialisation of the convolutions: with torch's default, signals fade without batch norm."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


# --- ResNet (He et al. 2015), stride in the 3×3 convolution of a bottleneck ---------------------------------


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class _Residual(nn.Module):
    """``relu(body(x) + shortcut(x))``, the shortcut a 1×1 convolution where the shape changes."""

    def __init__(self, body: list[nn.Module], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_bn(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _basic(inputs: int, planes: int, stride: int) -> _Residual:
    body = [*_conv_bn(inputs, planes, 3, stride), nn.ReLU(inplace=True), *_conv_bn(planes, planes, 3)]
    return _Residual(body, inputs, planes, stride)


def _bottleneck(inputs: int, planes: int, stride: int) -> _Residual:
    body = [
        *_conv_bn(inputs, planes, 1),
        nn.ReLU(inplace=True),
        *_conv_bn(planes, planes, 3, stride),
        nn.ReLU(inplace=True),
        *_conv_bn(planes, 4 * planes, 1),
    ]
    return _Residual(body, inputs, 4 * planes, stride)


class ResNet(nn.Module):
    """A residual network of four stages. ``small_images``: a 3×3 stem without max-pool, for 32×32."""

    def __init__(
        self,
        depths: tuple[int, int, int, int],
        *,
        bottleneck: bool,
        classes: int,
        width: float,
        small_images: bool,
    ) -> None:
        super().__init__()
        channels = _channels(64, width)
        if small_images:
            stem = [*_conv_bn(3, channels, 3), nn.ReLU(inplace=True)]
        else:
            stem = [*_conv_bn(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        block, growth = (_bottleneck, 4) if bottleneck else (_basic, 1)
        blocks: list[nn.Module] = []
        inputs = channels
        for stage, depth in enumerate(depths):
            planes = channels * 2**stage
            for i in range(depth):
                blocks.append(block(inputs, planes, 2 if stage > 0 and i == 0 else 1))
                inputs = planes * growth
        self.features = nn.Sequential(*stem, *blocks)
        self.classifier = nn.Linear(inputs, classes)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.features(x).mean(dim=(2, 3))
        if pooled.dtype == self.classifier.weight.dtype:
            return self.classifier(pooled)
        # Autocast, but not here: on a part of a card (MPS), cuBLAS was seen to make NaN of this in bfloat16.
        with torch.autocast(x.device.type, enabled=False):
            return self.classifier(pooled.float())


def resnet18(*, classes: int = 1000, width: float = 1.0, small_images: bool = False) -> ResNet:
    """ResNet-18: 11,689,512 parameters at full size."""
    return ResNet((2, 2, 2, 2), bottleneck=False, classes=classes, width=width, small_images=small_images)


def resnet50(*, classes: int = 1000, width: float = 1.0, small_images: bool = False) -> ResNet:
    """ResNet-50: 25,557,032 parameters at full size."""
    return ResNet((3, 4, 6, 3), bottleneck=True, classes=classes, width=width, small_images=small_images)


# --- VGG-11 (Simonyan and Zisserman 2014) and AlexNet (Krizhevsky 2012, 2014) -------------------------------


class Vgg11(nn.Module):
    """VGG-11, configuration A: 132,863,336 parameters at full size, nine tenths of them in the classifier.

    ``small_images``: features of 32×32 end as 1×1, so the classifier starts from 1×1 and not from 7×7.
    """

    def __init__(
        self, *, classes: int = 1000, width: float = 1.0, small_images: bool = False, dropout: float = 0.5
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for base in stage:
                outputs = _channels(base, width)
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        side, hidden = (1 if small_images else 7), _channels(4096, width)
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(side))
        self.classifier = nn.Sequential(
            nn.Linear(inputs * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class AlexNet(nn.Module):
    """AlexNet in its one-tower form: 61,100,840 parameters at full size.

    ``small_images``: a 3×3 stem of stride 2, not 11×11 of stride 4, and a classifier that starts from 1×1.
    """

    def __init__(
        self, *, classes: int = 1000, width: float = 1.0, small_images: bool = False, dropout: float = 0.5
    ) -> None:
        super().__init__()
        a, b, c, d = (_channels(base, width) for base in (64, 192, 384, 256))
        stem = nn.Conv2d(3, a, 3, 2, padding=1) if small_images else nn.Conv2d(3, a, 11, 4, padding=2)
        side, hidden = (1 if small_images else 6), _channels(4096, width)
        self.features = nn.Sequential(
            stem,
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(c, d, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(d, d, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2),
            nn.AdaptiveAvgPool2d(side),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(d * side * side, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


# --- GPT-2 (Radford et al. 2019) ----------------------------------------------------------------------------


class _Block(nn.Module):
    """Attention and a four times wider MLP, each behind a layer norm and added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).reshape(n, length, width)))
        return x + self._drop(self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)), approximate="tanh")))


class Gpt2(nn.Module):
    """GPT-2: tokens ``[n, length]`` to logits ``[n, length, vocabulary]``. Small, 124,439,808, by default."""

    def __init__(
        self,
        *,
        layers: int = 12,
        heads: int = 12,
        width: int = 768,
        context: int = 1024,
        vocabulary: int = 50257,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % heads:
            raise InfeasibleError(f"width must be a multiple of heads, got width {width} and heads {heads}")
        self.context, self.dropout = context, dropout
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The paper's section 2.3: what adds to the stream starts smaller, by the number of additions.
                residual = name.endswith("_out.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise InfeasibleError(f"{length} tokens do not fit a context of {self.context}; build a larger one")
        x = self.tokens(tokens) + self.positions.weight[:length]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        # The head is tied to the embedding, as published.
        return F.linear(self.norm(x), self.tokens.weight)


# --- small ones ---------------------------------------------------------------------------------------------


class Cnn(nn.Module):
    """The demo's model, for 8×8 digits: three convolutions and a linear layer, 140k parameters."""

    def __init__(self, *, classes: int = 10, width: int = 48) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.classifier = nn.Linear(2 * width * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class ConvNet(nn.Module):
    """A stem and ``depth`` equal convolutions at full resolution: few parameters, much arithmetic per sample.

    A large ``kernel`` with few channels does more arithmetic per byte than the reverse, so that step time
    stays nearly a straight line in the batch size.
    """

    def __init__(self, *, classes: int = 10, width: int = 32, depth: int = 3, kernel: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, kernel, padding=kernel // 2), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(width, classes)
        _kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


class Mlp(nn.Module):
    """Square linear layers, 4.2M parameters by default: gradients are large, the work per sample is small."""

    def __init__(self, *, classes: int = 10, width: int = 1024, depth: int = 4) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TreeNet(nn.Module):
    """A recursive network over expressions in postfix notation, tokens ``[n, length]``: 0–9 push, 10–12 join two.

    Every sample has a tree of its own, so that nothing can be computed for several at once: hundreds of tiny
    operations per sample, whose launching takes as long on a large card as computing them does on a CPU.
    """

    def __init__(self, *, classes: int = 10, width: int = 128) -> None:
        super().__init__()
        self.leaves = nn.Embedding(10, width)
        self.joins = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        leaves = self.leaves.weight.unbind()
        roots = []
        for expression in tokens.tolist():
            stack: list[Tensor] = []
            for token in expression:
                if token < 10:
                    stack.append(leaves[token])
                else:
                    right, left = stack.pop(), stack.pop()
                    stack.append(torch.tanh(self.joins[token - 10](torch.cat((left, right)))))
            roots.append(stack[0])
        return self.classifier(torch.stack(roots))


def parameters(model: Any) -> int:
    """How many parameters a model has; shared ones count once."""
    return sum(p.numel() for p in model.parameters())
