"""The processes of a run, as one of them sees it. Rank 0 prints, writes, evaluates and decides; the others are told.

In: the ranks, or none for a run in one process, which is its own rank 0. Out: what rank 0 decided, on every rank. So no
two ranks can come to another end.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from undertow.errors import CallError
from undertow.free_memory import find_free_memory
from undertow.ir import format_bytes
from undertow.ranks.mesh import Mesh
from undertow.ranks.processor import describe_processor
from undertow.ranks.ranks import Ranks
from undertow.ranks.started import is_launched
from undertow.runtime.resident import resident_bytes


class Job:
    """This process among those of its run."""

    def __init__(self, ranks: Ranks | None = None, mesh: Mesh | None = None) -> None:
        self._ranks, self.mesh = ranks, mesh  # both None for one process
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
        self.is_first = self.rank == 0

    def __str__(self) -> str:
        assert self._ranks is not None
        if is_launched():
            return f"{self.size} ranks on this machine, which listen on {self._ranks.address} alone"
        return (
            f"{self.size} ranks; this one listens on {self._ranks.address}, and torchrun's store on port "
            f"{os.environ.get('MASTER_PORT')} of every interface of {os.environ.get('MASTER_ADDR')}"
        )

    def reporting(self, what: str) -> AbstractContextManager[None]:
        """What goes wrong inside is told to the other ranks."""
        return nullcontext() if self._ranks is None else self._ranks.reporting(what)

    def patient(self) -> AbstractContextManager[None]:
        """Inside, this rank may wait for processes that measure."""
        return nullcontext() if self._ranks is None else self._ranks.patient()

    def doing(self, what: str) -> AbstractContextManager[None]:
        """What is done inside, for the message if this rank is lost meanwhile."""
        return nullcontext() if self._ranks is None else self._ranks.doing(what)

    def note(self, what: str) -> None:
        """What is done from now on. It is told with the next beat, so this costs nothing."""
        if self._ranks is not None:
            self._ranks.watch.doing = what

    def decide(self, make: Callable[[], Any]) -> Any:
        """What rank 0 makes, plain data, on every rank."""
        if self._ranks is None:
            return make()
        content = self._ranks.send_bytes(json.dumps(make()).encode() if self.is_first else None)
        return json.loads(content)

    def decide_end(self, reason: str) -> str:
        """Why the run ends now, on every rank; empty if it goes on. `reason` is why this rank wants it to end."""
        if self._ranks is None:
            return reason
        watch = self._ranks.watch
        watch.wish = reason
        reason = reason or watch.wishes
        # One message of 8 bytes at each step; only the last one is followed by words.
        return str(self.decide(lambda: reason)) if self._ranks.send_number(bool(reason)) else ""

    def gather(self, own: Any) -> list[Any]:
        """Plain data of every rank, in the order of the ranks."""
        return (
            [own] if self._ranks is None else [json.loads(text) for text in self._ranks.gather_texts(json.dumps(own))]
        )

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise CallError on every rank if they do not know the same facts."""
        if self._ranks is not None:
            self._ranks.agree(facts)

    def find_other_processors(self, device: torch.device) -> str:
        """A line about ranks on another kind of processor, whose kernels may round differently; empty if none is."""
        kinds = self.gather(describe_processor() if device.type == "cpu" else torch.cuda.get_device_name(device))
        others = [rank for rank, kind in enumerate(kinds) if kind != kinds[0]]
        if not others:
            return ""
        return (
            f"warning: rank 0 computes on {kinds[0]}, rank {others[0]} on {kinds[others[0]]}: the bits of the result "
            f"depend on who computes which shard"
        )

    def share_free_memory(self, free_bytes: int, device: torch.device) -> int:
        """What each rank may take, where every rank found so much free: ranks of one machine found the same memory, and
        so did ranks of one GPU.
        """
        found = self.gather([_owner_of_memory(device), free_bytes])
        owners = [owner for owner, _ in found]
        return min(int(num_bytes) // owners.count(owner) for owner, num_bytes in found)

    def check_memory(self, peak_bytes: int, device: torch.device) -> None:
        """Raise CallError on every rank if a machine or a GPU has less memory than the plans of its ranks take."""
        if self._ranks is None:
            return
        free = find_free_memory(device)
        held_bytes = resident_bytes() if device.type == "cpu" else torch.cuda.memory_reserved(device)
        found = self.gather([_owner_of_memory(device), free.free_bytes, held_bytes, peak_bytes])
        for host in dict.fromkeys(item[0] for item in found):
            ranks = [rank for rank, item in enumerate(found) if item[0] == host]
            # What a process holds already may be of the step, or of libraries.
            there_bytes = min(found[rank][1] for rank in ranks) + sum(found[rank][2] for rank in ranks)
            needed_bytes = sum(found[rank][3] for rank in ranks)
            if needed_bytes > there_bytes:
                raise CallError(
                    f"rank {ranks[0]} has too little memory: on {host}, {len(ranks)} ranks plan to take "
                    f"{format_bytes(needed_bytes)} together, and {format_bytes(there_bytes)} are free for them; give a "
                    f"smaller --budget, which is each rank's, or fewer ranks"
                )


def _owner_of_memory(device: torch.device) -> str:
    """The machine, or a GPU of it."""
    if device.type == "cpu":
        return socket.gethostname()
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name} {gpu.uuid} of {socket.gethostname()}"
