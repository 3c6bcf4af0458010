"""The asynchronous engine, as the chief runs it: hands out steps, hears what became of them, changes batches.

A ClusterCoordinator gives each step to whichever worker is free, and to another one where a worker dies. Workers and
parameter servers run TensorFlow's own server and nothing of the user's script after ``OmniLearn(mode="async")``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from omnilearn.cluster.resources import Resources
from omnilearn.control import Plan
from omnilearn.engine.journal import Journal
from omnilearn.engine.planning import Planning
from omnilearn.engine.progress import Progress
from omnilearn.engine.window import Window
from omnilearn.errors import PeerFailure
from omnilearn.observe import EventLog
from omnilearn.tensorflow.asynchronous.cluster import Cluster
from omnilearn.tensorflow.asynchronous.step import Rules, Shared, Told, Walk, on_worker, told
from omnilearn.tensorflow.engine import NonFiniteError

log = logging.getLogger("omnilearn")

AHEAD = 2
"""Steps under way for each worker, so that none waits for the chief."""
AT_END = 30.0
"""Seconds to wait for the steps under way when one has failed."""
LOG_EVERY = 0.5
"""Seconds between two entries of steps in the events."""


class AsyncEngine:
    """The chief's side. ``epoch`` is the one under way or the next; it ends when ``goal`` samples were used in all."""

    def __init__(
        self,
        cluster: Cluster,
        planning: Planning,
        journal: Journal,
        model: keras.Model,
        optimizer: Any,
        *,
        global_batch: int,
        rules: Rules,
        nonfinite: str,
        timeout: float,
        on_plan: Callable[[Plan, int], None],
        events: EventLog,
    ) -> None:
        self.cluster, self.planning, self._journal = cluster, planning, journal
        self.model, self.optimizer = model, optimizer
        self._global_batch, self._rules, self._nonfinite = global_batch, rules, nonfinite
        self._timeout, self._on_plan, self._events = timeout, on_plan, events
        # What the workers have is known to nobody here: equal, until they are measured.
        planning.roster({k: Resources(host, 1.0, "cpu", "", "", 0) for k, host in enumerate(cluster.hosts)})
        with cluster.strategy.scope():
            self.shared = Shared(planning.plan.batches)
        self.epoch, self.goal, self.skipped = 0, 0, 0
        self._samples = 0  # as far as the chief heard
        self.traced: Any = None
        self._walk: Walk | None = None
        self._window: Window | None = None  # of the epoch under way
        self._progress = Progress()
        self._story = _Story(events, cluster.size)

    @property
    def variables(self) -> list[Any]:
        """What makes up the state of training: the model's weights and the optimizer's."""
        return [*self.model.weights, *self.optimizer.variables]

    @property
    def running(self) -> bool:
        return self._window is not None

    # State

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "goal": self.goal, **self.shared.state_dict()}

    def load_state_dict(self, state: dict[str, Any], plan: dict[str, Any]) -> None:
        self.epoch, self.goal = state["epoch"], state["goal"]
        self.shared.load_state_dict(state)
        self._samples = self.shared.counts().samples
        self.planning.restore(plan)
        self.shared.batches.assign(self.planning.plan.batches)

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """In here no step is under way, so that what is read belongs together."""
        with self._window.rest(self._timeout) if self._window is not None else contextlib.nullcontext():
            yield

    # Training

    def feed(self, walk: Walk) -> None:
        """Train on these samples from now on."""
        self._walk = walk

        def step() -> Any:
            return self.cluster.strategy.run(on_worker, args=(self.model, self.shared, walk, self._rules))

        self.traced = tf.function(step, autograph=False)

    def run_epoch(self, epoch: int, heard: Callable[[int, float], None]) -> None:
        """Have steps done until as many samples more were used as there are. ``heard(number, loss)``: of each."""
        assert self._walk is not None
        counts, size = self.shared.counts(), self._walk.size
        if counts.samples >= self.goal:  # else it goes on in the middle of an epoch
            self.goal = max(self.goal + size, counts.samples + 1)
        self.epoch = epoch
        hosts = [{"host": host, "cores": None, "device": "cpu"} for host in self.cluster.hosts]
        self._samples = counts.samples
        self._journal.epoch(hosts, epoch, self.step, -(-size // self._global_batch), self.planning.plan)
        for number, row in enumerate(self._steps()):
            self._note(row)
            heard(number, row.loss)
        self._note_rest()
        self.epoch = epoch + 1

    def _steps(self) -> Iterator[Told]:
        """What every step tells, until enough samples were used; those under way then are waited for."""
        results: queue.Queue[Any] = queue.Queue(maxsize=self.cluster.size)  # who is far ahead of the chief waits
        window = self._window = Window(self._rules.threshold // 2 if self._rules.staleness == "bounded" else None)
        threads = [
            threading.Thread(target=self._keep_busy, args=(window, results), name=f"omnilearn-step-{k}", daemon=True)
            for k in range(AHEAD * self.cluster.size)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads) or not results.empty():
                with contextlib.suppress(queue.Empty):
                    yield self._heard(results.get(timeout=0.1))
                if self._samples >= self.goal:
                    window.close()
        finally:
            self._window = None
            window.close()
            # Where something failed they wait to be heard; the coordinator fails all steps once one has failed.
            deadline = time.monotonic() + AT_END
            while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    results.get(timeout=0.1)

    def _keep_busy(self, window: Window, results: queue.Queue[Any]) -> None:
        try:
            while (number := window.begin()) is not None:
                try:
                    result = self.cluster.coordinator.schedule(self.traced).fetch()
                finally:
                    window.end(number)
                results.put(result)
        except BaseException as error:
            results.put(error)

    def _heard(self, result: Any) -> Told:
        if isinstance(result, tf.errors.UnavailableError):
            raise PeerFailure(
                f"a parameter server is gone, and the model with it ({str(result).splitlines()[0][:200]}): start again"
            ) from None
        if isinstance(result, BaseException):
            raise result
        row = told(result)
        if not row.finite:
            self._not_finite(row)
        return row

    def _not_finite(self, row: Told) -> None:
        detail = f"the gradient of worker {row.worker} is not finite (loss {row.loss:g})"
        self._events.write("fault", step=self.step, what="non-finite gradient", worker=row.worker, then=self._nonfinite,
                           detail=detail)  # fmt: skip
        if self._nonfinite == "raise":
            raise NonFiniteError(
                f"{detail}: it was not applied; lower the learning rate, clip gradients, or leave such steps out with "
                f"OmniLearn(nonfinite='skip')"
            )
        self.skipped += 1
        log.warning("%s: left out", detail)

    # Plans and events

    @property
    def step(self) -> int:
        """Global batches of samples that were used, as far as the chief heard."""
        return self._samples // self._global_batch

    def _note(self, row: Told) -> None:
        self._samples += row.batch
        step = self.step
        self._progress.write(step)
        self._journal.update(row.worker, row.staleness, row.weight if row.finite else 0.0, row.batch)
        self._journal.write_updates(self._story.applied + row.applied, step, now=False)
        self._story.add(row)
        changes = self.planning.changes
        self.planning.record(row.worker, row.batch, row.seconds)
        if self.planning.changes != changes:
            plan = self.planning.plan
            self.shared.batches.assign(plan.batches)
            self._journal.plan(plan, step)
            self._on_plan(plan, step)

    def _note_rest(self) -> None:
        self._journal.write_updates(self._story.applied, self.step, now=True)
        self._story.write()


class _Story:
    """Each worker's steps for the events, as PyTorch's workers write them."""

    def __init__(self, events: EventLog, workers: int) -> None:
        self._events = events
        self._rows: list[list[Told]] = [[] for _ in range(workers)]
        self._steps, self._updates = [0] * workers, [0] * workers
        self._written = time.monotonic()

    @property
    def applied(self) -> int:
        return sum(self._updates)

    def add(self, row: Told) -> None:
        self._updates[row.worker] += row.applied
        self._rows[row.worker].append(row)
        if time.monotonic() - self._written > LOG_EVERY:
            self.write()

    def write(self) -> None:
        self._written = time.monotonic()
        for worker, rows in enumerate(self._rows):
            if not rows:
                continue
            self._events.write(
                "steps",
                worker=worker,
                step=self._steps[worker],
                batch=[row.batch for row in rows],
                busy=[round(row.compute, 6) for row in rows],
                wait=[round(row.pull + row.push, 6) for row in rows],
                pull=[round(row.pull, 6) for row in rows],
                push=[round(row.push, 6) for row in rows],
                staleness=[row.staleness for row in rows],
                loss=[round(row.loss, 6) for row in rows],
                updates=self._updates[worker],
            )
            self._steps[worker] += len(rows)
            rows.clear()
