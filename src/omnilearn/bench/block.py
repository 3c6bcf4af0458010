"""What one worker saw of some steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Block:
    """What one worker saw of some steps, by the step's number. It has no entry for a step it sat out."""

    begin: float = field(default_factory=time.perf_counter)
    ends: dict[int, float] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    wait: dict[int, float] = field(default_factory=dict)
    end: float = 0.0
    loss: float | None = None
