"""The link as a lane: transfers that go on while the main thread computes.

In: transfers, each a generator. It posts messages and yields those that must have arrived before it goes on; between
two yields it may add what has come. Its first part runs when it is started, the others in the lane's own thread. So a
reduction needs nobody who looks after it between its start and its end.

Of several transfers, the one that has come least far goes on first: what it posts next can then travel while others are
waited for. Messages find each other by tags, so ranks need not go on in the same order.

A rank that is gone breaks its connections, and waiting for it raises an error here. A rank that is stopped does not. So
whoever waits for a transfer also asks `check`, which raises when the watch has given somebody up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

LOOK_AROUND_S = 0.1  # how often somebody who waits asks whether everybody is alive


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


class BrokenConnection(Exception):
    """A message cannot be sent or received."""

    def __init__(self, peer: int, cause: str) -> None:
        super().__init__(cause)
        self.peer = peer


Steps = Iterator[Sequence[Message]]


@dataclass(eq=False)
class Transfer:
    """Something that was started on the lane. `about` says in words what it is."""

    about: str
    steps: Steps
    pending: Sequence[Message]
    num_steps: int = 1  # that have run
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Lane:
    """The transfers of one rank."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._going: list[Transfer] = []
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="undertow lane", daemon=True)
        self._thread.start()

    def start(self, about: str, steps: Steps) -> Transfer:
        """Post the first messages of a transfer; it goes on by itself."""
        transfer = Transfer(about, steps, ())
        try:
            transfer.pending = next(steps)
        except StopIteration:
            transfer.is_done.set()
            return transfer
        with self._changed:
            self._going.append(transfer)
            self._changed.notify()
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Wait for the end of a transfer; raises what went wrong with it, or that a rank is gone."""
        while not transfer.is_done.wait(LOOK_AROUND_S):
            self._check()
        if transfer.error is not None:
            raise transfer.error

    def close(self) -> None:
        """End the thread. What is still on its way when a rank is lost never arrives, and is not waited for."""
        with self._changed:
            self._is_open = False
            self._changed.notify()
        self._thread.join(LOOK_AROUND_S)

    def _run(self) -> None:
        with torch.no_grad():
            while (transfer := self._take()) is not None:
                try:
                    for message in transfer.pending:
                        message.wait()
                    transfer.pending = next(transfer.steps)
                    transfer.num_steps += 1
                    continue
                except StopIteration:
                    pass
                except BaseException as error:  # whoever waits for the transfer raises it
                    transfer.error = error
                with self._changed:
                    self._going.remove(transfer)
                transfer.is_done.set()

    def _take(self) -> Transfer | None:
        with self._changed:
            self._changed.wait_for(lambda: self._going or not self._is_open)
            return min(self._going, key=lambda item: item.num_steps, default=None)
