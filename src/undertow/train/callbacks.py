"""A user's functions that are called as a run goes on: a tracker, a note, an early end.

In: a file or module with any of

    on_start(config)        the run begins, or goes on: its settings as a dict
    on_step(record)         after each update: step, epoch, loss, lr, examples_per_s, ...
    on_evaluation(record)   after each evaluation: step, epoch, kind, loss, accuracy, metrics
    on_end(result)          the run has ended: what `undertow train --json` prints

A function that returns True from on_step or on_evaluation ends the run after that step. A call that takes longer than
`LIMIT_S` is stopped: a run never waits for a tracker for ever. Each gets a copy, so it cannot change the run.
"""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from undertow.errors import CallError
from undertow.train.metrics import find_line

LIMIT_S = 60.0
HOOKS = ("on_start", "on_step", "on_evaluation", "on_end")


class _TooLong(BaseException):
    """Not an Exception, which a callback may well catch."""


class Callbacks:
    """The functions of a user's file."""

    def __init__(self, name: str, functions: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
        self._name, self._functions = name, functions

    def call(self, hook: str, data: dict[str, Any]) -> bool:
        """Call one; returns whether the run should end."""
        function = self._functions.get(hook)
        if function is None:
            return False
        try:
            with _limited(LIMIT_S):
                return function(copy.deepcopy(data)) is True
        except _TooLong:
            raise CallError(
                f"{hook} in {self._name} did not return within {LIMIT_S:.0f} s and was stopped; the run is saved"
            ) from None
        except Exception as error:
            raise CallError(
                f"{hook} in {self._name} failed: {type(error).__name__}: {error}{find_line(error)}; the run is saved"
            ) from error


def find_callbacks(name: str, module: Any) -> Callbacks:
    """The callbacks of a module; raises CallError if it has none."""
    functions = {hook: getattr(module, hook) for hook in HOOKS if callable(getattr(module, hook, None))}
    if not functions:
        raise CallError(f"--callbacks {name} has none of the functions {', '.join(HOOKS)}")
    return Callbacks(name, functions)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raises _TooLong inside after so many seconds. Only the main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
