"""The link as a lane: transfers that go on while the main thread computes.

In: transfers, each a generator. It posts messages and yields those that must have arrived before it goes on; between
two yields it may add what has come. Its first part runs when it is started, the others in a thread that the transfer
has for itself. So a reduction needs nobody who looks after it between its start and its end, and what has arrived never
waits for what has not. Which of several messages travels first is decided where they are sent (`messages.py`).

A transfer has ended when all that it sent has left as well. So a rank that has finished a transfer owes nobody anything
for it, and ranks that start and finish transfers in one order never wait for each other in a circle.

A rank that is gone breaks its connections, and waiting for it raises an error here. A rank that is stopped does not. So
whoever waits for a transfer also asks `check`, which raises when the watch has given somebody up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from undertow.errors import RankLost
from undertow.ranks.messages import BrokenConnection, Pending

LOOK_AROUND_S = 0.1  # how often somebody who waits asks whether everybody is alive

Steps = Iterator[Sequence[Pending]]


@dataclass(eq=False)
class Transfer:
    """Something that was started on the lane. `about` says in words what it is."""

    about: str
    steps: Steps
    pending: Sequence[Pending] = ()
    is_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    started_ns: int = field(default_factory=time.perf_counter_ns)
    ended_ns: int = 0  # 0 until it has ended

    def run(self) -> None:
        """Go on to the end. Nothing of what was sent is referred to any more when that is said."""
        try:
            self._go_on()
        except BaseException as error:  # whoever waits for the transfer raises it
            self.error = error
        self.pending = ()
        self.end()

    def end(self) -> None:
        """Whoever waits for it goes on."""
        self.ended_ns = time.perf_counter_ns()
        self.is_done.set()

    def _go_on(self) -> None:
        """Here, so that no name refers to a message any longer when the transfer is done: it holds memory."""
        while True:
            for message in self.pending:
                message.wait()
            try:
                self.pending = next(self.steps)
            except StopIteration:
                return


@dataclass(eq=False)
class Recorded:
    """What happened on a lane while somebody asked: transfers, and what the main thread waited for, and when."""

    transfers: list[Transfer] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)


class Lane:
    """The transfers of one rank."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self.recorded: Recorded | None = None  # of a step that is looked at
        self._started: SimpleQueue[Transfer | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_free = 0  # threads that wait for a transfer
        self._threads: list[threading.Thread] = []
        self._running: set[Transfer] = set()

    def start(self, about: str, steps: Steps) -> Transfer:
        """Post the first messages of a transfer; it goes on by itself. What goes wrong is raised by `finish`."""
        transfer = Transfer(about, steps)
        if self.recorded is not None:
            self.recorded.transfers.append(transfer)
        try:
            transfer.pending = next(steps)
        except StopIteration:
            transfer.end()
            return transfer
        except Exception as error:
            transfer.error = error
            transfer.end()
            return transfer
        with self._lock:
            self._running.add(transfer)
            if self._num_free:
                self._num_free -= 1
            else:
                thread = threading.Thread(target=self._run, name="undertow lane", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._started.put(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Wait for the end of a transfer; raises what went wrong with it, or that a rank is gone."""
        start_ns = time.perf_counter_ns()
        while not transfer.is_done.wait(LOOK_AROUND_S):
            self._check()
        if self.recorded is not None:
            self.recorded.waits.append((transfer.about, start_ns, time.perf_counter_ns()))
        if transfer.error is not None:
            raise transfer.error

    def settle(self) -> None:
        """Wait for all that was started, as far as it can still arrive: the others may need what is on its way."""
        with self._lock:
            running = tuple(self._running)
        for transfer in running:
            try:
                self.finish(transfer)
            except (BrokenConnection, RankLost):  # nobody is left who needs it
                return

    def close(self, timeout_s: float) -> None:
        """End the threads, and wait for them for so long at most: one may still wait for a rank that is gone."""
        deadline = time.monotonic() + timeout_s
        for _ in self._threads:
            self._started.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        with torch.no_grad():
            while (transfer := self._started.get()) is not None:
                transfer.run()
                with self._lock:
                    self._running.discard(transfer)
                    self._num_free += 1
