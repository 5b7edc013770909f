"""Signals that end a run: Ctrl-C once, or SIGTERM, lets the step end, saves and stops; a second Ctrl-C stops at once.

A signal that the process was started to ignore stays ignored: shells do that with SIGINT for what they start in the
background. SIGTERM never stops at once, since `timeout` and schedulers may send it twice in a row; SIGKILL does.
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
    """While inside, the first signal is only remembered: `asked` says why the run should end, and is empty before."""

    def __init__(self) -> None:
        self.asked = ""
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals are nobody else's to handle
            for number in REASONS:
                # None: a handler that is not Python's, and could not be put back.
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getpid() != self._process:
            # A process forked by a loader has nothing to save, and is waited for.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif number == signal.SIGINT and self.asked:
            raise KeyboardInterrupt
        self.asked = self.asked or REASONS[signal.Signals(number)]
