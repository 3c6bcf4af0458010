"""Sizes, rates and times as people write them ("2GB", "100Mbit", "5ms"), and back."""

from __future__ import annotations

import re
from collections.abc import Mapping

from omnilearn.errors import InfeasibleError

SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SIZES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
RATES = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
RATES |= {f"{unit}/s": factor for unit, factor in RATES.items()}
TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def _parse(what: str, text: object, units: Mapping[str, float], example: str) -> float:
    word = str(text).strip()
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-zµ/]*)", word.lower())
    if isinstance(text, bool) or match is None or match[2] not in units:
        raise InfeasibleError(f"{what} {word!r} is not understood: write it like {example!r}")
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise InfeasibleError(f"{what} {word!r} must be above zero")
    return value


def size(what: str, text: object) -> int:
    """Bytes: "512MB", "2GiB" or a number."""
    value = int(_parse(what, text, SIZES, "2GB"))
    if not value:
        raise InfeasibleError(f"{what} {text!r} is less than a byte: write it like '2GB'")
    return value


def rate(what: str, text: object) -> int:
    """Bits per second: "100Mbit", "1Gbit/s"."""
    return int(_parse(what, text, RATES, "100Mbit"))


def duration(what: str, text: object) -> float:
    """Seconds: "5ms"."""
    return _parse(what, text, TIMES, "5ms")


def show_size(value: int) -> str:
    return _show(value, (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)))


def show_rate(value: int) -> str:
    return _show(value, (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1)))


def show_duration(value: float) -> str:
    return _show(value, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def _show(value: float, units: tuple[tuple[str, float], ...]) -> str:
    unit, factor = next((pair for pair in units if value >= pair[1]), units[-1])
    return f"{value / factor:.4g}{unit}"
