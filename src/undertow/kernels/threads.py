"""Run Numba's parallel loops without changing any thread count, and without threads in forked processes.

In: a compiled loop and its arguments. Numba's OpenMP layer shares the OpenMP library with PyTorch and sets its number
of threads when it starts. PyTorch would then run with another number than the user chose, and add in another order.

The threads of GNU OpenMP do not survive a fork: in the child, a parallel region of PyTorch waits forever, and one of
Numba ends the process. So a child of a process that has run a step uses one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from undertow.kernels.compiler import numba

_is_forked = False


def run_parallel(loop: Callable[..., None], *args: Any) -> None:
    """Call a compiled loop on as many threads as PyTorch uses, and leave both counts as they were."""
    if _is_forked:
        _on_one_thread(loop)(*args)
        torch.set_num_threads(1)  # the first loop of a process starts Numba's threads, which sets PyTorch's count
        return
    num_threads, num_numba_threads = torch.get_num_threads(), numba.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(num_threads, most))
    try:
        loop(*args)
    finally:
        numba.set_num_threads(num_numba_threads)
        torch.set_num_threads(num_threads)


@cache
def _on_one_thread(loop: Any) -> Callable[..., None]:
    """The same loop compiled without threads. It is not cached on disk, where it would be mistaken for the other."""
    return numba.jit(**{**loop.targetoptions, "parallel": False})(loop.py_func)


@cache
def survive_forks() -> None:
    """Make processes forked from this one use one thread. Call it before anything has started threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_use_one_thread)


def _use_one_thread() -> None:
    global _is_forked
    _is_forked = True
    torch.set_num_threads(1)
