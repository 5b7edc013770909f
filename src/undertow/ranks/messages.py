"""Messages between ranks: tensors by torch.distributed's gloo, found by tags. Nothing is pickled.

Tensors of no elements are not sent. A tag names a bucket; the parts of its transfer have tags of their own, and two
calls that follow each other too, so that a fast rank's next call is not mistaken for this one.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from undertow.ranks.lane import BrokenConnection, Message
from undertow.torch_internals import make_gloo_group

MAX_PARTS = 64  # messages of one transfer from one rank to another
# Waiting ends by the watch, which knows who is gone. An operation's own timeout would close all connections.
NEVER = timedelta(days=30)


class Messages:
    """What one rank sends and receives."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        self.rank, self.size = rank, size
        self.sent_bytes = 0
        self._group = make_gloo_group(PrefixStore("messages", store), rank, size, address, NEVER)

    def send(self, tensor: torch.Tensor, to: int, tag: int, part: int) -> list[Message]:
        """Start to send a tensor; it must stay as it is until the message was waited for."""
        if not tensor.numel():
            return []
        self.sent_bytes += tensor.nbytes
        return [self._post(self._group.send, tensor, to, _tag(tag, part))]

    def receive(self, tensor: torch.Tensor, source: int, tag: int, part: int) -> list[Message]:
        """Start to receive into a tensor."""
        return [self._post(self._group.recv, tensor, source, _tag(tag, part))] if tensor.numel() else []

    def _post(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Message:
        try:
            return Message(call([tensor], peer, tag), peer)
        except RuntimeError as error:
            raise BrokenConnection(peer, str(error)) from error


def _tag(tag: int, part: int) -> int:
    """Parts count from -1."""
    assert -1 <= part < MAX_PARTS - 1
    return tag * MAX_PARTS + part + 1
