"""The errors OmniLearn raises. Each message says what was wrong, the value seen and the way out."""

from collections.abc import Iterable
from difflib import get_close_matches


class OmniLearnError(Exception):
    """Base of all errors raised by OmniLearn."""


class InfeasibleError(OmniLearnError, ValueError):
    """What was asked for cannot be had: bounds that contradict each other, sizes that do not fit, bad numbers."""


class UsageError(OmniLearnError, RuntimeError):
    """The training loop or the command line uses OmniLearn in a way that cannot work."""


class PeerFailure(OmniLearnError, RuntimeError):
    """Another worker failed. The message names its rank and its error."""


class OutOfStepError(UsageError):
    """Workers wait for each other in different places, or for one that has ended: they can never meet. The message says
    who is where, by line of the script."""


def meant(word: str, known: Iterable[str]) -> str:
    """ ", did you mean …?" for a word that is like one of the known ones, else "".

    >>> meant("evry", ["every", "folder"])
    ", did you mean 'every'?"
    """
    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
