"""How long a search may take: a round is begun only if it fits.

In: seconds, and the rounds so far. A round is expected to take as long as the longest of its kind. Pruning gets a part
of the time, the rest is for sharing. The first round of sharing runs in any case, since without it there is no file. So
a limit is exceeded by that round at most, and a search with a limit depends on how fast the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from undertow.api.calls import check_time_limit
from undertow.shrink.state import DONE, PRUNE, SHARE, State

_PRUNING_SHARE = 0.6


class TimeLimit:
    """Begins to count when it is made."""

    def __init__(self, limit_s: float) -> None:
        check_time_limit(limit_s)
        self._limit_s, self._start_s = limit_s, time.monotonic()
        self._longest_s = {PRUNE: 0.0, SHARE: 0.0}

    def end_what_does_not_fit(self, state: State) -> None:
        """Go on to sharing, or to the end, where the next round would take too long."""
        used_s = time.monotonic() - self._start_s
        if state.kind == PRUNE and used_s + self._longest_s[PRUNE] > _PRUNING_SHARE * self._limit_s:
            state.kind = SHARE
        if state.kind == SHARE and state.best and used_s + self._longest_s[SHARE] > self._limit_s:
            state.kind = DONE

    @contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Around a round of this kind."""
        start_s = time.monotonic()
        yield
        self._longest_s[kind] = max(self._longest_s[kind], time.monotonic() - start_s)
