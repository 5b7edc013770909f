"""A line on the terminal that says what is being done, and for how long; it is erased when that is done."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from undertow.doing import watched_by

ERASE = "\r\x1b[K"
INTERVAL_S = 1.0


class BusyLine:
    """Draws the line again every second, from a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._what, self._start_s = "", 0.0
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def show(self, what: str) -> None:
        """Show other work; the empty text erases the line."""
        with self._lock:
            self._what, self._start_s = what, time.monotonic()
            self._draw()

    def close(self) -> None:
        """Erase the line for good."""
        self._ended.set()
        self._thread.join()
        self.show("")

    def _tick(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            with self._lock:
                if self._what:
                    self._draw()

    def _num_columns(self) -> int:
        """Those of the terminal that the line is on; a terminal that says 0 has not been told."""
        return os.get_terminal_size(self._stream.fileno()).columns or 80

    def _draw(self) -> None:
        seconds = time.monotonic() - self._start_s
        passed = f" ({seconds:.0f} s)" if seconds >= INTERVAL_S else ""
        # A line as wide as the terminal would go on in the next one, and only that one would be erased.
        shown = f"{self._what} ...{passed}"[: self._num_columns() - 1] if self._what else ""
        self._stream.write(ERASE + shown)
        self._stream.flush()


@contextmanager
def busy_line() -> Iterator[None]:
    """Show what is done inside, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    line = BusyLine(sys.stderr)
    try:
        with watched_by(line.show):
            yield
    finally:
        line.close()
