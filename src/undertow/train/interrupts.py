"""Signals that end a run. After Ctrl-C or SIGTERM the run finishes its step, saves and stops.

A second Ctrl-C stops it immediately. A second SIGTERM does not, since `timeout` and schedulers may send it twice in a
row. A signal that was ignored when the process started stays ignored: shells start background jobs that way.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED, TERMINATED = "interrupted", "terminated"
REASONS = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


class Interrupts:
    """Remembers the first signal: `reason` says why the run should end, and is empty before."""

    def __init__(self) -> None:
        self.reason = ""
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # other threads may not set handlers
            for number in REASONS:
                # None: the handler is not Python's and could not be restored.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getpid() != self._process:
            # A loader waits for a process that it forked, and that process has nothing to save.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif number == signal.SIGINT and self.reason:
            raise KeyboardInterrupt
        self.reason = self.reason or REASONS[signal.Signals(number)]
