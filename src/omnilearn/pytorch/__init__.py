"""How is a step done on torch.distributed? The synchronous engine, its loaders, checkpoints; ``OmniLearn`` in front.

The asynchronous engine is in the folder of that name."""

from omnilearn.pytorch.omni import OmniLearn

__all__ = ["OmniLearn"]
