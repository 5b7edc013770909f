"""`no_collection`: Python's garbage collector waits while a step is recorded or derived.

Both make many small objects and hardly any garbage, so that collections start again and again, find nothing, and walk
over all objects of the process: 0.15 s each with PyTorch imported, a sixth of the time that a new shape took. What is
freed by its count of references, tensors above all, is freed as always. Searches and measurements are not inside: they
may take minutes, in which other threads need their collections.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Run what is inside without collections, if they are on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
