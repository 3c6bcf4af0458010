"""Python's start-up hook, for processes whose PYTHONPATH has this folder: as if PyTorch were not installed."""

from importlib.machinery import PathFinder
from typing import Any

_find = PathFinder.find_spec


def _find_others(name: str, path: Any = None, target: Any = None) -> Any:
    return None if name.partition(".")[0] == "torch" else _find(name, path, target)


PathFinder.find_spec = _find_others  # type: ignore[method-assign]
