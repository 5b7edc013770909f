"""Messages between ranks: tensors by torch.distributed's gloo, found by tags. Nothing is pickled.

A large message travels in chunks. For each other rank a thread sends one chunk after the other, the most urgent one
first: so what is needed soon overtakes what is needed late, and a link is never idle while something waits. Chunks of
messages with one tag and one urgency arrive in the order in which they were sent. A tag names a bucket; the parts of
its transfer have tags of their own, and what two calls send under one tag stays in order too.

A chunk is on its way until its receiver has asked for it, and the chunks after it wait so long. So all ranks start
transfers in one order, and nobody waits for a transfer in another place of that order than the others do.

Tensors of no elements are not sent.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, Store

from undertow.torch_internals import make_gloo_group

MAX_PARTS = 64  # messages of one transfer from one rank to another
# 100 MB between two ranks took 55 ms in chunks of this size and 48 ms in one piece; in 128 KiB 64 ms.
CHUNK_BYTES = 1 << 20
SMALL_BYTES = 1 << 16  # a message that waits for nothing: a thread would take longer to wake than it takes to send
# Waiting ends by the watch, which knows who is gone. An operation's own timeout would close all connections.
NEVER = timedelta(days=30)

Urgency = tuple[int, ...]  # the least goes first
AT_ONCE: Urgency = ()


class BrokenConnection(Exception):
    """A message cannot be sent or received."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(cause)
        self.peer = peer


class Pending(Protocol):
    """Something that was started, and that whoever started it waits for."""

    def wait(self) -> None:
        """Wait for its end."""


@dataclass(frozen=True)
class Message:
    """A message on its way to or from another rank; `work` is torch.distributed's."""

    work: Any
    peer: int

    def wait(self) -> None:
        """Wait until it has arrived, or was sent."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise BrokenConnection(self.peer, str(error)) from error


@dataclass(eq=False)
class Sending:
    """A message that waits in the outbox; `wait` ends when its last chunk was sent."""

    tensor: torch.Tensor
    tag: int
    is_sent: threading.Event = field(default_factory=threading.Event)
    error: BrokenConnection | None = None

    def wait(self) -> None:
        """Wait until it was sent."""
        self.is_sent.wait()
        if self.error is not None:
            raise self.error


Waiting = tuple[Urgency, int, Sending, torch.Tensor, bool]  # a chunk in an outbox; whether it is the message's last


class Outbox:
    """What waits to be sent to one other rank."""

    def __init__(self, peer: int, post: Callable[[torch.Tensor, int], Message]) -> None:
        self._peer, self._post = peer, post
        self._waiting: list[Waiting] = []
        self._numbers = itertools.count()  # messages of one urgency go in the order in which they came
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name=f"undertow outbox {peer}", daemon=True)
        self._thread.start()

    def add(self, sending: Sending, urgency: Urgency) -> None:
        """Let a message wait for its turn."""
        chunks = sending.tensor.split(CHUNK_BYTES // sending.tensor.element_size())
        with self._changed:
            for place, chunk in enumerate(chunks):
                item = (urgency, next(self._numbers), sending, chunk, place == len(chunks) - 1)
                heapq.heappush(self._waiting, item)
            self._changed.notify()

    def close(self) -> None:
        """Send nothing more. What waits is not sent; the chunk that is on its way may wait for a rank that is gone."""
        with self._changed:
            self._is_open = False
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (note_sent := self._send_one()) is not None:
            note_sent()  # here nothing refers to the message any longer, whose memory its owner may want to free

    def _send_one(self) -> Callable[[], None] | None:
        """Send the chunk that goes next; what notes that. None when the outbox is closed."""
        item = self._next()
        if item is None:
            return None
        _, _, sending, chunk, is_last = item
        if sending.error is None:
            self._send(sending, chunk)
        return sending.is_sent.set if is_last else lambda: None

    def _next(self) -> Waiting | None:
        """The chunk that goes next; None when the outbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or not self._is_open)
            if self._is_open:
                return heapq.heappop(self._waiting)
            for _, _, sending, _, _ in self._waiting:
                sending.error = BrokenConnection(self._peer, "this rank leaves the job")
                sending.is_sent.set()
            self._waiting.clear()
            return None

    def _send(self, sending: Sending, chunk: torch.Tensor) -> None:
        """Send one chunk; whoever waits for the message raises what went wrong."""
        try:
            self._post(chunk, sending.tag).wait()
        except BrokenConnection as error:
            sending.error = error
        except Exception as error:  # nobody else sees what ends this thread
            sending.error = BrokenConnection(self._peer, f"{type(error).__name__}: {error}")


class Messages(ABC):
    """What one rank sends and receives: flat tensors."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.others = tuple(other for other in range(size) if other != rank)
        self.sent_bytes = 0

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int, tag: int, part: int, urgency: Urgency = AT_ONCE) -> Sequence[Pending]:
        """Start to send; the tensor must stay as it is until the message was waited for."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int, tag: int, part: int) -> Sequence[Pending]:
        """Start to receive into the tensor."""


class GlooMessages(Messages):
    """Messages from memory of the CPU, by gloo."""

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        super().__init__(rank, size)
        self._group = make_gloo_group(PrefixStore("messages", store), rank, size, address, NEVER)
        self._outboxes: dict[int, Outbox] = {}
        self._lock = threading.Lock()  # transfers go on in threads of their own

    def send(
        self, tensor: torch.Tensor, to: int, tag: int, part: int, urgency: Urgency = AT_ONCE
    ) -> list[Message | Sending]:
        if not tensor.numel():
            return []
        with self._lock:
            self.sent_bytes += tensor.nbytes
        number = _tag(tag, part)
        if tensor.nbytes <= SMALL_BYTES:
            return [self._post(self._group.send, tensor, to, number)]
        sending = Sending(tensor, number)
        self._outbox(to).add(sending, urgency)
        return [sending]

    def receive(self, tensor: torch.Tensor, source: int, tag: int, part: int) -> list[Message]:
        if not tensor.numel():
            return []
        number = _tag(tag, part)
        return [self._post(self._group.recv, chunk, source, number) for chunk in _chunks(tensor)]

    def send_at_once(self, tensor: torch.Tensor, to: int, tag: int, part: int) -> list[Message]:
        """Start to send a flat tensor that its receiver waits for already: it waits for no other message."""
        with self._lock:
            self.sent_bytes += tensor.nbytes
        number = _tag(tag, part)
        return [self._post(self._group.send, chunk, to, number) for chunk in _chunks(tensor)]

    def close(self, timeout_s: float) -> None:
        """Send nothing more; wait for the threads for so long at most, since one may wait for a rank that is gone."""
        deadline = time.monotonic() + timeout_s
        for outbox in self._outboxes.values():
            outbox.close()
        for outbox in self._outboxes.values():
            outbox.join(max(0.0, deadline - time.monotonic()))

    def _outbox(self, to: int) -> Outbox:
        with self._lock:
            if to not in self._outboxes:
                self._outboxes[to] = Outbox(to, lambda chunk, tag: self._post(self._group.send, chunk, to, tag))
            return self._outboxes[to]

    def _post(self, call: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Message:
        try:
            return Message(call([tensor], peer, tag), peer)
        except RuntimeError as error:
            raise BrokenConnection(peer, str(error)) from error


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A message as it travels."""
    return [tensor] if tensor.nbytes <= SMALL_BYTES else tensor.split(CHUNK_BYTES // tensor.element_size())


def _tag(tag: int, part: int) -> int:
    """Parts count from -1."""
    assert -1 <= part < MAX_PARTS - 1
    return tag * MAX_PARTS + part + 1
