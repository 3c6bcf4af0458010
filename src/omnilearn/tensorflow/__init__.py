"""How is a step done on TensorFlow? Keras 3 models, synchronous and asynchronous; ``OmniLearn`` in front."""

from omnilearn.tensorflow.omni import OmniLearn

__all__ = ["OmniLearn"]
