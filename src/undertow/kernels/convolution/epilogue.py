"""Around a convolution: bias, ReLU and its mask after the forward pass, that mask and ct_bias before the others.

In: dense channels_last tensors. Out: written into given tensors. For the algorithms that leave the product to a
library; those with loops of their own do the same while an element is in a register anyway. The mask holds one bit per
element in the order of memory, as kernels/bits.py packs it, set where the output is not <= 0.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from torch import Tensor

from undertow.kernels.convolution.winograd_tiles import NO_GATE, PACKED_GATE, VALUE_GATE
from undertow.kernels.threads import run_parallel


def gate_of(mask: Tensor | None) -> tuple[int, int]:
    """The address of what masks a cotangent, and which kind it is: packed bits, or the ReLU's output."""
    if mask is None:
        return 0, NO_GATE
    return mask.data_ptr(), PACKED_GATE if mask.dtype == torch.uint8 else VALUE_GATE


def flat(tensor: Tensor) -> Any:
    """The elements in the order of memory, as a NumPy array over the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,)).detach().numpy()


@numba.njit(parallel=True, cache=True)
def _pack_signs(elements: Any, packed: Any) -> None:
    for byte in numba.prange(packed.size):
        bits = 0
        for index in range(8 * byte, min(8 * byte + 8, elements.size)):
            bits |= (not (elements[index] <= 0)) << (index - 8 * byte)
        packed[byte] = bits


def pack_signs_into(tensor: Tensor, packed: Tensor) -> None:
    """One bit per element: whether it is not <= 0."""
    run_parallel(_pack_signs, flat(tensor), packed.numpy())


def address_of(tensor: Tensor | None) -> int:
    """Where the elements lie, or 0."""
    return 0 if tensor is None else tensor.data_ptr()
