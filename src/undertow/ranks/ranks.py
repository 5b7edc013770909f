"""The ranks of a job, as one of them sees it: who it is, messages, the lane, the watch.

In: a mesh, and what torchrun or `undertow train` put into the environment; or the process group that the user's own
code made. Out: `Ranks`, by which a step is bound to the others. Everything listens on the address by which the store is
reached: on one machine that is the loopback.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store

from undertow.errors import CallError, RankLost
from undertow.ranks.lane import BrokenConnection, Lane, Transfer
from undertow.ranks.mesh import Mesh
from undertow.ranks.messages import Messages
from undertow.ranks.reduction import gather
from undertow.ranks.watch import Watch, first_line
from undertow.torch_internals import default_store

BOUND_S = 60.0  # a rank that does not move for so long is lost
JOINING = timedelta(seconds=120)
MAX_SENT_BYTES = 1 << 30  # of one package of bytes from another rank
PACKAGE_TAGS = 1 << 20  # transfers of steps have smaller tags

_JOINED: list[Ranks] = []


class Ranks:
    """This process among the others."""

    def __init__(self, store: Store, rank: int, size: int, address: str, bound_s: float = BOUND_S) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore("undertow", store)
        self.watch = Watch(self._store, rank, size, bound_s)
        self.watch.start()
        self.messages = Messages(self._store, rank, size, address)
        self.lane = Lane(self.watch.check)
        self._num_packages = 0

    @contextmanager
    def reporting(self, doing: str) -> Iterator[None]:
        """What goes wrong inside is told to the other ranks, which then end as well."""
        self.watch.doing = doing
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            self.watch.report_own(f"failed with {type(error).__name__}: {first_line(error)}")
            raise
        finally:
            self.watch.doing = ""

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer; raises RankLost."""
        try:
            self.lane.finish(transfer)
        except BrokenConnection as error:
            raise self.watch.explain(error, error.peer) from error

    def send_bytes(self, data: bytes | None) -> bytes:
        """The bytes that rank 0 gives, on every rank; the others give None."""
        size = torch.tensor([0 if data is None else len(data)])
        self._pass_on(size)
        if not 0 <= int(size) <= MAX_SENT_BYTES:
            raise CallError(f"rank 0 wants to send {int(size)} bytes; at most {MAX_SENT_BYTES} are taken")
        content = torch.empty(int(size), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._pass_on(content)
        return content.numpy().tobytes()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise CallError on every rank if they do not know the same facts; the message says who differs in what."""
        found = self.gather_texts(json.dumps(facts, sort_keys=True))
        read = [json.loads(text) for text in found]
        for name in facts:
            values = [item.get(name) if isinstance(item, dict) else None for item in read]
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                raise CallError(
                    f"the ranks differ in {name}: rank 0 has {_show(values[0])}, rank {others[0]} has "
                    f"{_show(values[others[0]])}; all ranks must be started with the same model, data, options and "
                    f"versions"
                )

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in the order of the ranks."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._gather(torch.tensor([len(data)]), sizes)
        if max(map(int, sizes)) > MAX_SENT_BYTES or min(map(int, sizes)) < 0:
            raise CallError("a rank wants to send more than is taken")
        texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self._gather(data, texts)
        return [item.numpy().tobytes().decode(errors="replace") for item in texts]

    def close(self) -> None:
        """Leave the job; whoever has left is not missed."""
        self.lane.close()
        self.watch.stop()
        if self in _JOINED:
            _JOINED.remove(self)
            atexit.unregister(self.close)

    def _pass_on(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, to all."""
        pending = []
        tag = self._next_tag()
        if self.rank == 0:
            for other in range(1, self.size):
                pending += self.messages.send(tensor, other, tag, 0)
        else:
            pending += self.messages.receive(tensor, 0, tag, 0)
        self.finish(self.lane.start("a package", iter([pending])))

    def _gather(self, own: torch.Tensor, into: list[torch.Tensor]) -> None:
        self.finish(self.lane.start("a package", gather(self.messages, self._next_tag(), own, into)))

    def _next_tag(self) -> int:
        self._num_packages += 1
        return PACKAGE_TAGS + self._num_packages % 1024


def join(mesh: Mesh, bound_s: float = BOUND_S) -> Ranks:
    """This process's place in the job; the same object at every call."""
    if _JOINED:
        ranks = _JOINED[0]
    else:
        ranks = _join(bound_s)
        _JOINED.append(ranks)
        atexit.register(ranks.close)  # a thread that is still in gloo when the process ends would abort it
    if ranks.size != mesh.num_ranks:
        raise CallError(
            f"the mesh {mesh} has {mesh.num_ranks} ranks, and {ranks.size} processes were started; start as many, or "
            f"give another mesh"
        )
    return ranks


def _join(bound_s: float) -> Ranks:
    if distributed.is_initialized():
        store, rank, size = default_store(), distributed.get_rank(), distributed.get_world_size()
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        store, rank, size = next(distributed.rendezvous("env://", timeout=JOINING))
    else:
        raise CallError(
            "parallel= needs several processes: start them with torchrun, or with undertow train --parallel"
        )
    return Ranks(store, rank, size, _own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")), bound_s)


def _own_address(master: str) -> str:
    """The address of this machine by which it reaches the one with the store; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))
        except OSError as error:
            raise CallError(f"MASTER_ADDR is {master}, which cannot be reached: {error.strerror}") from None
        return str(probe.getsockname()[0])


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
