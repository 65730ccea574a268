"""Several processes as one trainer: whose work is whose, and how results come together.

Every rank runs the same loop on the same whole rollout, so advantages, normalisers, dynamic
sampling, receipts and checkpoints are those of one process. Only three things are divided: prompts
to sample, answers to grade, rows to pass. Random numbers have names, so the division moves none.
Weights are never sent: each rank holds the whole policy, and the gradient is added up. Under full
training ranks hold rows of it (`repro.models.sharding`), and pass side by side.

Numbers travel as tensors, completions and texts pickled. Before each exchange ranks meet, so that
one that is missing is named.

Easy mistakes
-------------
* A collective that only some ranks reach: out of memory or a signal on one rank must be told to all
  before the next exchange (`any`); what attempts passes exchanges nothing.
* Averaging gradients: losses divide by counts of the whole step already, so gradients are added.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.evidence.procedure import PeerLostError

# Seconds that a rank waits for the others, and where the ranks of one host meet; written by
# `repro.run.several_ranks.rank_processes`, which imports no torch.
STALL_VARIABLE, MEETING_VARIABLE = "REPRO_STALL_TIMEOUT", "REPRO_RANKS_MEET"
STALL_SECONDS = 600.0
# Seconds of exchanges, as a step's line has them: until all ranks had come, and from there.
MEETING, EXCHANGE = "seconds_meeting", "seconds_exchange"
Told = TypeVar("Told")


class BatchError(ValueError):
    """No step can be made on a batch: something is not finite, or not rewarded; on all ranks."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those of its run; alone without arguments.

    Attributes
    ----------
    stall
        Seconds after which a rank that does not come to an exchange is missing.
    devices
        The group of what lies on GPUs; ranks meet, and exchange the rest, by gloo.
    abreast
        Whether each pass is one of all ranks: they gather weights in it, so all make as many.
    spent
        `MEETING` and `EXCHANGE` of all exchanges but of grades; empty before the first. What ranks
        that divide weights gather in a pass is not in it.
    """

    rank: int = 0
    world: int = 1
    stall: float = STALL_SECONDS
    devices: dist.ProcessGroup | None = None
    abreast: bool = False
    spent: dict[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def joined(cls) -> Ranks:
        """Join the group that torchrun's variables name, or be in it already; alone without."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        return cls() if world == 1 else _joined(world)

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.rank == 0

    def mine(self, sizes: Sequence[int]) -> list[int]:
        """Return this rank's items: the largest first, each to the rank that has least."""
        largest_first = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        if self.abreast:
            return largest_first[self.rank :: self.world]
        loads, own = [0] * self.world, [list[int]() for _ in range(self.world)]
        for item in largest_first:
            least = loads.index(min(loads))
            loads[least] += sizes[item]
            own[least].append(item)
        return sorted(own[self.rank])

    def beside(self, items: int) -> int:
        """Return how many passes this rank makes for the others' sake alone, of so many items."""
        own = len(range(self.rank, items, self.world))
        return -(-items // self.world) - own if self.abreast else 0

    def meet(self, before: str) -> None:
        """Wait for all ranks, where they pass abreast: of one that stalls only this tells."""
        if self.abreast:
            self._exchange(before, lambda: None)

    def add(self, *tensors: Tensor, of: str) -> None:
        """Add up tensors, named by `of`, over all ranks, in place, to the same bits on each."""

        def add_each() -> None:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.devices if tensor.is_cuda else None)
            _wait_for_device(tensors)

        if self.world > 1:
            _wait_for_device(tensors)  # what makes them is no part of the exchange
            self._exchange(of, add_each)

    def add_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return whole numbers, each added up over all ranks."""
        total = torch.tensor(numbers, dtype=torch.int64)
        self.add(total, of="grades")
        return [int(number) for number in total.tolist()]

    def add_gradients(
        self, parameters: Mapping[str, nn.Parameter], step: int, cut: Collection[str] = ()
    ) -> None:
        """Add up every parameter's gradient, in place, as one tensor; but of those that are `cut`.

        A gradient that is not finite raises on all ranks and names rank, tensor and step.
        """
        if self.world == 1:
            return
        found = [(name, p.grad) for name, p in sorted(parameters.items())]
        gradients = {name: gradient for name, gradient in found if gradient is not None}
        added = [gradient for name, gradient in gradients.items() if name not in cut]
        flat = torch.cat([gradient.flatten() for gradient in added])
        problem = None
        if not all(bool(own.isfinite().all()) for own in (flat, *(gradients[n] for n in cut))):
            name = next(name for name, own in gradients.items() if not bool(own.isfinite().all()))
            problem = f"the gradient of {name} is not finite at step {step + 1}"
        self.agree(problem)
        self.add(flat, of="gradients")
        sizes = [gradient.numel() for gradient in added]
        for gradient, part in zip(added, flat.split(sizes), strict=True):
            gradient.copy_(part.view_as(gradient))

    def agree(self, problem: str | None) -> None:
        """Raise `BatchError` on all ranks alike where one has a problem; all must ask."""
        if self.any(problem is not None):
            texts = self.objects(problem or "")
            found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
            raise BatchError("; ".join(found) if self.world > 1 else problem)

    def any(self, mine: bool) -> bool:
        """Return whether it is so on any rank; all must ask."""
        flag = torch.tensor(int(mine))
        self.add(flag, of="flags")
        return bool(flag)

    def objects(self, own: Told) -> list[Told]:
        """Return what every rank has, pickled on the way."""
        every = [own] * self.world
        if self.world > 1:
            self._exchange("completions", lambda: dist.all_gather_object(every, own))
        return every

    def require_same(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Raise `ValueError` on all ranks unless the trained tensors are the same to the bit."""
        if self.world == 1:
            return
        digests = self.objects(_digest(tensors))
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise ValueError(
                f"what is trained on rank {other[0]} differs from rank 0 after step {step}; "
                "ranks must hold the same, and no checkpoint was written"
            )

    def _exchange(self, of: str, act: Callable[[], object]) -> None:
        """Meet, then exchange; `PeerLostError` says which rank did not come, and to what.

        The first rank alone knows who is missing; the others leave it the time to say so.
        """
        patience = self.stall if self.first else 2 * self.stall
        times = [time.perf_counter()]
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=patience), wait_all_ranks=True)
            times.append(time.perf_counter())
            act()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise PeerLostError(
                f"rank {self.rank} on {socket.gethostname()} waited up to {patience:g} s to "
                f"exchange {of}: {reason}"
            ) from error
        times.append(time.perf_counter())
        for name, (begun, ended) in zip((MEETING, EXCHANGE), pairwise(times), strict=True):
            self.spent[name] = self.spent.get(name, 0.0) + (ended - begun) * (of != "grades")


@functools.cache
def _joined(world: int) -> Ranks:
    """Join the group of this process's run, once; `PeerLostError` names ranks that do not come."""
    stall = float(os.environ.get(STALL_VARIABLE, STALL_SECONDS))
    rank, meeting = int(os.environ["RANK"]), os.environ.get(MEETING_VARIABLE, "env://")
    longer = timedelta(seconds=3 * stall)  # ranks meet first, which names the missing
    places, missing = [f"rank {number}" for number in range(world)], ""
    try:
        store, _, _ = next(dist.rendezvous(meeting, rank, world, timeout=longer))
        store.set(places[rank], "here")
        if rank == 0:  # as for exchanges, the first knows who is missing
            with contextlib.suppress(RuntimeError):
                store.wait(places, longer)
            missing = ", ".join(place for place in places if not store.check([place]))
        if not missing:
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=longer
            )
    except RuntimeError as error:
        missing = f"the others: {str(error).splitlines()[0]}"
    if missing:
        raise PeerLostError(
            f"rank {rank} on {socket.gethostname()} waited up to {3 * stall:g} s to be joined by "
            f"{missing}"
        )
    on_gpus = dist.new_group(backend="nccl", timeout=longer) if torch.cuda.is_available() else None
    return Ranks(dist.get_rank(), world, stall, on_gpus)


def _wait_for_device(tensors: Sequence[Tensor]) -> None:
    """Wait where tensors are on a GPU, whose work goes on behind the host's clock."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.synchronize()


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


ALONE = Ranks()
