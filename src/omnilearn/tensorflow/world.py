"""Who is here: this process's rank and its peers, and which of them failed.

TF_CONFIG says who the workers are; without one this process is alone. MultiWorkerMirroredStrategy only starts the
runtime; messages are TensorFlow's own collectives on groups of workers. A broken collective becomes an error that names
the rank that failed. Knows nothing of batches or models.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import omnilearn
from omnilearn.cluster import resources
from omnilearn.engine.peers import Exchange, Floats, Peers
from omnilearn.errors import InfeasibleError, PeerFailure, UsageError
from omnilearn.tensorflow.collectives import Group

MEETING = 600.0
"""Seconds to wait for all workers to appear."""
HEARTBEAT = 20.0
"""Seconds without a sign of life after which a worker counts as gone where no connection broke."""
LINGER = 0.5
"""Seconds a failing process gives its message to reach the peers."""
MARK = "[omnilearn]"

_strategy: Any = None  # boots the runtime, once per process; must be kept


class World(Peers):
    """This process among its peers. ``control`` is the group of all (None: alone)."""

    def __init__(self, device: str | None, timeout: float, alone: bool = False) -> None:
        self.rank, self.size = (0, 1) if alone else place()
        self.timeout = timeout
        self.failed = False
        self.control: Group | None = None
        self._wanted: queue.SimpleQueue[Any] | None = None  # by the thread of exchanges
        _set_threads()
        self.device = _choose_device(device)
        if self.size > 1:
            _boot(min(timeout, MEETING))
            self.control = Group(range(self.size), timeout)
            self.timings = Group(range(self.size), timeout)  # its own: it runs beside everything else
        self.resources = self._survey()
        self._previous_hook = sys.excepthook
        if self.size > 1:
            sys.excepthook = self._on_uncaught

    def _survey(self) -> tuple[resources.Resources, ...]:
        """What every rank has. FLOP/s are measured only where core counts cannot be compared (the papers' rule)."""
        found = self.gather(_resources(self.device, None))
        if any(r.device != "cpu" for r in found) and len(found) > 1:
            found = self.gather(_resources(self.device, self.speed()))
        return tuple(found)

    def gather(self, value: Any, group: Group | None = None) -> list[Any]:
        group = group or self.control
        if group is None or len(group) < 2:
            return [value]
        with self.naming_the_culprit("exchanging values"):
            return group.values(value)

    def exchange(self, row: Floats, thinker: int) -> Exchange:
        if self._wanted is None:
            self._wanted = queue.SimpleQueue()
            # One for all of them: TensorFlow takes long to get to know a thread. A daemon: a process that ends does not
            # wait for what never comes.
            threading.Thread(target=_work_off, args=(self._wanted,), name="omnilearn-exchange", daemon=True).start()
        return _Exchange(self, row, thinker)

    def beside(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Have something done in the thread of exchanges. Returns what waits for its result."""
        assert self._wanted is not None
        result: Future[Any] = Future()
        self._wanted.put((call, result))

        def wait() -> Any:
            with self.naming_the_culprit("exchanging timings"):
                return result.result(self.timeout + 60)

        return wait

    def speed(self) -> float:
        def product(size: int) -> Callable[[], None]:
            a, b = tf.random.uniform([size, size]), tf.random.uniform([size, size])
            return lambda: tf.linalg.matmul(a, b)[0, 0].numpy()

        return resources.flops_of(product)

    def agree_versions(self) -> None:
        import keras

        versions = {"omnilearn": omnilearn.__version__, "tensorflow": tf.__version__, "keras": keras.__version__}
        self.agree("package versions", versions)

    # Failures

    @contextlib.contextmanager
    def naming_the_culprit(self, doing: str) -> Iterator[None]:
        """Turn a broken collective into an error that says which rank failed, and how."""
        try:
            yield
        except (tf.errors.OpError, TimeoutError) as error:
            text = str(error)
            if self.control is None or not _is_connection_error(error):
                raise
            note = _note(text) or _lost(text, self.timeout)
            if not isinstance(error, (tf.errors.DeadlineExceededError, TimeoutError)):  # which they notice themselves
                self._tell(note)  # who waits for us, and not for the one that failed, hears of it from us
            raise PeerFailure(f"{note} (while this rank was {doing})") from None

    def report_failure(self, error: BaseException) -> None:
        """Tell the peers, who may be waiting for this process, why it ends."""
        self.failed = True
        if self.control is None or isinstance(error, PeerFailure):
            return
        text = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[-1]
        self._tell(f"rank {self.rank} failed: {text[:300]}")

    def _tell(self, note: str) -> None:
        with contextlib.suppress(Exception):
            context.context().abort_collective_ops(tf.errors.ABORTED, f"{MARK} {note}")
            time.sleep(LINGER)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report_failure(error)
        self._previous_hook(kind, error, trace)

    def close(self) -> None:
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        if self._wanted is not None:
            self._wanted.put(None)
            self._wanted = None
        self.control = None


class _Exchange:
    """TensorFlow has no messages from rank to rank: all hear everybody's rows, and then the thinker."""

    def __init__(self, world: World, row: Floats, thinker: int) -> None:
        self._world = world
        self._rows = world.beside(lambda: world.timings.rows(row))
        if world.rank != thinker:
            self._heard = world.beside(lambda: world.timings.spread(None, thinker))

    def rows(self, awaited: Collection[int]) -> Floats:
        return np.asarray(self._rows())

    def answer(self, data: bytes) -> None:
        world = self._world
        world.beside(lambda: world.timings.spread(data, world.rank))

    def heard(self) -> bytes:
        self._rows()
        return bytes(self._heard())


def _work_off(wanted: queue.SimpleQueue[Any]) -> None:
    while (asked := wanted.get()) is not None:
        call, result = asked
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)


def config() -> dict[str, Any]:
    """TF_CONFIG, checked; {} where there is none."""
    text = os.environ.get("TF_CONFIG", "").strip()
    if not text:
        return {}
    try:
        found = json.loads(text)
        found["cluster"], found["task"] = dict(found.get("cluster") or {}), dict(found.get("task") or {})
        found["task"]["index"] = int(found["task"].get("index", 0))
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"TF_CONFIG cannot be read ({error}): it must be JSON with cluster and task") from error
    return found if found["cluster"] else {}


def place() -> tuple[int, int]:
    """This process's rank and the number of workers. A chief, where there is one, is rank 0."""
    found = config()
    if not found:
        return 0, 1
    cluster, task = found["cluster"], found["task"]
    if "ps" in cluster:
        raise UsageError("TF_CONFIG has parameter servers, which mode='sync' does not use: use mode='async'")
    chiefs, workers = len(cluster.get("chief", ())), len(cluster.get("worker", ()))
    if task.get("type") not in ("chief", "worker"):
        raise UsageError(
            f"TF_CONFIG makes this process a {task.get('type')!r}: mode='sync' has a chief and workers only"
        )
    rank = task["index"] if task["type"] == "chief" else chiefs + task["index"]
    if not 0 <= rank < chiefs + workers:
        raise UsageError(f"TF_CONFIG says task {task}, but there are {chiefs} chiefs and {workers} workers in it")
    return rank, chiefs + workers


def _boot(timeout: float) -> None:
    global _strategy
    if _strategy is not None:
        return
    cluster = config()["cluster"]
    leader = "chief" if cluster.get("chief") else "worker"
    try:
        # What the strategy would do, but without waiting for an hour for a worker that never comes.
        context.context().configure_coordination_service(
            service_type="standalone",
            service_leader=f"/job:{leader}/replica:0/task:0",
            cluster_register_timeout_in_ms=int(1e3 * timeout),
            heartbeat_timeout_in_ms=int(1e3 * HEARTBEAT),
        )
        _strategy = tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as error:
        raise UsageError(
            f"TensorFlow is in use already ({str(error).splitlines()[0]}): make OmniLearn(…) before any tensor, model "
            f"or dataset"
        ) from error
    except tf.errors.OpError as error:
        raise PeerFailure(
            f"not all workers of TF_CONFIG came within {timeout:g} s: {str(error).splitlines()[0]}"
        ) from None


def _set_threads() -> None:
    """As many threads as the launcher says: more than a worker's cores hold each other up."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use already
        if wanted.isdigit() and int(wanted) and not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(int(wanted))


def _choose_device(choice: str | None) -> str:
    """Let TensorFlow see the one device of this worker: a card of its own, or none."""
    wanted = (choice or os.environ.get("OMNILEARN_DEVICE") or "").lower().replace("cuda", "gpu")
    if wanted.partition(":")[0] not in ("", "cpu", "gpu"):
        raise InfeasibleError(f"device must be 'cpu', 'gpu' or 'gpu:1', got {choice!r}")
    cards = tf.config.list_physical_devices("GPU")
    if wanted.startswith("gpu") and not cards:
        raise InfeasibleError(f"device {choice!r} was asked for, but TensorFlow sees no GPU: use device='cpu'")
    if not cards:
        return "cpu"
    number = int(wanted.partition(":")[2] or os.environ.get("LOCAL_RANK", "0")) % len(cards)
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([] if wanted == "cpu" else [cards[number]], "GPU")
    return "cpu" if wanted == "cpu" else f"gpu:{number}"


def _resources(device: str, flops: float | None) -> resources.Resources:
    import dataclasses
    import socket

    found = resources.detect("cpu")
    if device == "cpu":
        return dataclasses.replace(found, flops=flops)
    host = socket.gethostname()
    card = tf.config.list_physical_devices("GPU")[int(device.partition(":")[2])]
    name = tf.config.experimental.get_device_details(card).get("device_name", "GPU")
    return dataclasses.replace(found, device="gpu", device_name=name, device_id=f"{host}/{device}", flops=flops)


def _is_connection_error(error: BaseException) -> bool:
    broken = (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError, TimeoutError)
    return isinstance(error, broken) or MARK in str(error) or "Collective ops is aborted" in str(error)


def _note(text: str) -> str | None:
    """What the rank that failed had to say, if it could."""
    found = re.search(re.escape(MARK) + r" ([^\n\"]*)", text)
    return found[1].rstrip("\\n") if found else None


def _lost(text: str, timeout: float) -> str:
    rank = re.search(r"/job:(chief|worker)/(?:replica:0/)?task:(\d+)", text)
    chiefs = len(config()["cluster"].get("chief", ())) if rank and rank[1] == "worker" else 0
    who = f"rank {int(rank[2]) + chiefs}" if rank else "a peer"
    if "Deadline" in text or "timed out" in text.lower():
        return f"a peer did not answer within {timeout:g} s: is it frozen, or very slow?"
    if "heartbeat" in text:
        return f"lost {who}: it gives no sign of life any more: frozen, killed, or its machine is gone"
    return f"lost {who}: its process was killed or ended, or its machine is gone"
