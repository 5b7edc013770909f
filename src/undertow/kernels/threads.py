"""Running Numba's parallel loops without moving anyone's thread counts.

Numba's OpenMP layer shares the OpenMP library with PyTorch and sets its number of threads when it starts: PyTorch would
go on with another number than the user chose, and add in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch


def run_parallel(loop: Callable[..., None], *args: Any) -> None:
    """Call a compiled loop on as many threads as PyTorch uses, and leave both counts as they were."""
    num_threads, num_numba_threads = torch.get_num_threads(), numba.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    numba.set_num_threads(min(num_threads, most))
    try:
        loop(*args)
    finally:
        numba.set_num_threads(num_numba_threads)
        torch.set_num_threads(num_threads)
