"""Data-parallel training for clusters whose machines differ.

``from omnilearn import OmniLearn`` is the PyTorch front end. It is loaded on first use: importing this package
imports neither torch nor tensorflow and changes nothing in the process.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"
__all__ = ["InfeasibleError", "OmniLearn", "OmniLearnError", "PeerFailure", "__version__"]

if TYPE_CHECKING:
    from omnilearn.errors import InfeasibleError, OmniLearnError, PeerFailure
    from omnilearn.pytorch import OmniLearn

_HOME = {
    "OmniLearn": "omnilearn.pytorch",
    "OmniLearnError": "omnilearn.errors",
    "InfeasibleError": "omnilearn.errors",
    "PeerFailure": "omnilearn.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'omnilearn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
