"""The workloads' names and sizes, for those who must not load a framework to know them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from omnilearn.errors import UsageError

NAMES = ("heavy", "even", "chatty", "digits", "resnet18", "resnet50", "vgg11", "alexnet", "gpt2", "trees")
TF_NAMES = ("heavy", "even", "chatty", "digits")
ANY_IMAGE = ("heavy", "even", "resnet18", "resnet50", "vgg11", "alexnet")


@dataclass(frozen=True)
class Size:
    """How large a workload is: ``small`` has a point on two CPU cores, ``full`` on a GPU; and what differs from it."""

    kind: str = "small"
    batch: int | None = None
    image: int | None = None
    bf16: bool = False
    length: int | None = None


def workload(name: str, size: str | Size = "small", framework: str = "pytorch") -> Any:
    """What is trained under that name. Loads the framework; raises where the workload cannot have that size."""
    module = "omnilearn.bench.tf_workloads" if framework == "tensorflow" else "omnilearn.bench.workloads"
    try:
        return import_module(module).workload(name, size)
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed here, which this benchmark trains with") from error
