"""What the user's OmniLearn object is whatever the framework: options, what can be read from it, how it ends."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from omnilearn import __version__, control
from omnilearn.cluster import resources
from omnilearn.control import Plan, Policy, Problem
from omnilearn.engine.source import Source
from omnilearn.errors import InfeasibleError, UsageError, meant
from omnilearn.observe import EventLog, Tracker, track

log = logging.getLogger("omnilearn")


def check_mode(
    mode: str, staleness: str, threshold: int | None, lr_scaling: str | None, park: bool | None = None
) -> None:
    """Raise where these do not exist, or not together."""
    if mode not in ("sync", "async"):
        raise InfeasibleError(f"mode {mode!r} is unknown: use 'sync' or 'async'")
    if staleness not in control.STALENESS_RULES:
        raise InfeasibleError(f"unknown staleness rule {staleness!r}: use one of {', '.join(control.STALENESS_RULES)}")
    if lr_scaling is not None and lr_scaling not in control.LR_RULES:
        raise InfeasibleError(f"unknown lr_scaling {lr_scaling!r}: use one of {', '.join(control.LR_RULES)}")
    if threshold is not None and threshold < 0:
        raise InfeasibleError(f"threshold must not be negative, got {threshold}")
    if mode == "sync" and (staleness != "apply" or threshold is not None):
        raise InfeasibleError("staleness and threshold belong to mode='async': leave them out, or set the mode")
    if mode == "sync" and lr_scaling is not None:
        raise InfeasibleError(
            f"lr_scaling={lr_scaling!r} belongs to mode='async': in mode='sync' every step has the whole global batch, "
            f"so that your learning rate holds: leave it out, or set the mode"
        )
    if mode == "async" and park is not None:
        raise InfeasibleError(
            f"park={park} is for mode='sync': asynchronous workers wait for nobody, and none is parked: leave it out"
        )


def check_names(function: Callable[..., Any], given: Iterable[str], what: str) -> None:
    """Raise where a keyword is none of the function's, and say which one was meant."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    for name in given:
        if name not in known:
            raise UsageError(f"{what} has no option {name!r}{meant(name, known)}")


def check_save(every: Any, extra: Iterable[str]) -> None:
    for name in extra:
        if hint := meant(name, ["every", "folder"]):
            raise UsageError(f"save() would write {name!r} as a value of yours{hint} Give your own values other names")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InfeasibleError(f"every must be a whole number of at least 1, got {every!r}")


def check_timeout(timeout: Any) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InfeasibleError(f"timeout must be a positive number of seconds, got {timeout!r}")


class Facade(ABC):
    """Base of the frameworks' ``OmniLearn``. They make ``_world`` first, then take the options and open the events."""

    backend = ""
    _checkpoint_file = ""
    _world: Any
    _engine: Any

    # Options

    def _take_options(
        self,
        global_batch: int,
        policy: str | Policy,
        *,
        min_batch: int | None,
        max_batch: int | None,
        multiple_of: int,
        park: bool | None,
        micro_batch: int | None,
        nonfinite: str,
        seed: int,
    ) -> dict[str, Any]:
        """Check what all frameworks have in common, and keep it. Returns it by name."""
        if nonfinite not in ("raise", "skip"):
            raise InfeasibleError(f"nonfinite must be 'raise' or 'skip', got {nonfinite!r}")
        if not isinstance(global_batch, int) or global_batch < 1:
            raise InfeasibleError(f"global_batch must be a whole number of at least 1, got {global_batch!r}")
        for name, value in (("min_batch", min_batch), ("max_batch", max_batch), ("micro_batch", micro_batch)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InfeasibleError(f"{name} must be a whole number of at least 1, got {value!r}")
        park = True if park is None else park
        if not isinstance(park, bool):
            raise InfeasibleError(f"park must be True or False, got {park!r}")
        if not isinstance(seed, int):
            raise InfeasibleError(f"seed must be a whole number, got {seed!r}")
        self._policy = control.policy(policy)
        self.global_batch, self.seed = global_batch, seed
        self._min_batch, self._max_batch, self._multiple_of = min_batch, max_batch, multiple_of
        self._park, self._micro_batch, self._nonfinite = park, micro_batch, nonfinite
        return {
            "global_batch": global_batch, "policy": _in_words(self._policy), "min_batch": min_batch,
            "max_batch": max_batch, "multiple_of": multiple_of, "park": park, "micro_batch": micro_batch,
            "nonfinite": nonfinite, "seed": seed,
        }  # fmt: skip

    def _open(self, mode: str, options: dict[str, Any], log_dir: str | os.PathLike[str] | None) -> None:
        """All ranks have the same versions and options; from now on there are events."""
        self._world.agree_versions()
        self._world.agree("OmniLearn's options", options)
        self.log_dir = log_dir or os.environ.get("OMNILEARN_LOG_DIR")
        self._events = EventLog(self.log_dir, self.rank)
        self._tracking = contextlib.ExitStack()
        self._listeners: list[Callable[[Plan, int], None]] = []
        self._sources: list[weakref.ref[Any]] = []  # of training batches, in the order in which they were made
        self._made: Any = None  # the one last made
        self._told_parked = False
        self._restored: list[dict[str, Any]] = []  # positions in the data, for sources to come
        self._resumed = 0  # the epoch that a restored run goes on with
        self._write_run(mode, options)

    def _write_run(self, mode: str, options: dict[str, Any]) -> None:
        if self._world.is_main:
            workers = [asdict(worker) for worker in self._world.resources]
            about = {"mode": mode, "backend": self.backend, "options": options, "omnilearn": __version__}
            self._events.write("run", **about, workers=workers)

    def _found_problem(self, smallest: int) -> Problem:
        """What there is to plan, for a model that can train on ``smallest`` samples."""
        return Problem.of(
            self.global_batch,
            speeds=resources.speeds(self._world.resources) if self.world_size > 1 else [1.0],
            minimum=max(self._min_batch or smallest, self._multiple_of),
            maximum=self._max_batch,
            multiple_of=self._multiple_of,
            park=self._park,
            micro=self._micro_batch,
        )

    # Readable state

    @property
    def rank(self) -> int:
        return int(self._world.rank)

    @property
    def world_size(self) -> int:
        return int(self._world.size)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that should write files and talk to trackers.

        It stays the same worker all the time. Inside the training loop rank 0 may be parked, and does nothing
        meanwhile: there ``omni.print``, ``omni.track`` and ``omni.save`` work.
        """
        if self._engine is not None and self._engine.source is not None:
            self._engine.asked_main = True
        return bool(self._world.is_main)

    def print(self, *values: Any, **options: Any) -> None:
        """``print``, once: in the training loop on one of the workers that take part in the step, else on rank 0."""
        workers = self._prepared("print()").participants
        if self.rank == workers[0]:
            print(*values, **{"flush": True, **options})

    @property
    def plan(self) -> Plan:
        """The plan last decided: every worker's batch, who is parked, why."""
        plan: Plan = self._prepared("plan").planner.plan
        return plan

    @property
    def epoch(self) -> int:
        """The epoch that is under way or comes next; after ``load`` the one to continue with."""
        source = self._current
        if source is not None:
            return int(source.sampler.epoch if source is self._prepared("epoch").source else source.epoch)
        return self._resumed

    @property
    def global_step(self) -> int:
        """Steps of the job so far, over epochs and restarts; one counts from its ``optimizer.step()`` on, or, where the
        script makes none in it, from the next samples on.

        The same on all workers that take part, also on one that was parked.
        """
        engine = self._prepared("global_step")
        return int(engine.step if engine.source is None else engine.source.sampler.step)

    @property
    def batch(self) -> int:
        """This worker's batch in the plan (0: parked)."""
        return self.plan.batches[self.rank]

    @property
    def samples(self) -> int:
        """Samples of the batch under way that count; outside of the loop 0.

        In the last, small step of an epoch a worker may have none of its own. It then computes some that are lent to
        it, which add nothing: count by this number, not by ``len`` of the batch.
        """
        piece = self._prepared("samples").piece
        return 0 if piece is None else int(piece.samples)

    @property
    def skipped(self) -> int:
        """Steps left out because their gradient was not finite."""
        return int(self._prepared("skipped").skipped)

    def on_plan(self, listener: Callable[[Plan, int], None]) -> None:
        """Have ``listener(plan, step)`` called when a new plan is decided, with the step it takes effect at."""
        self._listeners.append(listener)

    def track(self, tracker: Tracker) -> None:
        """Have what the events say sent to ``tracker`` as it comes, from rank 0: W&B, MLflow (docs/observe.md)."""
        if self.log_dir is None:
            raise UsageError("track() needs events: give OmniLearn(log_dir=…), or start the script with omnilearn run")
        if self._world.is_main:
            self._tracking.enter_context(track(self.log_dir, tracker))

    def _announce(self, plan: Plan, step: int) -> None:
        if self._world.is_main:
            log.info("step %d: batches %s (%s)", step, plan.batches, plan.reason)
            if not plan.batches[0] and self._engine.asked_main and not self._told_parked:
                self._told_parked = True
                log.warning("rank 0 is parked from step %d on, and does not do what stands under 'if omni.is_main' in "
                            "the loop meanwhile: omni.print(…), omni.track and omni.save do", step)  # fmt: skip
        for listener in self._listeners:
            listener(plan, step)

    def _prepared(self, what: str) -> Any:
        if self._engine is None:
            raise UsageError(
                f"{what} needs a prepared model: call model, optimizer = omni.prepare(model, optimizer) first"
            )
        return self._engine

    def _adopt(self, source: Source, size: int | None, shuffle: bool | None) -> None:
        """Train from this source: the same on all ranks, at a restored position or in the next epoch."""
        self._world.agree("datasets", {"number of samples": size, "shuffle": shuffle})
        source.horizon = max(self._world.gather(source.prefetch))
        if self._restored:
            source.restore(self._restored.pop(0), self._resumed)
        elif self._current is not None:  # one made in every epoch: the next order, not the first one again
            source.restore(source.sampler.state_dict() | {"epoch": self._current.epoch})
        self._sources = [*(known for known in self._sources if known() is not None), weakref.ref(source)]
        self._made = source

    @property
    def _alive(self) -> list[Any]:
        """The sources that the script still has, in the order in which they were made."""
        return [source for known in self._sources if (source := known()) is not None]

    @property
    def _current(self) -> Any:
        """The source that training is at: the one last iterated, or else made."""
        last = None if self._engine is None else getattr(self._engine, "last_source", None)
        return last if last is not None else self._made

    # Checkpoints

    @abstractmethod
    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint."""

    def resume(self, folder: str | os.PathLike[str]) -> dict[str, Any] | None:
        """``load``, if there is a checkpoint in ``folder``: what ``save`` got as extra. None: it is the first start.

        Call it on all ranks after ``prepare``; rank 0 looks. A script that was stopped, or that the launcher starts
        again because a worker died or machines came and went, so goes on by itself (docs/checkpoints.md).
        """
        self._between_loops("resume()")
        return self.load(folder) if self._is_saved(folder) else None

    def _between_loops(self, what: str) -> Any:
        """The engine, for what all do together and not inside a training loop."""
        engine = self._prepared(what)
        if engine.source is not None:
            raise UsageError(f"{what} inside the training loop: call it before")
        engine.settle(what)
        return engine

    def _is_due(self, every: int | None) -> bool:
        """Whether ``save(every=…)`` saves now: the same on all workers that take part."""
        if every is None:
            return True
        before, now = self._last_step()
        return before // every < now // every

    @abstractmethod
    def _last_step(self) -> tuple[int, int]:
        """The job's steps before the last step that was made, and behind it; twice the same if none was made since the
        samples under way were asked for. Raises outside of the loop, where there is no such step."""

    @staticmethod
    def _no_loop() -> UsageError:
        return UsageError(
            "save(every=…) counts the steps of the training loop: call it there, after optimizer.step() or "
            "omni.step(…); between epochs call save() without it"
        )

    def _is_saved(self, folder: str | os.PathLike[str]) -> bool:
        """Whether rank 0 sees a checkpoint there: the same on all ranks."""
        return bool(self._world.gather((Path(folder) / self._checkpoint_file).is_file())[0])

    @property
    def _position(self) -> dict[str, Any]:
        """Where training is in its data, for a checkpoint: of the source under way, and of all of them."""
        current = self._current
        if current is None:
            return {"sampler": None}
        everywhere = [{**source.sampler.state_dict(), "current": source is current} for source in self._alive]
        return {"sampler": current.sampler.state_dict(), "samplers": everywhere}

    def _policy_facts(self) -> dict[str, Any]:
        """The controller's part of a checkpoint."""
        return {
            "workers": self.world_size,
            "kind": type(self._policy).__name__,
            **self._engine.planner.state.state_dict(),
        }

    def _resume(
        self, saved: dict[str, Any], position: dict[str, Any] | None, everywhere: list[dict[str, Any]] | None = None
    ) -> None:
        """Go on with the saved plan where it is for as many workers, and at the saved positions: that of the source
        under way, and those of all, in the order in which they were made."""
        engine = self._engine
        if saved["workers"] == self.world_size and saved["kind"] == type(self._policy).__name__:
            restored = self._policy.restore(engine.planner.problem, saved)
            engine.planner.restore(restored, position["step"] if position else 0)
        elif position:
            engine.planner.restore(engine.planner.state, position["step"])
        if position:
            engine.step = position["step"]
            positions = list(everywhere or [position])
            over = int(position["offset"]) == int(position["size"])
            self._resumed = int(position["epoch"]) + over  # the epoch to go on with
            for source, place in zip(self._alive, positions, strict=False):
                source.restore(place, self._resumed)
            self._restored = positions[len(self._alive) :]

    def _tell_checkpoint(self, what: str, folder: str | os.PathLike[str], step: int | None = None) -> None:
        if step is None:
            current = self._current
            step = current.sampler.step if current is not None else self._engine.step
        self._events.write("checkpoint", what=what, step=step, path=os.fspath(folder))

    # The end

    def close(self) -> None:
        """Leave the group of workers. Also done at the end of a ``with`` block."""
        if self._engine is not None:
            self._finish()
        self._events.write("end", ok=True)
        self._events.close()
        self._let_go()

    @abstractmethod
    def _finish(self) -> None:
        """Say to the others what is still to be said."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give up everything held, without a word to the others."""

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._events.write("end", ok=False, error=f"{type(error).__name__}: {error}")
            self._world.report_failure(error)
            self._let_go()  # the others must not wait for a process that lives on
        else:
            self.close()

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("iterate over the batches that it gives (loader(…), dataset(…)), not over the OmniLearn object")


def _in_words(policy: Policy) -> str:
    """The same on all ranks for the same policy: not where it lies in memory."""
    kind = type(policy)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__repr__ is object.__repr__ else repr(policy)
