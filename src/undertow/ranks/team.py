"""Workers that train one set of parameters without waiting for each other (Hogwild): what they count and lock together.

In: shared memory, and how updates are ordered. Out: locks of updates, numbers of updates, turns, the wish to end.

The first words of the memory are counters. A count is exact: it is changed under a lock. Parameters are not, unless
the user asks for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

from undertow.ranks.shared_memory import ALIGNED_TO, SharedMemory

_UPDATES, _CALLS, _ENDING, _FIRST_TURN = range(4)
_COUNTING, _UPDATING, _FIRST_PARAMETER = range(3)  # numbers of locks
_AWAY = 1 << 62  # the turn of a worker for whom nobody waits
_LOOK_S = 1e-4


class Locking(StrEnum):
    """What keeps updates of different workers apart."""

    NONE = "none"
    ONE = "one"  # one lock for all updates
    PARAMETER = "parameter"  # a lock for each parameter
    STEP = "step"  # no lock, and nobody begins a step before the others have begun theirs


def count_bytes(size: int) -> int:
    """What the counters of so many workers take."""
    return -(-8 * (_FIRST_TURN + size) // ALIGNED_TO) * ALIGNED_TO


class Team:
    """One worker among the others."""

    def __init__(self, memory: SharedMemory, rank: int, size: int, locking: Locking) -> None:
        self.memory, self.rank, self.size, self.locking = memory, rank, size, locking
        self._others = [_FIRST_TURN + other for other in range(size) if other != rank]
        self._own = _FIRST_TURN + rank
        self.leave()

    @property
    def has_locks(self) -> bool:
        """Whether updates inside the backward pass take one."""
        return self.locking in (Locking.ONE, Locking.PARAMETER)

    def lock_of(self, parameter: int) -> AbstractContextManager[None]:
        """The lock of the update of a parameter, by its number."""
        return self.memory.lock(_UPDATING if self.locking is Locking.ONE else _FIRST_PARAMETER + parameter)

    def lock_of_all(self) -> AbstractContextManager[None]:
        """The lock of an update of all parameters."""
        return self.memory.lock(_UPDATING) if self.has_locks else nullcontext()

    def count_update(self) -> int:
        """The number of the next update, counted from 0 over all workers."""
        with self.memory.lock(_COUNTING):
            self.memory.words[_UPDATES] += 1
            return self.memory.words[_UPDATES] - 1

    def count_call(self) -> int:
        """The number of calls of the step so far, over all workers, with this one."""
        with self.memory.lock(_COUNTING):
            self.memory.words[_CALLS] += 1
            return self.memory.words[_CALLS]

    def begin_epoch(self) -> None:
        """Count from 0 again. One worker does so, while the others wait."""
        self.memory.words[_UPDATES] = 0

    @property
    def is_ending(self) -> bool:
        """Whether a worker wants all to stop after their step."""
        return bool(self.memory.words[_ENDING])

    def ask_to_end(self) -> None:
        """All workers are to stop after their step."""
        self.memory.words[_ENDING] = 1

    def take_turn(self, check: Callable[[], None]) -> None:
        """Wait until no other worker is behind; `check` raises where one is lost."""
        if self.locking is not Locking.STEP:
            return
        words = self.memory.words
        if words[self._own] == _AWAY:
            words[self._own] = max((words[other] for other in self._others if words[other] != _AWAY), default=0)
        words[self._own] += 1
        while any(words[other] < words[self._own] - 1 for other in self._others):
            check()
            time.sleep(_LOOK_S)

    def leave(self) -> None:
        """Until this worker's next step nobody waits for it."""
        self.memory.words[self._own] = _AWAY
