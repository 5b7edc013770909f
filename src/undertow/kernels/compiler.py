"""Numba where it can be imported; elsewhere loops stay plain Python.

The loops of the search and of placement in the arena run either way. Kernels that exist for their speed, or use LLVM's
own instructions, are offered only with `HAS_NUMBA`; without it PyTorch's kernels run instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

__all__ = ["HAS_NUMBA", "cached_njit", "intrinsic", "numba"]


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


def cached_njit(**options: Any) -> Callable[[Any], Any]:
    """`numba.njit`, which keeps what it compiled on disk, if there is a folder that it can write."""

    def compiled(function: Any) -> Any:
        try:
            return numba.njit(cache=True, **options)(function)
        except RuntimeError as error:
            if "cannot cache function" not in str(error):
                raise
            _warn_of_no_cache()
            return numba.njit(**options)(function)

    return compiled


@cache
def _warn_of_no_cache() -> None:
    warnings.warn(
        "Numba finds no folder that it can write: kernels are compiled again in every process that uses them, which "
        "takes seconds; set NUMBA_CACHE_DIR to a folder that can be written",
        stacklevel=2,
    )
