"""Running Numba's parallel loops without moving anyone's thread counts, and in forked processes without threads.

Numba's OpenMP layer shares the OpenMP library with PyTorch and sets its number of threads when it starts: PyTorch would
go on with another number than the user chose, and add in another order.

The threads of GNU OpenMP do not survive a fork: a parallel region in the child waits for ever in PyTorch, and ends the
process in Numba. A child of a process that has made a step therefore runs on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from undertow.kernels.compiler import numba

_has_threads_gone = False


def run_parallel(loop: Callable[..., None], *args: Any) -> None:
    """Call a compiled loop on as many threads as PyTorch uses, and leave both counts as they were."""
    if _has_threads_gone:
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
    """The same loop compiled without threads; not kept on disk, where it would be taken for the other."""
    return numba.jit(**{**loop.targetoptions, "parallel": False})(loop.py_func)


@cache
def survive_forks() -> None:
    """Have processes forked from this one run on one thread; to be called before anything has threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_go_on_alone)


def _go_on_alone() -> None:
    global _has_threads_gone
    _has_threads_gone = True
    torch.set_num_threads(1)
