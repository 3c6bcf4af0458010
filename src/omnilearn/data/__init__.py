"""Which samples are in each worker's batch?

A permutation of the dataset per epoch, cut step by step by the plan in force: every sample exactly once per
epoch, whatever the plans. Deterministic and resumable, also with another number of workers. Assumes that all
ranks see the same plans for the same steps; plans are made by ``control``, samples are loaded by the engines.
"""

from omnilearn.data.permutation import Permutation
from omnilearn.data.sampler import Sampler, Share

__all__ = ["Permutation", "Sampler", "Share"]
