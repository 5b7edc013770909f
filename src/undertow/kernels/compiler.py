"""Numba where it can be imported; elsewhere loops stay plain Python.

The loops of the search and of placement in the arena run either way. Kernels that exist for their speed, or use LLVM's
own instructions, are offered only with `HAS_NUMBA`; without it PyTorch's kernels run instead.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

__all__ = ["HAS_NUMBA", "intrinsic", "numba"]


def _leave_as_is(*functions: Any, **options: Any) -> Any:
    """A decorator, with or without options, that leaves the function as it is."""
    return functions[0] if functions else _leave_as_is


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
        numba, intrinsic = SimpleNamespace(njit=_leave_as_is, prange=range), _leave_as_is
        # Shown once: a module is imported once.
        warnings.warn(
            f"Numba cannot be imported ({error}): steps run with PyTorch's kernels only, and the search for plans has "
            f"fewer moves; install numba to get both back",
            stacklevel=2,
        )
