"""A run in words: what the cluster is, what was gained against equal batches, where time went.

A gain is *measured* where equal batches were run too, here or in a run beside it; else *predicted*, and called so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from omnilearn.observe.report.chart import number
from omnilearn.observe.report.history import Run
from omnilearn.observe.words import duration

MOSTLY = 0.9
"""Of the time that a plan held."""
SAME = 0.05
"""Speeds that differ by less are about the same."""
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


@dataclass(frozen=True)
class Gain:
    """How many times as fast as equal batches, and how that is known."""

    times: float
    how: str
    explained: str


def gain(run: Run, others: Sequence[Run] = ()) -> Gain | None:
    """Against a run with equal batches beside it, equal batches within the run, or the fitted curves."""
    if run.is_async or all_equal(run):
        return None
    for other in others:
        if all_equal(other) and _same_work(run, other) and (found := _against(run, other)):
            return found
    last = run.before_and_after
    if last is None:
        return None
    now = run.step_time(last[1])
    steps = run.measured_in(last[1])
    for phase, pace in zip(run.phases, run.paces, strict=True):
        tried = run.measured_in(phase)
        if now and pace and equal(phase.batches) and tried:
            explained = (
                f"in this run a step took {_ms(pace)} with equal batches ({_steps(tried)}) and {_ms(now)} with the "
                f"{last[1].name} ({_steps(steps)})"
            )
            return Gain(pace / now, "measured", explained)
    if run.equal_time and now:
        explained = (
            f"by the fitted curves a step with equal batches would take at least {_ms(run.equal_time)}; with the "
            f"{last[1].name} it took {_ms(now)} ({_steps(steps)})"
        )
        return Gain(run.equal_time / now, "predicted", explained)
    return None


def _against(run: Run, other: Run) -> Gain | None:
    """By the time both needed to their target, where they had one, else by the speed of measured steps."""
    mine, theirs = _goal(run), _goal(other)
    if mine and theirs:
        explained = f"{duration(mine)} of training to the target, {duration(theirs)} in {other.name!r}"
        return Gain(theirs / mine, "measured", explained)
    fast, slow = run.rate(), other.rate()
    if fast and slow:
        explained = f"{number(fast)} samples per second in measured steps, {number(slow)} in {other.name!r}"
        return Gain(fast / slow, "measured", explained)
    return None


def _goal(run: Run) -> float | None:
    """Seconds of training to the target, where the script has one and says so."""
    last = run.metrics[-1] if run.metrics else {}
    seconds = last.get("seconds")
    return float(seconds) if last.get("reached") and isinstance(seconds, (int, float)) and seconds > 0 else None


def equal(batches: Sequence[int]) -> bool:
    return len(batches) > 1 and max(batches) - min(batches) <= 1 and min(batches) > 0


def all_equal(run: Run) -> bool:
    return bool(run.phases) and all(equal(phase.batches) for phase in run.phases)


def _mostly_equal(run: Run) -> bool:
    """Whether other batches were but looked at."""
    lasted = [(min(phase.end, run.steps) - phase.first, equal(phase.batches)) for phase in run.phases]
    return sum(length for length, level in lasted if level) > MOSTLY * sum(length for length, _ in lasted)


def _same_work(a: Run, b: Run) -> bool:
    return len(a.workers) == len(b.workers) and a.global_batch == b.global_batch and a.mode == b.mode


def sentences(run: Run, others: Sequence[Run] = ()) -> list[str]:
    """The summary of one run."""
    return [
        part
        for part in (_cluster(run), _work(run), _gained(run, others), _time(run), _plans(run), _trouble(run))
        if part
    ]


def _cluster(run: Run) -> str:
    count = len(run.workers)
    if not count:
        return "Nothing is known about the workers."
    places = Counter(worker.place for worker in run.workers)
    kinds = [f"{n} × {place}" if n > 1 else place for place, n in places.most_common(6)]
    if len(places) > 6:
        kinds.append(f"{len(places) - 6} other kinds")
    hosts = len({host for host in run.hosts if host})
    where = f" on {_count(hosts)} machines" if hosts > 1 else " on one machine" if hosts else ""
    backend = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}.get(run.backend, run.backend)
    mode = "asynchronous" if run.is_async else "synchronous"
    policy = run.options.get("policy")
    how = ", ".join(filter(None, [backend, mode, f"policy {_policy(policy)}" if policy else ""]))
    return f"{_upper(_count(count))} worker{'s' if count > 1 else ''}{where} ({how}): {_list(kinds)}."


def _policy(policy: object) -> str:
    """Policies are written as objects: ``Optimal(gain=0.02, …)``."""
    return str(policy).partition("(")[0].lower()


def _work(run: Run) -> str:
    if not run.steps:
        return ""
    samples = f"{number(run.global_batch)} samples per step" if run.global_batch and not run.is_async else ""
    rate = run.rate()
    speed = f"{number(rate)} samples per second in measured steps" if rate else ""
    done = "updates of the busiest worker" if run.is_async else "steps"
    told = [samples, f"{number(run.steps)} {done} in {duration(run.seconds)}", speed]
    return _upper(f"{', '.join(t for t in told if t)}.")


def _gained(run: Run, others: Sequence[Run]) -> str:
    if run.is_async:
        return ""
    if all_equal(run):
        return "Every worker had the same batch all the time, as in plain data parallelism."
    if _mostly_equal(run):
        return "Nearly all the time every worker had the same batch: there was nothing to gain against that."
    found = gain(run, others)
    if found is None:
        return "What was gained against equal batches is not known: they were not measured, and nor were enough curves."
    word = "Measured" if found.how == "measured" else "Predicted, not measured"
    if abs(found.times - 1) <= SAME:
        return f"{word}: about as fast as with equal batches ({found.explained})."
    if found.times < 1:
        return f"{word}: {found.times:.2f} times as fast as with equal batches, that is slower ({found.explained})."
    return f"{word}: {found.times:.2g} times as fast as with equal batches ({found.explained})."


def shares(run: Run) -> dict[str, float] | None:
    """What the workers did while they took part, as parts of 1."""
    total: Counter[str] = Counter()
    for k in range(len(run.workers)):
        total.update({kind: seconds for kind, seconds in run.spent(k).items() if kind != "parked"})
    seconds = sum(total.values())
    return {kind: part / seconds for kind, part in total.items()} if seconds else None


def _time(run: Run) -> str:
    found = shares(run)
    if found is None:
        return ""
    others = "exchanged with the server" if run.is_async else "waited for the others and the reduction"
    parts = [f"computed {found['compute']:.0%} of the time"]
    parts += [f"waited for samples {found['data']:.0%}"] if found["data"] >= 0.005 else []
    parts += [f"{others} {found['wait']:.0%}"]
    text = f"While they took part, workers {_list(parts)}."
    waits = {}
    for k in range(len(run.workers)):
        spent = run.spent(k)
        active = spent["compute"] + spent["data"] + spent["wait"]
        if active > SAME * run.seconds:  # who took part for some steps only says little
            waits[k] = spent["wait"] / active
    if len(waits) > 1 and not run.is_async:
        most, least = max(waits, key=lambda k: waits[k]), min(waits, key=lambda k: waits[k])
        if waits[most] > waits[least] + 0.1:
            text += f" Worker {most} waited most ({waits[most]:.0%}), worker {least} least ({waits[least]:.0%})."
    return text


def _plans(run: Run) -> str:
    if not run.phases:
        return ""
    changes = len(run.phases) - 1
    last = run.phases[-1].batches
    parked = [k for k, batch in enumerate(last) if not batch]
    if not changes and not parked:
        return ""
    text = f"Batches were changed {_times(changes)}"
    if not run.is_async and changes:
        text += f", last at step {number(run.phases[-1].first)}"
    if len(last) <= 12:
        text += f"; at the end they were {', '.join(str(batch) if batch else 'parked' for batch in last)}"
    elif parked:
        text += f"; at the end {len(parked)} of {len(last)} workers {'was' if len(parked) == 1 else 'were'} parked"
    return text + "."


def _trouble(run: Run) -> str:
    memory = sum(event["kind"] == "oom" for event in run.marks)
    faults = sum(event["kind"] == "fault" for event in run.marks)
    told = [f"Out of memory {_times(memory)}."] if memory else []
    told += [f"{faults} fault{'s' if faults > 1 else ''}."] if faults else []
    told += [f"It failed: {run.errors[0]}."] if run.errors else []
    return " ".join(told)


def comparison(runs: Sequence[Run]) -> list[str]:
    """Several runs in words: who was faster, by how much, measured."""
    said = []
    for run in runs:
        found = gain(run, [other for other in runs if other is not run])
        if found and found.how == "measured" and not all_equal(run):
            verb = f"{found.times:.2g} times as fast as" if abs(found.times - 1) > SAME else "about as fast as"
            said.append(f"{run.name!r} was {verb} equal batches, measured: {found.explained}.")
    rates = [(rate, run.name) for run in runs if (rate := run.rate())]
    if not said and len(rates) > 1:
        (high, best), (low, worst) = max(rates), min(rates)
        said.append(
            f"{best!r} was fastest with {number(high)} samples per second, {worst!r} slowest with {number(low)}."
        )
    goals = [(goal, run.name) for run in runs if (goal := _goal(run))]
    if len(goals) == len(runs) > 1 and not said:
        told = _list([f"{name!r} in {duration(seconds)}" for seconds, name in sorted(goals)])
        said.append(f"All reached their target: {told} of training.")
    return said


def figures(run: Run, others: Sequence[Run] = ()) -> list[tuple[str, str]]:
    """The few numbers that matter: value and what it is."""
    shown = []
    pair, found = run.before_and_after, gain(run, others)
    rate = run.rate(pair[1]) if pair else run.rate()
    if rate:
        shown.append((number(rate), "samples per second" + (f" with the {pair[1].name}" if pair else "")))
    if found:
        shown.append((f"{found.times:.2g}×", f"as fast as equal batches, {found.how}"))
    parts = shares(run)
    if parts:
        shown.append((f"{parts['compute']:.0%}", "of workers' time computing"))
    late = [rows["staleness"][np.isfinite(rows["staleness"])] for rows in run.rows.values()]
    if run.is_async and any(len(values) for values in late):
        shown.append((number(float(np.mean(np.concatenate(late)))), "updates behind on average (staleness)"))
    elif run.phases:
        parked = sum(not batch for batch in run.phases[-1].batches)
        shown.append((f"{len(run.workers) - parked} of {len(run.workers)}", "workers take part at the end"))
    return shown


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _steps(n: int) -> str:
    return f"{n:,} measured step{'s' if n != 1 else ''}"


def _count(n: int) -> str:
    return NUMBERS[n] if n < len(NUMBERS) else str(n)


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n} times")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _list(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)
