"""A shuffled order of the samples that is computed where it is needed, never stored.

Responsible for one bijection of ``range(size)`` per (seed, epoch), the same on every machine and numpy
(``SeedSequence`` is stable by contract, ``Generator.permutation`` is not). Assumes that looking random is
enough: this is no cipher. Who gets which part of the order is the sampler's question.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
import numpy.typing as npt

from omnilearn.errors import InfeasibleError, UsageError

_UInts = npt.NDArray[np.uint64]

_ROUNDS = 8
"""Each moves both halves once. Four make neighbours look random, eight all orders of 6 samples too."""
_AHEAD = 2048
"""Indices computed at once where few are asked for."""

_WEYL, _MIX1, _MIX2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S27, _S30, _S32 = (np.uint64(s) for s in (27, 30, 32))


class Permutation:
    """A pseudo-random order of ``range(size)``, computed on demand from (seed, epoch); it is never stored.

    A generalised Feistel network on Z_a × Z_b with a·b just above ``size``, and cycle-walking for the few
    values beyond it (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).

    >>> order = Permutation(10, seed=0, epoch=0)
    >>> sorted(order(0, 4).tolist() + order(4, 10).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, size: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        if not 0 < size < 2**62:  # so that both halves fit the 32-bit scaling in _shift
            raise InfeasibleError(f"a permutation needs a size from 1 to 2**62 - 1, got {size}")
        if seed < 0 or epoch < 0:
            raise InfeasibleError(f"seed and epoch must not be negative, got seed {seed} and epoch {epoch}")
        self.size, self.shuffle = size, shuffle
        a = isqrt(size - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-size // a))
        keys = np.random.SeedSequence([seed, epoch]).generate_state(2 * _ROUNDS, np.uint64)
        self._keys = keys.reshape(_ROUNDS, 2)
        # Indices computed in advance, and the position of the first.
        self._ahead: tuple[int, npt.NDArray[np.int64]] = (0, np.empty(0, dtype=np.int64))

    def __call__(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The sample indices at positions ``start`` to ``stop - 1``."""
        if not 0 <= start <= stop <= self.size:
            raise UsageError(f"positions {start} to {stop} are not within the {self.size} samples of the epoch")
        if not self.shuffle or stop - start >= _AHEAD // 4:
            return self._compute(start, stop)
        # A handful of indices costs as much as some hundred: those of the next small batches are computed with them.
        first, known = self._ahead
        if not first <= start <= stop <= first + len(known):
            first, known = self._ahead = start, self._compute(start, min(start + _AHEAD, self.size))
        few: npt.NDArray[np.int64] = known[start - first : stop - first].copy()
        return few

    def _compute(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        values = np.arange(start, stop, dtype=np.uint64)
        if self.shuffle:
            values = self._network(values)
            # Cycle-walking: what falls outside goes round again; its cycle leads back inside, where it began.
            while (outside := np.flatnonzero(values >= self.size)).size:
                values[outside] = self._network(values[outside])
        return values.astype(np.int64)

    def _network(self, values: _UInts) -> _UInts:
        left: _UInts = values // self._b
        right: _UInts = values - left * self._b
        for key_left, key_right in self._keys:
            left = _shift(left, right, key_left, self._a)
            right = _shift(right, left, key_right, self._b)
        left *= self._b
        left += right
        return left


def _shift(half: _UInts, other: _UInts, key: np.uint64, modulus: np.uint64) -> _UInts:
    """One Feistel round: ``half`` plus a pseudo-random function of ``other``, modulo ``modulus``."""
    z: _UInts = other * _WEYL  # splitmix64 (Steele, Lea and Flood, OOPSLA 2014): its state, then its finaliser
    z += key
    z ^= z >> _S30
    z *= _MIX1
    z ^= z >> _S27
    z *= _MIX2
    z >>= _S32  # the finaliser's last step is for the low half, and we keep the high one
    z *= modulus
    z >>= _S32  # 32 random bits scaled to [0, modulus), without a division
    z += half
    wrapped: _UInts = np.minimum(z, z - modulus)  # z mod modulus: below it, the difference is a huge value
    return wrapped
