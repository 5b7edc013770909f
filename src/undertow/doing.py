"""What is being done just now, for whoever watches: planning a large model takes minutes.

`doing("...")` names the work inside it. `watched_by` sets who is told; without a watcher nothing happens.

A step says nothing, since that would take longer than its smallest operations. Its code has a line for each operation,
so a frame of it, or a traceback, tells which one runs: `find_operation`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType

Watcher = Callable[[str], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_what: ContextVar[str] = ContextVar("what", default="")


STEP_FILE, STEP_SOURCE = "<undertow step>", "__source__"  # the file name of a step's code; its text, among its globals
MARK = "  # "  # before the phase and operation, at the end of a line


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Tell the watcher what is done inside, and at the end what is done around it; the empty text is nothing."""
    watcher, around = _watcher.get(), _what.get()
    if watcher is None:
        yield
        return
    token = _what.set(what)
    watcher(what)
    try:
        yield
    finally:
        _what.reset(token)
        watcher(around)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell this watcher what is done inside."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def find_operation(place: FrameType | TracebackType | None) -> str:
    """The phase and operation of the step that runs there, such as `backward mm`; empty if none does."""
    found = ""
    while place is not None:
        frame, line = (place.tb_frame, place.tb_lineno) if isinstance(place, TracebackType) else (place, place.f_lineno)
        if frame.f_code.co_filename == STEP_FILE and line is not None:
            lines = frame.f_globals[STEP_SOURCE].splitlines()
            found = lines[line - 1].partition(MARK)[2] if line <= len(lines) else ""
        place = place.tb_next if isinstance(place, TracebackType) else place.f_back
    return found
