"""The errors OmniLearn raises. Each message says what was wrong, the value seen and the way out."""


class OmniLearnError(Exception):
    """Base of all errors raised by OmniLearn."""


class InfeasibleError(OmniLearnError, ValueError):
    """What was asked for cannot be had: bounds that contradict each other, sizes that do not fit, bad numbers."""


class UsageError(OmniLearnError, RuntimeError):
    """The training loop or the command line uses OmniLearn in a way that cannot work."""


class PeerFailure(OmniLearnError, RuntimeError):
    """Another worker failed. The message names its rank and its error."""
