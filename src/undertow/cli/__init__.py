"""The command line: `undertow train` and the other commands."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # `exits.INTERRUPTED`, which is not imported yet


@contextmanager
def _quiet_interrupts() -> Iterator[None]:
    """Ctrl-C ends the process immediately until PyTorch is there: an exception in the middle of it would abort.

    Nothing has been done by then. An ignored signal stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        signal.signal(signal.SIGINT, _interrupt)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    module = sys.modules.get("torch")
    if module is None or getattr(module.__spec__, "_initializing", False):
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Ctrl-C is quiet from here on, also while libraries are imported."""
    try:
        with _quiet_interrupts():
            return _main(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _main(arguments: Sequence[str] | None) -> int:
    try:
        from undertow.cli.commands import main as run_command
    except ModuleNotFoundError as error:  # what the commands themselves are made with
        from undertow.cli.exits import WRONG_CALL
        from undertow.cli.printing import report_missing

        report_missing(error, "--json" in (sys.argv if arguments is None else arguments))
        return WRONG_CALL
    return run_command(arguments)
