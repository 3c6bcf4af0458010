"""How big should each worker's batch be?

Pure functions and frozen dataclasses on numpy: no clock, no I/O, no randomness, no framework. Engines measure and obey;
what is decided here can be replayed from a log.
"""

from omnilearn.control.allocate import allocate, step_time
from omnilearn.control.curves import Curves
from omnilearn.control.optimal import Optimal
from omnilearn.control.policy import Policy, Proportional, Report, State, Static, Uniform
from omnilearn.control.problem import Plan, Problem
from omnilearn.control.rules import LR_RULES, STALENESS_RULES, grows_with, judge_staleness, lr_factor
from omnilearn.control.split import apportion
from omnilearn.errors import InfeasibleError

__all__ = [
    "LR_RULES",
    "POLICIES",
    "STALENESS_RULES",
    "Curves",
    "Optimal",
    "Plan",
    "Policy",
    "Problem",
    "Proportional",
    "Report",
    "State",
    "Static",
    "Uniform",
    "allocate",
    "apportion",
    "grows_with",
    "judge_staleness",
    "lr_factor",
    "policy",
    "step_time",
]

POLICIES: dict[str, type[Policy]] = {
    "optimal": Optimal,
    "proportional": Proportional,
    "static": Static,
    "uniform": Uniform,
}


def policy(choice: str | Policy) -> Policy:
    """The policy of this name, or the object itself if it is one.

    >>> policy("uniform")
    Uniform()
    """
    if isinstance(choice, str):
        if choice not in POLICIES:
            raise InfeasibleError(f"unknown policy {choice!r}: use one of {', '.join(POLICIES)}, or an object")
        return POLICIES[choice]()
    if not isinstance(choice, Policy):
        raise InfeasibleError(f"policy must be a name or have start, update and restore, got {type(choice).__name__}")
    return choice
