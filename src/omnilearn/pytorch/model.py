"""What ``prepare`` does to the user's own objects: an optimizer and a scheduler act once per step; the model stays what
it is, but can be reached as ``model.module``, too."""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from omnilearn.errors import UsageError

log = logging.getLogger("omnilearn")


def own(model: nn.Module) -> nn.Module:
    """The user's model, out of a wrapper that was left in the script."""
    if isinstance(model, (DistributedDataParallel, DataParallel)):
        log.warning("the model given to prepare() is wrapped in %s, which OmniLearn does by itself: the model inside "
                    "is used, and returned; leave the wrapper out", type(model).__name__)  # fmt: skip
        return own(model.module)
    for name, layer in model.named_modules():
        if isinstance(layer, (DistributedDataParallel, DataParallel)) or type(layer).__name__.startswith("FSDP"):
            raise UsageError(
                f"the model given to prepare() has a {type(layer).__name__} inside ({name or 'itself'}), which reduces "
                f"gradients by itself: give prepare() the model without it"
            )
    return model


def name_module(model: nn.Module) -> None:
    """``model.module`` is the model, as with DistributedDataParallel, unless it has something of that name."""
    if not hasattr(model, "module"):
        model.__dict__["module"] = model  # not as a layer of its own


def forget_module(model: nn.Module) -> None:
    if model.__dict__.get("module") is model:
        del model.__dict__["module"]


def gate(target: Any, method: str, allowed: Callable[[], bool], after: Callable[[], None] | None = None) -> None:
    """Have ``target.method()`` do its work only where ``allowed()``, on the very object the user holds.

    By a subclass of its own class, so that nothing is added to what a scheduler's ``state_dict`` saves; where an object
    has the method for itself already (torch's schedulers wrap ``optimizer.step`` that way), on the object.
    """
    act = getattr(target, method)

    def gated(_: Any, *args: Any, **kwargs: Any) -> Any:
        if not allowed():
            return None
        result = act(*args, **kwargs)
        if after is not None:
            after()
        return result

    # What schedulers and GradScaler look for on the method they find.
    gated.__dict__.update(getattr(act, "__dict__", {}))
    gated.__wrapped__ = act  # type: ignore[attr-defined]
    if method in vars(target):
        setattr(target, method, MethodType(gated, target))
    else:
        kind = type(target)
        plain = getattr(kind, "_before_gates", kind)

        def reduce(it: Any, protocol: Any) -> Any:
            """A copy, pickled or not, is of the class that it was, and acts by itself."""
            _, _, *rest = plain.__reduce_ex__(it, protocol)  # type: ignore[call-arg,str-unpack]
            return copyreg._reconstructor, (plain, object, None), *rest  # type: ignore[attr-defined]

        own = {method: gated, "__reduce_ex__": reduce, "_before_gates": plain, "__module__": kind.__module__}
        target.__class__ = type(kind.__name__, (kind,), own)


def smallest_batch(module: nn.Module) -> int:
    """The least batch the model can train on: 2 where a BatchNorm needs more than one value per channel."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return 2 if any(isinstance(layer, norms) for layer in module.modules()) else 1


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """What has to be the same on all ranks for gradients to be added up. Strides, too: numbers travel as they lie."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    shapes = {name: (tuple(p.shape), str(p.dtype), _layout(p), p.requires_grad) for name, p in parameters.items()}
    return shapes | {name: (tuple(b.shape), str(b.dtype), _layout(b)) for name, b in buffers.items()}


def _layout(tensor: torch.Tensor) -> str:
    """In which order the dimensions lie in memory; those of size 1 lie anywhere."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    order = sorted(
        (-stride, k) for k, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)) if size > 1
    )
    dimensions = [k for _, k in order]
    return "contiguous" if dimensions == sorted(dimensions) else f"dimensions {dimensions}"
