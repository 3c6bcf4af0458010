"""Who is here: this process's rank and device, its peers, and the gloo group on which they talk about the work.

Joins what torchrun (or any launcher that sets RANK and WORLD_SIZE) started, or stays alone. What workers do together
carries its place and is compared before anything is mixed up; a broken connection becomes an error that names the rank
that failed. Knows nothing of batches or models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pickle
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import omnilearn
from omnilearn.cluster import resources
from omnilearn.engine.peers import Exchange, Floats, Peers
from omnilearn.errors import InfeasibleError, OmniLearnError, OutOfStepError, PeerFailure
from omnilearn.pytorch import exchange
from omnilearn.pytorch.watch import Place, Watch, at, line_of

log = logging.getLogger("omnilearn")

LATE = (
    "it stands still, or it never came here: what workers do together (save, mean, evaluation, the loops) must be "
    "called on all of them, not under 'if omni.is_main'"
)
NOTE_WAIT = timedelta(seconds=2)
"""How long to wait for the note of a peer whose connection broke. It is written before, so this is generous."""
SLICE = timedelta(seconds=1)
"""A collective is waited for in slices, between which the watch is asked whether it is in vain."""
FOREVER = timedelta(days=365)
"""For those who only listen: the watch sees whether somebody is there."""
PLACE_BYTES = 500

_stores: dict[tuple[str | None, ...], Any] = {}
"""The launcher's store, by job: a process that makes several OmniLearn objects has one connection to it."""
_groups: Counter[tuple[str | None, ...]] = Counter()
"""How many default groups this process made in a job: each has its own place in the store, where no stale address of
one before is found. All ranks make them in the same order."""
_open: list[tuple[World, Any]] = []
"""The worlds of this process, with the default group that we made for them: the last one destroys it."""


_abandoned: list[Any] = []
"""Groups in which something went wrong, kept until the process ends."""


class World(Peers):
    """This process among its peers. ``control`` is a gloo group of all ranks (None: alone).

    ``tags`` are those of rows and answers in its exchanges. Another world in the same process, which may use the same
    group, has others; what else is sent from rank to rank has 0.
    """

    _number = 0  # of the world last made in this process

    def __init__(self, device: str | torch.device | None, timeout: timedelta, *, alone: bool = False) -> None:
        """``alone``: take rank and size from the launcher, but meet nobody."""
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self.timeout = timeout
        self.control: Any = None
        self.watch: Watch | None = None
        self.failed, self.error = False, ""  # whether this process ends with an error, and which
        self.broken = False  # a wait failed: who came how far is not known any more
        self.explain: Callable[[BaseException], str] = lambda error: ""  # what to do about it; the engine knows
        self.where: Callable[[], tuple[int, int]] = lambda: (0, 0)  # the step, and the training loop's number
        self.sent: list[Any] = []  # rows on their way to the thinker…
        self.mail: dict[int, exchange.Mail] = {}  # … which has some with every other rank
        self._previous_hook = sys.excepthook
        if self.size > 1 and not alone:
            self._join()
        with self.alike():
            self.device = _device(device)
        self.resources = self._survey()
        self.backend = backend(self.resources)
        sys.excepthook = self._on_uncaught

    def _join(self) -> None:
        if not dist.is_initialized():
            job = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "RANK")))
            if job not in _stores:
                _stores.clear()
                _stores[job], _, _ = next(dist.rendezvous("env://", timeout=self.timeout))
            store = dist.PrefixStore(f"omnilearn/group-{_groups[job]}", _stores[job])
            _groups[job] += 1
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=self.timeout)
            _open[:] = [(self, dist.group.WORLD)]
        elif _open and _open[0][1] is dist.group.WORLD:
            _open.append((self, dist.group.WORLD))
        gloo = dist.get_backend() == "gloo"
        self.control = dist.group.WORLD if gloo else dist.new_group(backend="gloo", timeout=self.timeout)
        World._number = max(self.gather(World._number + 1))  # the same on all ranks, whatever some did before
        self.tags = 2 * World._number - 1, 2 * World._number
        base = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"omnilearn/{World._number}", base)
        self.watch = Watch(self._store, self.rank, lambda: self.timeout.total_seconds())
        self.gather(None)  # from now on each one's place can be read

    def _survey(self) -> tuple[resources.Resources, ...]:
        """What every rank has. FLOP/s are measured only where core counts cannot be compared (the papers' rule)."""
        mine = resources.detect(str(self.device))
        found = self.gather(mine)
        if any(r.device != "cpu" for r in found) and len(found) > 1:
            found = self.gather(resources.detect(str(self.device), measure=True))
        return tuple(found)

    # Together

    def place(self, what: str, detail: str = "") -> Place:
        step, loop = self.where()
        return Place(what, step, loop, detail)

    @property
    def everybody(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def meet(
        self, place: Place, group: Any = None, workers: Sequence[int] | None = None, payload: bytes = b""
    ) -> list[bytes]:
        """Everybody's payload, in rank order, once all are in the same place; else an error, the same on all.

        All-gathers, which gradients never use: gloo tells them apart from a reduction, so that ranks in different
        places wait, and hear of it, instead of adding up what does not belong together.
        """
        group, workers = group or self.control, self.everybody if workers is None else tuple(workers)
        if group is None:
            return [payload]
        mark = int.from_bytes(hashlib.blake2b(place.key.encode(), digest_size=7).digest(), "little")
        heads = self._all_gather(torch.tensor([mark, len(payload)]), group, place, workers)
        if any(int(head[0]) != mark for head in heads):
            text = f"rank {self.rank} is in {place}{at(line_of(threading.get_ident()))}"
            texts = self._all_bytes(text.encode()[:PLACE_BYTES], PLACE_BYTES, group, place, workers)
            told = "; ".join(t.rstrip(b"\0").decode(errors="replace") for t in texts)
            raise OutOfStepError(
                f"the workers do different things together: {told}: what workers do together must come in the same "
                f"order on all of them: count by omni.global_step, and stop together by omni.agree(condition)"
            )
        lengths = [int(head[1]) for head in heads]
        if not any(lengths):
            return [b""] * len(workers)
        blobs = self._all_bytes(payload, max(lengths), group, place, workers)
        return [blob[:length] for blob, length in zip(blobs, lengths, strict=True)]

    def _all_bytes(self, data: bytes, length: int, group: Any, place: Place, workers: Sequence[int]) -> list[bytes]:
        padded = torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)
        return [part.numpy().tobytes() for part in self._all_gather(padded, group, place, workers)]

    def _all_gather(self, mine: torch.Tensor, group: Any, place: Place, workers: Sequence[int]) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in workers]
        with self.naming_the_culprit(str(place)):
            self.wait(dist.all_gather(parts, mine, group=group, async_op=True), place, workers)
        return parts

    def wait(self, work: Any, place: Place, workers: Sequence[int]) -> None:
        """For a collective over gloo; raises when it is known to be in vain."""
        watch = self.watch
        if watch is None:
            work.wait()
            return
        watch.begin(place, workers)
        try:
            while True:
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError:
                    if work.is_completed():
                        raise
                self._check(watch)
        finally:
            watch.done()

    def _check(self, watch: Watch) -> None:
        try:
            watch.check()
        except OmniLearnError:
            self.broken = True
            raise

    def listen(self, work: Any, what: str, other: int, *, mutual: bool = False, patient: bool = False) -> None:
        """Wait for a message from one rank, or until it has taken one. See ``Watch``."""
        if self.watch is None:
            work.wait(self.timeout)
            return
        # A message's wait that runs out of time breaks the connection, and so ends the wait that is under way.
        how = {"mutual": mutual, "patient": patient, "interrupt": lambda: work.wait(timedelta(milliseconds=1))}
        with self.watch.waiting(self.place(what), (other,), **how):
            work.wait(FOREVER if patient else self.timeout)

    def gather(
        self, value: Any, group: Any = None, doing: str = "exchanging values", workers: Sequence[int] | None = None
    ) -> list[Any]:
        """Every rank's value, in rank order, on every rank of the group (all ranks by default)."""
        if group is None and self.control is None:
            return [value]
        return [pickle.loads(part) for part in self.meet(self.place(doing), group, workers, pickle.dumps(value))]

    def collect(self, value: Any, to: int, group: Any, doing: str, workers: Sequence[int]) -> list[Any]:
        """As ``gather``, on the rank ``to`` alone; the others get an empty list."""
        if group is None:
            return [value]
        place, data = self.place(doing), pickle.dumps(value)
        lengths = [
            int.from_bytes(part, "little") for part in self.meet(place, group, workers, len(data).to_bytes(8, "little"))
        ]
        mine = torch.frombuffer(bytearray(data.ljust(max(lengths), b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in workers] if self.rank == to else None
        with self.naming_the_culprit(doing):
            self.wait(dist.gather(mine, parts, dst=to, group=group, async_op=True), place, workers)
        return [pickle.loads(part[:n].numpy().tobytes()) for part, n in zip(parts or [], lengths, strict=False)]

    def exchange(self, row: Floats, thinker: int) -> Exchange:
        with self.naming_the_culprit("exchanging timings"):
            for work, before in self.sent:  # with the last exchange: long since there
                self.listen(work, exchange.TELLING, before, mutual=True)
            self.sent.clear()
            return exchange.Exchange(self, row, thinker)

    def flush(self, timeout: timedelta) -> None:
        """Wait until the others have heard what this rank told them in exchanges."""
        for mail in self.mail.values():
            mail.newest(wait=True, timeout=timeout)
            mail.flush(timeout)

    def speed(self) -> float:
        return resources.measure_flops(str(self.device))

    def peak_memory(self) -> int:
        on_card = self.device.type == "cuda"
        return torch.cuda.max_memory_allocated(self.device) if on_card else super().peak_memory()

    def agree_versions(self) -> None:
        self.agree("package versions", {"omnilearn": omnilearn.__version__, "torch": torch.__version__.split("+")[0]})

    # Failures

    @contextlib.contextmanager
    def naming_the_culprit(self, doing: str) -> Iterator[None]:
        """Turn an error of communication into one that says which rank failed, and how. Only around calls that
        communicate: what the user's own code raises is not for here."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if self.control is None or isinstance(error, OmniLearnError):
                raise
            log.debug("%s: %s", doing, error)
            raise self.failure(error, doing) from None

    def failure(self, error: BaseException, doing: str) -> PeerFailure:
        """What a broken connection means: our words first, gloo's behind them."""
        self.broken = True
        note = self._note_of_a_peer()
        if note is not None:
            return PeerFailure(f"rank {note['rank']} failed: {note['error']} (meanwhile here: {doing})")
        ended = self.watch.ended(self.everybody) if self.watch is not None else ""
        if ended:
            return PeerFailure(f"{ended} (meanwhile here: {doing})")
        said = (str(error).splitlines() or [""])[0]
        if "timed out" in said.lower() or "timeout" in said.lower():
            return PeerFailure(f"a peer did not come within {self.timeout.total_seconds():g} s ({doing}): {LATE} "
                               f"[{said}]")  # fmt: skip
        return PeerFailure(f"lost the connection to a peer ({doing}): its process was killed or ended, or its machine "
                           f"is gone [{said}]")  # fmt: skip

    def report_failure(self, error: BaseException) -> None:
        """Leave a note for the peers. The first failure is the one they will name."""
        self.failed, self.error = True, f"{type(error).__name__}: {error}"
        advice = self.explain(error)
        if advice:
            log.error("%s", advice)
        if self.control is None or isinstance(error, PeerFailure):
            return
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        text = f"{text}\n{advice}" if advice else text
        with contextlib.suppress(Exception):
            self._store.compare_set("failure", "", json.dumps({"rank": self.rank, "error": text}))

    def _note_of_a_peer(self) -> dict[str, Any] | None:
        try:
            self._store.wait(["failure"], NOTE_WAIT)
            note: dict[str, Any] = json.loads(self._store.get("failure"))
        except Exception:
            return None
        return note if note["rank"] != self.rank else None

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report_failure(error)
        if os.environ.get("TORCHELASTIC_ERROR_FILE") and isinstance(error, Exception):
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            with contextlib.suppress(Exception):
                try:
                    raise error
                except Exception:
                    error.__traceback__ = trace  # the handler formats what is being handled: without this frame
                    get_error_handler().record_exception(error)
            error.__traceback__ = trace
        self._previous_hook(kind, error, trace)

    def end_threads(self) -> None:
        """Tell the others that this rank is over, and end the thread that watches. Before the process ends."""
        watch, self.watch = self.watch, None
        if watch is not None:
            how = f"failed: {self.error}" if self.failed else f"has ended, behind step {self.where()[0]}"
            watch.end(how, failed=self.failed)
            watch.close()

    def close(self) -> None:
        """In this order: the thread that uses the store, what is under way, then the groups."""
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        self.end_threads()
        self.sent.clear()
        self.mail.clear()
        mine = [(world, group) for world, group in _open if world is self]
        _open[:] = [(world, group) for world, group in _open if world is not self]
        if mine and not _open and dist.is_initialized() and mine[0][1] is dist.group.WORLD:
            if self.broken:  # what is under way in them never ends, and to let go of them would wait for it
                _abandoned.extend(dist.distributed_c10d._world.pg_map)
            dist.destroy_process_group()
        self.control = None


def backend(ranks: Sequence[resources.Resources]) -> str:
    """NCCL where every rank has a card of its own; gloo where ranks share a card or some have none."""
    cards = {(rank.host, rank.device_id) for rank in ranks if rank.device == "cuda"}
    return "nccl" if len(cards) == len(ranks) and dist.is_nccl_available() else "gloo"


def _device(choice: str | torch.device | None) -> torch.device:
    wanted = choice or os.environ.get("OMNILEARN_DEVICE")
    if wanted is None:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise InfeasibleError(f"device {wanted!r} is unknown: use 'cpu', 'cuda' or 'cuda:1'") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise InfeasibleError(f"device {wanted!r} was asked for, but PyTorch sees no CUDA device: use device='cpu'")
        if device.index is None:
            local = int(os.environ.get("LOCAL_RANK", "0"))
            device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device
