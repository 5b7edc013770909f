"""`keep_memory_mapped`: memory that a step frees stays mapped, for the next step to use.

In: nothing. Out: whether glibc's thresholds were raised. glibc returns large blocks to the system immediately and maps
fresh ones for the next tensor; the system then clears every page on its first write. Writing into fresh memory runs at
a fifth of the speed of writing into mapped memory, and a step of VGG-16 takes 750,000 page faults. With two thresholds
raised, glibc does not return the blocks. This holds for the whole process, changes no result, and is the one global
setting that planning makes; `UNDERTOW_MALLOC=off` prevents it.

Does nothing where the C library is not glibc, or where the user has set the thresholds.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc, malloc.h
LARGEST = 2**31 - 1


@cache
def keep_memory_mapped() -> bool:
    """Raise glibc's thresholds, once per process; returns whether they were raised."""
    is_unwanted = os.environ.get("UNDERTOW_MALLOC") == "off"
    is_set = any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))
    if is_unwanted or is_set or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST)) and bool(mallopt(M_TRIM_THRESHOLD, LARGEST))
