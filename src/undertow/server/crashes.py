"""Named points at which a test lets a process be killed, or stopped: before and after each kind of message is handled.

In: the name of a point and how often it is passed before. Out: a file that shows that the fault has fired, and a signal
of this process to itself. Without an armed point, passing one costs one comparison.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

BEFORE, AFTER, SENT = "before", "after", "sent"  # of a message: not handled yet; handled, nothing sent; all sent


@dataclass
class Fault:
    """What is to happen: at which point, after how many times, which signal, and where it is noted."""

    point: str
    num_before: int
    note: str
    number: int = signal.SIGKILL


_armed: list[Fault] = []


def arm(fault: Fault) -> None:
    """From now on, this process gets a signal when it comes to the point."""
    _armed.append(fault)


def pass_point(moment: str, message: object) -> None:
    """A point of the protocol."""
    if not _armed:
        return
    name = f"{moment} {type(message).__name__}"
    for fault in tuple(_armed):
        if fault.point == name:
            if fault.num_before:
                fault.num_before -= 1
                continue
            _armed.remove(fault)
            Path(fault.note).write_text(name)
            os.kill(os.getpid(), fault.number)
