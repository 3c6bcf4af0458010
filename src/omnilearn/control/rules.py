"""Small decisions as functions: how the learning rate follows the batch, what to do with a stale gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

from omnilearn.errors import InfeasibleError

LR_RULES = ("linear", "capped", "sqrt", "none")
STALENESS_RULES = ("apply", "scale", "discard", "bounded")


def lr_factor(rule: str, batch: float, reference: float) -> float:
    """As how many steps an update of ``batch`` samples counts, where the learning rate was chosen for ``reference``.

    ``capped``: linear up to the reference, and never more than one.

    >>> lr_factor("linear", 64, 128), lr_factor("sqrt", 32, 128), lr_factor("none", 64, 128)
    (0.5, 0.5, 1.0)
    >>> lr_factor("capped", 64, 128), lr_factor("capped", 512, 128)
    (0.5, 1.0)
    """
    if not (batch > 0 and reference > 0):
        raise InfeasibleError(f"learning-rate scaling needs positive batches, got {batch} and reference {reference}")
    if rule == "capped":
        return min(1.0, batch / reference)
    if rule == "linear":
        return batch / reference
    if rule == "sqrt":
        return sqrt(batch / reference)
    if rule == "none":
        return 1.0
    raise InfeasibleError(f"unknown lr_scaling {rule!r}: use one of {', '.join(LR_RULES)}")


APART = 1.5
"""Batches that differ less than so many times say nothing about what a loss depends on."""


def grows_with(batches: Sequence[float], losses: Sequence[float]) -> bool | None:
    """Whether workers' losses of the same steps are in the ratio of their batches, as sums over a batch are and means
    are not. None: these cannot tell.

    >>> grows_with([10, 40], [2.1, 8.0]), grows_with([10, 40], [2.1, 2.0]), grows_with([10, 12], [2.1, 2.0])
    (True, False, None)
    """
    pairs = [(b, x) for b, x in zip(batches, losses, strict=True) if b > 0 and x > 0]
    small, large = min(pairs, default=(1, 1)), max(pairs, default=(1, 1))
    if large[0] < APART * small[0]:
        return None
    return bool(0.75 < log(large[1] / small[1]) / log(large[0] / small[0]) < 1.33)


@dataclass(frozen=True)
class Verdict:
    """What happens to a gradient: applied with this weight (0: dropped), or its worker waits before going on."""

    weight: float
    wait: bool = False


def judge_staleness(rule: str, staleness: int, lead: int = 0, threshold: int = 8) -> Verdict:
    """Decide on a gradient computed ``staleness`` updates ago by a worker ``lead`` steps ahead of the slowest.

    ``apply``: always, in full. ``scale``: by 1/(1+staleness). ``discard``: dropped beyond the threshold (Ringmaster
    ASGD). ``bounded``: applied, but a worker more than ``threshold`` steps ahead of the slowest waits (stale
    synchronous parallel).

    >>> judge_staleness("scale", 3).weight, judge_staleness("discard", 9).weight
    (0.25, 0.0)
    """
    if staleness < 0 or lead < 0 or threshold < 0:
        raise InfeasibleError(f"staleness, lead and threshold cannot be negative: {staleness}, {lead}, {threshold}")
    if rule == "apply":
        return Verdict(1.0)
    if rule == "scale":
        return Verdict(1 / (1 + staleness))
    if rule == "discard":
        return Verdict(1.0 if staleness <= threshold else 0.0)
    if rule == "bounded":
        return Verdict(1.0, wait=lead > threshold)
    raise InfeasibleError(f"unknown staleness rule {rule!r}: use one of {', '.join(STALENESS_RULES)}")
