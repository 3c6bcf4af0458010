"""Plans in words: why batches are as they are, for people who have not read the code."""

from __future__ import annotations

from collections.abc import Sequence

from omnilearn.observe.events import Event

REASONS = {
    "start": "first plan",
    "uniform": "equal batches for all",
    "nominal speeds": "first guess: batches in proportion to cores or FLOP/s",
    "rebalance": "rebalanced, so that all finish together",
    "proportional control": "rebalanced, so that all finish together",
    "learn the curves": "batches moved a little, to learn how long each worker takes",
    "park: try": "trying without {parked}",
    "park: kept": "without {parked}: measured, and faster",
    "unpark: try": "trying with more workers",
    "unpark: kept": "with more workers: measured, and faster",
    "exchange: try": "trying other workers",
    "exchange: kept": "other workers: measured, and faster",
    "tried, slower: back": "another set of workers was tried and was slower: back",
    "ask the parked again": "asking the parked again",
    "restored": "as saved in the checkpoint",
}


def reason(plan: Event) -> str:
    """Why this plan was made; what it promises, where it does."""
    given = str(plan.get("reason", ""))
    words = REASONS[given].format(parked=workers(plan.get("parked", ()))) if given in REASONS else given
    predicted, before = plan.get("predicted"), plan.get("instead_of")
    if given.endswith((": try", "rebalance")) and predicted and before and predicted < before:
        words += f" (a step: {before * 1e3:.0f} → {predicted * 1e3:.0f} ms expected)"
    return words


def mark(event: Event) -> str:
    """What happened beside the steps: out of memory, a fault, a checkpoint."""
    worker, step = event.get("worker", event["rank"]), event.get("step")
    at = f"step {step}: " if isinstance(step, int) else ""
    if event["kind"] == "oom":
        tried, then = event.get("samples"), event.get("micro_batch")
        size = f" with {tried} samples at once" if tried else ""
        return f"{at}worker {worker} ran out of memory{size}" + (f"; went on with {then}" if then else "")
    if event["kind"] == "memory":
        return f"{at}worker {worker} computes its {event.get('batch')} samples {event.get('micro_batch')} at a time"
    if event["kind"] == "checkpoint":
        return f"{at}checkpoint {event.get('what', 'saved')}"
    detail = f" ({event['detail']})" if event.get("detail") else ""
    return f"{at}worker {worker}: {event.get('what', 'fault')}{detail}"


def duration(seconds: float) -> str:
    """
    >>> duration(7.4), duration(95), duration(7300)
    ('7.4 s', '1:35 min', '2:01 h')
    """
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d} h"


def workers(ranks: Sequence[int]) -> str:
    """
    >>> workers([0, 1, 2])
    'workers 0, 1 and 2'
    """
    named = [str(rank) for rank in ranks]
    if len(named) > 8:
        return f"{len(named)} workers"
    if len(named) < 2:
        return f"worker {named[0]}" if named else "nobody"
    return f"workers {', '.join(named[:-1])} and {named[-1]}"
