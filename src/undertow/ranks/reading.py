"""What a rank reads of another when it needs it: a request, and a tensor as the reply.

In: what a rank offers, each as a function that finds a tensor by its number and its version. Out: tensors in the memory
of whoever asked. A thread for each other rank answers one request after the other. So the owner takes no part in
reading: others may read as often as they like, in any order, and no two ranks need read the same.

Replies do not go through the outboxes. There a message may wait behind one that its receiver has not asked for yet, and
that receiver may need the reply to come so far. A reply is never in this place: who sends a request waits for it.

A rank that leaves says so, and goes on answering until the other has heard it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import torch

from undertow.ranks.messages import BrokenConnection, GlooMessages, Message

REQUEST_TAG, REPLY_TAG = (1 << 21), (1 << 21) + 1  # packages have smaller tags
LEAVING = -1  # instead of the number of an offer

Find = Callable[[int, int], torch.Tensor]  # by number and version; it waits until this version is there


class Reading:
    """What one rank offers to the others, and reads of them."""

    def __init__(self, messages: GlooMessages, report: Callable[[BaseException], None]) -> None:
        self._messages, self._report = messages, report
        self._offers: list[Find] = []
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._left: set[int] = set()  # ranks that have said so
        self._is_leaving = False
        self._last_words: list[Message] = []

    def offer(self, find: Find) -> int:
        """Offer tensors from now on; the number by which others ask for them. All ranks offer in one order."""
        with self._changed:
            self._offers.append(find)
            self._changed.notify_all()
        if not self._threads:
            for peer in self._messages.others:
                thread = threading.Thread(
                    target=self._answer, args=(peer,), name=f"undertow reader {peer}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return len(self._offers) - 1

    def ask(self, offer: int, item: int, version: int, into: Mapping[int, torch.Tensor]) -> list[Message]:
        """Start to read an item of other ranks, of each into a flat tensor. One thread asks."""
        pending: list[Message] = []
        for peer, memory in into.items():
            if peer in self._left:
                raise BrokenConnection(peer, "it has left the job")
            pending += self._messages.receive(memory, peer, REPLY_TAG, 0)
            pending += self._messages.send_at_once(torch.tensor([offer, item, version]), peer, REQUEST_TAG, 0)
        return pending

    def close(self, timeout_s: float) -> None:
        """Leave. Others are answered until they have heard it, for so long at most: one may be gone."""
        if not self._threads:
            return
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_leaving = True
            staying = [peer for peer in self._messages.others if peer not in self._left]
        for peer in staying:
            self._say_leaving(peer)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _say_leaving(self, peer: int) -> None:
        try:
            self._last_words += self._messages.send_at_once(torch.tensor([LEAVING, 0, 0]), peer, REQUEST_TAG, 0)
        except BrokenConnection:  # it is gone already
            return

    def _answer(self, peer: int) -> None:
        """Answer the requests of another rank until it leaves."""
        request = torch.empty(3, dtype=torch.int64)
        try:
            while True:
                for message in self._messages.receive(request, peer, REQUEST_TAG, 0):
                    message.wait()
                number, item, version = request.tolist()
                if number == LEAVING:
                    self._note_leaving(peer)
                    return
                for message in self._messages.send_at_once(self._find(number, item, version), peer, REPLY_TAG, 0):
                    message.wait()
        except BrokenConnection:  # whoever needs that rank notices it
            return
        except Exception as error:  # nobody else sees what ends this thread
            self._report(error)

    def _find(self, number: int, item: int, version: int) -> torch.Tensor:
        if number < 0 or item < 0:
            raise IndexError(f"a rank asked for item {item} of offer {number}")
        with self._changed:
            self._changed.wait_for(lambda: number < len(self._offers))
        return self._offers[number](item, version)

    def _note_leaving(self, peer: int) -> None:
        with self._changed:
            self._left.add(peer)
            has_said = self._is_leaving
        if not has_said:  # so that it need not wait for this rank to leave as well
            self._say_leaving(peer)
