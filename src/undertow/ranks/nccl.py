"""Messages from GPU to GPU by NCCL, where every rank has a GPU of its own.

In: transfers as `reduction.py` writes them. Out: the same transfers as work of a stream. NCCL knows no tags: what two
ranks send each other has to be queued in one order on both. So a transfer is queued as a whole when it starts, which
all ranks do in one order. All messages between two of its steps are one group, because a GPU that waits to receive
cannot send meanwhile. The lane waits for the end of the transfer, and sees meanwhile whether all ranks live.

A peer that is gone is not noticed by NCCL here, but by the watch; then what is queued is given up.

NCCL takes memory of the GPU for itself, which no budget counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from undertow.ranks.carriers import Carrier, MakeSteps, record_end
from undertow.ranks.lane import Steps
from undertow.ranks.messages import AT_ONCE, NEVER, Messages, Pending, Urgency
from undertow.torch_internals import make_nccl_group


@dataclass(frozen=True)
class Post:
    """A message that is sent or received when its group is queued."""

    is_sent: bool
    tensor: torch.Tensor
    peer: int

    def wait(self) -> None:
        """Nothing: whoever has queued it waits for the group."""


class NcclMessages(Messages):
    """What one rank sends and receives by NCCL."""

    def send(self, tensor: torch.Tensor, to: int, tag: int, part: int, urgency: Urgency = AT_ONCE) -> Sequence[Pending]:
        self.sent_bytes += tensor.nbytes
        return [Post(True, tensor, to)] if tensor.numel() else []

    def receive(self, tensor: torch.Tensor, source: int, tag: int, part: int) -> Sequence[Pending]:
        return [Post(False, tensor, source)] if tensor.numel() else []


class NcclCarrier(Carrier):
    """Tensors of a GPU are sent to other GPUs where they lie. All ranks make it."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        self._device, self._messages = device, NcclMessages(rank, size)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._group: Any = make_nccl_group(PrefixStore("nccl", store), rank, size, NEVER)
            self._meet()

    def carry(self, make: MakeSteps, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Steps:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for posts in make(self._messages, lambda tensor: tensor):
                self._queue(posts)
        yield [record_end(self._stream)]

    def close(self) -> None:
        self._group.abort()

    def _queue(self, posts: Sequence[Any]) -> None:
        """Queue a group of messages; what the stream does next waits for them."""
        if posts:
            self._group._start_coalescing()
            for post in posts:
                call = self._group.send if post.is_sent else self._group.recv
                call([post.tensor], post.peer, 0)
            self._group._end_coalescing().wait()

    def _meet(self) -> None:
        """Make the connections, which takes all ranks: a number to and from each; to itself, if there is no other."""
        others = self._messages.others or (self._messages.rank,)
        with torch.cuda.stream(self._stream):
            numbers = torch.zeros(2, len(others), device=self._device)
            posts = [
                Post(is_sent, numbers[int(is_sent), place : place + 1], other)
                for place, other in enumerate(others)
                for is_sent in (False, True)
            ]
            self._queue(posts)
        self._stream.synchronize()
