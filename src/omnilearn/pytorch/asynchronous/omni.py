"""``OmniLearn(mode="async")``: the same words as in synchronous mode, with the asynchronous engine behind them."""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import secrets
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import omnilearn
from omnilearn.cluster.rendezvous import local_address, reachable_address
from omnilearn.cluster.resources import cores, detect
from omnilearn.control import Plan
from omnilearn.data import compare
from omnilearn.engine.facade import check_save
from omnilearn.errors import PeerFailure, UsageError
from omnilearn.pytorch import checkpoint, checks
from omnilearn.pytorch import model as models
from omnilearn.pytorch.asynchronous import process
from omnilearn.pytorch.asynchronous.engine import AsyncEngine
from omnilearn.pytorch.asynchronous.job import Job, Kept, Likeness, Shares
from omnilearn.pytorch.asynchronous.loader import AsyncEvalLoader, LeaseLoader
from omnilearn.pytorch.asynchronous.owner import Portrait, is_scheduler
from omnilearn.pytorch.asynchronous.room import Settings
from omnilearn.pytorch.asynchronous.tensors import Tensors
from omnilearn.pytorch.asynchronous.wire import MOST_OTHERS
from omnilearn.pytorch.loader import check_options, seeded, take_over
from omnilearn.pytorch.model import fingerprint, smallest_batch
from omnilearn.pytorch.omni import AT_EXIT, OmniLearn
from omnilearn.pytorch.world import World

HOST, JOIN = "OMNILEARN_SERVER_HOST", "OMNILEARN_JOIN"
_runs: Counter[tuple[str | None, ...]] = Counter()
"""Tells several OmniLearn objects of one job apart: all ranks make them in the same order."""


class AsyncOmniLearn(OmniLearn):
    """See ``OmniLearn`` and docs/async.md."""

    def _meet_world(self, device: str | torch.device | None, timeout: timedelta, join: str | None) -> World:
        """Nobody is met: a worker only ever talks to the server. Who joins gets its rank from it."""
        world = World(device, timeout, alone=True)
        self._address, self._token = join or os.environ.get(JOIN), ""
        self._saved_at = 0  # the global step
        if self._address:
            self._token = process.token_of(self._address)
            world.rank = process.ask(self._address, {"want": "rank"}, self._token)["rank"]
        return world

    def _write_run(self, mode: str, options: dict[str, Any]) -> None:
        self._options = {"mode": mode, **options}  # the server writes it, when it knows all workers

    @property
    def _worker(self) -> AsyncEngine:
        return cast(AsyncEngine, self._prepared("this"))

    # Readable state

    @property
    def world_size(self) -> int:
        """How many workers there were when the server last answered."""
        return self._world.size if self._engine is None else self._worker.workers

    @property
    def is_main(self) -> bool:
        """Whether this is the worker with the lowest rank, the one that should print and write."""
        if self._engine is None:
            return self._world.rank == 0 and not self._address
        return self.rank == self._worker.main

    @property
    def plan(self) -> Plan:
        self._prepared("plan")
        return self._worker.plan

    @property
    def epoch(self) -> int:
        if self._engine is None:
            return 0
        return self._worker.epoch if self._worker.loader is not None else self._worker.next_epoch

    @property
    def global_step(self) -> int:
        """Global batches of samples that the server has used, over epochs and restarts, as this worker last heard."""
        self._prepared("global_step")
        return self._worker.global_step

    @property
    def server(self) -> str:
        """The server's address, for workers that join later."""
        self._prepared("server")
        return self._worker.address

    # Setting up

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *others: Any,
        find_unused_parameters: bool | None = None,
    ) -> Any:
        if self._engine is not None:
            raise UsageError("prepare() was called before: one OmniLearn object trains one model")
        checks.prepared(model, optimizer, others, self._micro_batch if self.world_size > 1 else None)
        if find_unused_parameters is not None:
            raise UsageError("find_unused_parameters is for mode='sync': asynchronous workers send what gradients "
                             "there are: leave it out")  # fmt: skip
        model = models.own(model)
        if len(others) > MOST_OTHERS:
            raise UsageError(f"prepare() takes at most {MOST_OTHERS} objects beside model and optimizer in async mode")
        if not any(p.requires_grad for p in model.parameters()):
            raise UsageError("the model has no trainable parameters: there is nothing to send")
        model.to(self.device)
        minimum = max(self._min_batch or smallest_batch(model), self._multiple_of)
        self._shares(minimum).problem([1.0])  # says now what cannot be
        passport = {
            "package versions": {"omnilearn": omnilearn.__version__, "torch": torch.__version__.split("+")[0]},
            "OmniLearn's options": {name: repr(value) for name, value in self._options.items()},
            "models": {name: repr(value) for name, value in fingerprint(model).items()}
            | {"the order of parameters": repr([name for name, _ in model.named_parameters()])},
        }
        address = self._address or self._find_server(model, optimizer, others, minimum, passport)
        means = asdict(detect(str(self.device), measure=True))
        pair, first, memory = process.join(
            address, self._token, self.rank, passport, means, self._world.timeout, Portrait(model).shared
        )
        tensors = Tensors(model, self.device, memory)
        self._engine = cast(Any, AsyncEngine(
            self._world, address, pair, first, model, tensors, optimizer, others, global_batch=self.global_batch,
            nonfinite=self._nonfinite, on_plan=self._announce, events=self._events,
        ))  # fmt: skip
        atexit.register(self._at_exit)
        models.name_module(model)
        return (model, optimizer, *others)

    def _shares(self, minimum: int) -> Shares:
        return Shares(self.global_batch, minimum, self._max_batch, self._multiple_of)

    def _find_server(self, model: Any, optimizer: Any, others: Any, minimum: int, passport: dict[str, Any]) -> str:
        """Rank 0 starts it and says where; the others hear of it in the launcher's store."""
        if self._world.size == 1:
            return self._start_server(os.environ.get(HOST, "127.0.0.1"), model, optimizer, others, minimum, passport)
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()
        else:
            store, _, _ = next(dist.rendezvous("env://", timeout=self._world.timeout))
        self._store = store  # where rank 0 hosts it, it must not end with this function
        job = tuple(map(os.environ.get, ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")))
        _runs[job] += 1
        key = f"omnilearn/async/{job[-1]}/{_runs[job]}"
        if self._world.rank == 0:
            address = self._start_server(self._host(), model, optimizer, others, minimum, passport)
            store.set(key, json.dumps([address, self._token]))
        try:
            store.wait([key], self._world.timeout)
        except RuntimeError as error:
            raise PeerFailure(f"rank 0 has not started the asynchronous server: {error}") from error
        address, self._token = json.loads(store.get(key))
        return str(address)

    def _host(self) -> str:
        """The address of this host that the others reach, and no other."""
        chosen = os.environ.get(HOST)
        if chosen:
            return chosen
        found = local_address(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}") or "127.0.0.1"
        several = self._world.size > int(os.environ.get("LOCAL_WORLD_SIZE", self._world.size))
        if several and ipaddress.ip_address(found).is_loopback:  # its own name, on Debian and Ubuntu, is 127.0.1.1
            reachable = reachable_address()
            if reachable is None:
                raise UsageError(
                    f"{os.environ['MASTER_ADDR']} is {found} here, where other hosts cannot reach the asynchronous "
                    f"server: set {HOST} to an address of this host that they can"
                )
            return reachable
        return found

    def _start_server(
        self, host: str, model: Any, optimizer: Any, others: Any, minimum: int, passport: dict[str, Any]
    ) -> str:
        self._token = secrets.token_hex(16)
        settings = Settings(
            global_batch=self.global_batch, minimum=minimum, staleness=self._options["staleness"],
            threshold=self._options["threshold"], lr_scaling=self._options["lr_scaling"],
            lease_timeout=self._options["lease_timeout"], timeout=self._world.timeout, expected=self._world.size,
            threads=process.threads(self.device.type, cores()),
        )  # fmt: skip
        kept = tuple(other if is_scheduler(other) else Kept(other.state_dict()) for other in others)
        folder = None if self.log_dir is None else os.path.abspath(self.log_dir)
        return process.start(host, Job(
            Likeness(model), optimizer, kept, self._policy, self._shares(minimum), settings, self._options, passport,
            self._token, folder,
        ))  # fmt: skip

    def loader(self, data: Any, *, train: bool = True, shuffle: bool | None = None, **options: Any) -> Any:
        self._prepared("loader()")
        if isinstance(data, DataLoader):
            inherited_batch = data.batch_size
            data, inherited = take_over(data)
            options = {**inherited, **options}
            if not train:
                options.setdefault("batch_size", inherited_batch)
            shuffle = options.pop("shuffle") if shuffle is None else shuffle
            options.pop("shuffle", None)
        check_options(options, train=train)
        check_data = options.pop("check_data", True)
        if not train:
            return AsyncEvalLoader(self._worker, data, **options)
        loader = LeaseLoader(
            self._worker, data, shuffle=bool(shuffle), seed=self.seed, micro_batch=self._micro_batch, **options
        )
        if check_data:
            loader.samples = compare.fingerprints(data, loader.size, seeded)
        self._sources = [*self._sources, weakref.ref(loader)]
        return loader

    # The loop

    def step(
        self,
        compute_loss: Callable[[Any], torch.Tensor],
        batch: Any,
        *,
        weight: float | Callable[[Any], float] | None = None,
    ) -> torch.Tensor:
        """As in synchronous mode, but running out of memory is not survived: ``micro_batch`` prevents it."""
        self._prepared("step()")
        loss = compute_loss(batch)
        self._worker.backward(loss, weight(batch) if callable(weight) else weight)
        self._worker.optimizer.step()
        self._worker.optimizer.zero_grad()
        return loss.detach()

    def mean(self, value: Any, weight: float | None = None) -> Any:
        """The mean of ``value`` over the workers, weighted. Between epochs it is the same on all of them.

        Inside the training loop nobody waits: it is over what each worker last said at this place.
        """
        self._prepared("mean()")
        engine = self._worker
        inside = engine.piece is not None
        if weight is None:
            weight = float(engine.piece.samples) if engine.piece is not None else 1.0
        tensor = torch.as_tensor(value, dtype=torch.float64).detach().cpu()
        mine = {"sum": tensor * weight if weight else torch.zeros_like(tensor), "weight": float(weight)}
        values = engine.say(mine) if inside else engine.meet(mine)["values"]
        if any(not isinstance(theirs, dict) or set(theirs) != set(mine) for theirs in values):
            raise UsageError("the workers do different things together: mean() must be called by all of them alike")
        total = sum(theirs["weight"] for theirs in values)
        if total == 0:
            raise UsageError("mean() over workers whose weights are all 0")
        result = sum(theirs["sum"] for theirs in values) / total
        return result.item() if tensor.numel() == 1 else result

    def agree(self, condition: Any, *, how: str = "any") -> bool:
        """As in synchronous mode between epochs. Inside the training loop nobody waits: it is over what each worker
        last said at this place."""
        if how not in ("any", "all"):
            raise UsageError(f"agree() takes how='any' or how='all', got {how!r}")
        self._prepared("agree()")
        engine = self._worker
        said = engine.say(bool(condition)) if engine.piece is not None else engine.meet(bool(condition))["values"]
        return bool(any(said) if how == "any" else all(said))

    def print(self, *values: Any, **options: Any) -> None:
        """``print``, on the main worker alone."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    # Checkpoints

    def save(self, folder: str | os.PathLike[str], *, every: int | None = None, **extra: Any) -> None:
        """Have the server write a checkpoint, in the format of synchronous mode. Between epochs all workers call it;
        inside the loop the main worker's call counts, and the others' do nothing. ``every``: inside the loop, once for
        every so many global batches."""
        self._prepared("save()")
        check_save(every, extra)
        engine = self._worker
        inside = engine.loader is not None
        if not self._is_due(every):
            return
        if engine.accumulating:
            raise UsageError("save() in the middle of a step: call it after the last micro-batch's optimizer.step()")
        extra = checkpoint.plain(extra, ("extra",))
        self._saved_at = engine.global_step
        if inside and not self.is_main:
            return
        local = {i: other.state_dict() for i, other in enumerate(engine.others) if not is_scheduler(other)}
        note = {"folder": os.path.abspath(folder), "extra": extra, "local": local,
                "random": checkpoint.random_state(self.device)}  # fmt: skip
        engine.save(note, together=not inside)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continue from a checkpoint of either mode; call it on all workers after ``prepare``. The server reads it."""
        engine = self._between_loops("load()")
        note = engine.load(os.path.abspath(folder))
        self._saved_at = engine.global_step
        for i, state in note["local"].items():
            engine.others[i].load_state_dict(state)
        if note["random"] is not None:
            checkpoint.restore_random_state(note["random"], self.device)
        return dict(note["extra"])

    def _between_loops(self, what: str) -> AsyncEngine:
        self._prepared(what)
        if self._worker.loader is not None or self._worker.begun:
            raise UsageError(f"{what} belongs before the first training loop")
        return self._worker

    def _last_step(self) -> tuple[int, int]:
        """Other workers make steps meanwhile: since the last time there was something to save."""
        engine = self._worker
        if engine.loader is None:
            raise self._no_loop()
        return (0, 0) if engine.accumulating else (self._saved_at, engine.global_step)

    def _is_saved(self, folder: str | os.PathLike[str]) -> bool:
        """Whether the first worker sees a checkpoint there: it is on the server's host."""
        return bool(self._worker.meet((Path(folder) / checkpoint.FILE).is_file())["values"][0])

    # The end

    def _finish(self) -> None:
        self._worker.close()

    def _abandon(self) -> None:
        self._worker.abandon()

    def _at_exit(self) -> None:
        if self._engine is not None:
            self._worker.limit(AT_EXIT)
        super()._at_exit()
