"""A number that tells whether dense CPU tensors were written to, from a few elements of each.

In: addresses and sizes. Out: a hash. It reads eight elements of each tensor, spread from the first to the last: what an
optimizer, a decay or a load writes shows, a write to a few chosen elements need not. About 0.1 ms for 300 tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from undertow.kernels.compiler import HAS_NUMBA, numba

if HAS_NUMBA:
    from undertow.kernels.vectors import load_byte
else:

    def load_byte(address: int) -> int:
        """The byte at an address."""
        return ctypes.string_at(int(address), 1)[0]


_NUM_SAMPLES = 8
_WORD_BYTES = 4
_HASH = 2**42 - 1  # so that a product stays within 63 bits


@numba.njit(cache=True, error_model="numpy")
def _hash(addresses: Any, num_words: Any) -> int:
    found = 0
    for index in range(addresses.size):
        for sample in range(_NUM_SAMPLES):
            place = addresses[index] + _WORD_BYTES * (sample * (num_words[index] - 1) // (_NUM_SAMPLES - 1))
            for byte in range(_WORD_BYTES):
                found = (found * 1_000_003 + load_byte(place + byte)) & _HASH
    return found


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Address and number of words of each tensor that has any; of one with gaps only the first word counts."""
    words = [(item, item.numel() * item.element_size() // _WORD_BYTES) for item in tensors]
    places = [
        (item.data_ptr(), size if torch.ops.aten.is_non_overlapping_and_dense.default(item) else 1)
        for item, size in words
        if size > 0
    ]
    addresses, sizes = numpy.array(places, numpy.int64).reshape(-1, 2).T.copy()
    return addresses, sizes


def fingerprint(places: tuple[Any, Any]) -> int:
    """The hash of what lies there now."""
    return _hash(*places)
