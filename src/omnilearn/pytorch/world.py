"""Who is here: this process's rank and device, its peers, and the gloo group on which they talk about the work.

Joins what torchrun (or any launcher that sets RANK and WORLD_SIZE) started, or stays alone. Checks that all ranks agree
on options and versions, and turns a broken connection into an error that names the rank that failed. Knows nothing of
batches or models.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import omnilearn
from omnilearn.cluster import resources
from omnilearn.engine.peers import Exchange, Floats, Peers
from omnilearn.errors import InfeasibleError, OmniLearnError, PeerFailure
from omnilearn.pytorch import exchange

log = logging.getLogger("omnilearn")

ALONE = (
    "it stands still, or it never came here: what workers do together (save, mean, evaluation, the loops) must be "
    "called on all of them, not under 'if omni.is_main'"
)
NOTE_WAIT = timedelta(seconds=2)
"""How long to wait for the note of a peer whose connection broke. It is written before, so this is generous."""


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
        self.failed, self.error = False, ""  # whether this process ends with an error, and which
        self.explain: Callable[[BaseException], str] = lambda error: ""  # what to do about it; the engine knows
        self._owned = False
        self.sent: list[Any] = []  # rows on their way to the thinker…
        self.mail: dict[int, exchange.Mail] = {}  # … which has some with every other rank
        if self.size > 1 and not alone:
            self._join()
        with self.alike():
            self.device = _device(device)
        self.resources = self._survey()
        self.backend = backend(self.resources)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught

    def _join(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=self.timeout)
            self._owned = True
        gloo = dist.get_backend() == "gloo"
        self.control = dist.group.WORLD if gloo else dist.new_group(backend="gloo", timeout=self.timeout)
        self._store = dist.PrefixStore("omnilearn", dist.distributed_c10d._get_default_store())
        World._number = max(self.gather(World._number + 1))  # the same on all ranks, whatever some did before
        self.tags = 2 * World._number - 1, 2 * World._number

    def _survey(self) -> tuple[resources.Resources, ...]:
        """What every rank has. FLOP/s are measured only where core counts cannot be compared (the papers' rule)."""
        mine = resources.detect(str(self.device))
        found = self.gather(mine)
        if any(r.device != "cpu" for r in found) and len(found) > 1:
            found = self.gather(resources.detect(str(self.device), measure=True))
        return tuple(found)

    def gather(self, value: Any, group: Any = None, doing: str = "exchanging values") -> list[Any]:
        """Every rank's value, in rank order, on every rank of the group (all ranks by default)."""
        group = group or self.control
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        with self.naming_the_culprit(doing):
            dist.all_gather_object(values, value, group=group)
        return values

    def exchange(self, row: Floats, thinker: int) -> Exchange:
        with self.naming_the_culprit("exchanging timings"):
            for work in self.sent:  # with the last exchange: long since there
                work.wait(self.timeout)
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
        """Turn a broken collective into an error that says which rank failed, and how."""
        try:
            yield
        except (RuntimeError, ConnectionError) as error:
            if self.control is None or isinstance(error, OmniLearnError) or not _is_connection_error(error):
                raise
            note = self._note_of_a_peer()
            if note is not None:
                raise PeerFailure(f"rank {note['rank']} failed while this rank was {doing}: {note['error']}") from None
            late = f": {ALONE}" if "timed out" in str(error).lower() else ""
            raise PeerFailure(
                f"lost the connection to a peer while {doing} ({str(error).splitlines()[0]}){late}"
            ) from error

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
                    raise error.with_traceback(trace)  # the handler formats what is being handled
                except Exception:
                    get_error_handler().record_exception(error)
        self._previous_hook(kind, error, trace)

    def close(self) -> None:
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous_hook
        self.sent.clear()
        self.mail.clear()
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
            self._owned = False
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


def _is_connection_error(error: BaseException) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "timed out", "timeout", "socket", "broken pipe", "peer"))
