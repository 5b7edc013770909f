"""What is being done just now, for whoever watches: planning a large model takes minutes.

`doing("...")` names the work inside it. `watched_by` sets who is told; without a watcher nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watcher = Callable[[str], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
_what: ContextVar[str] = ContextVar("what", default="")


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
