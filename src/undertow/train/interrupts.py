"""Ctrl-C: once lets the step end, saves and stops; twice stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While inside, the first SIGINT is only remembered."""

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # signals are nobody else's to handle
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *unused: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
