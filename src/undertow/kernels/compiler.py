"""Numba where it can be imported; where it cannot, loops stay plain Python.

The loops of the search and of byte placement run either way. Kernels that exist for their speed, and those that take
LLVM's own instructions, are left out: whoever would offer one asks `HAS_NUMBA`, and PyTorch's kernels run instead.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

__all__ = ["HAS_NUMBA", "intrinsic", "numba"]


def _leave(*functions: Any, **options: Any) -> Any:
    """A decorator, with or without options, that leaves the function as it is."""
    return functions[0] if functions else _leave


if TYPE_CHECKING:
    import numba
    from numba.extending import intrinsic

    HAS_NUMBA = True
else:
    try:
        import numba
        from numba.extending import intrinsic

        HAS_NUMBA = True
    except ImportError as error:
        HAS_NUMBA = False
        numba, intrinsic = SimpleNamespace(njit=_leave, prange=range), _leave
        # Shown once: a module is imported once.
        warnings.warn(
            f"Numba cannot be imported ({error}): steps run by PyTorch's kernels alone, and plans are searched with "
            f"fewer moves; install numba for both",
            stacklevel=2,
        )
