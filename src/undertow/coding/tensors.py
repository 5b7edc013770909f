"""What a compressed tensor is in memory: which weights are kept, a code for each, and what the codes stand for.

In: made by pruning and sharing, or read from a file. Evaluation in this form, retraining and the file all read it. The
value of a kept weight is `codebook[code]`, times its row's scale where there are scales; all others are 0. So a pruned
tensor with shared weights has a mask and a codebook, a quantised one integers as codebook and a scale per output
channel, a binary one the codebook (-1, 1). A tensor that is not compressed this way stays a plain torch.Tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undertow.errors import CallError
from undertow.kernels.compiler import cached_njit

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_CODES = 1 << 16


@cached_njit(error_model="numpy")
def _fill(mask: Any, codes: Any, codebook: Any, values: Any) -> None:
    number = 0
    for index in range(mask.size):
        if mask[index]:
            values[index] = codebook[codes[number]]
            number += 1
        else:
            values[index] = 0


@dataclass(frozen=True, eq=False)
class CodedTensor:
    """A tensor of few values. `codes` has one number per kept weight, in the order of the weights."""

    shape: tuple[int, ...]
    mask: Tensor | None  # bool, of `shape`; None: every weight is kept
    codes: Tensor  # int32
    codebook: Tensor  # its dtype is the tensor's
    scales: Tensor | None = None  # one per row, the first dimension

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        num_weights = math.prod(self.shape)
        if self.codebook.dtype not in FLOAT_DTYPES or self.codebook.ndim != 1 or len(self.codebook) > MAX_CODES:
            raise CallError(
                f"a codebook is 1-dimensional, float32, bfloat16, float16 or float64, of at most {MAX_CODES} values; "
                f"this one is {self.codebook.dtype} with the shape {tuple(self.codebook.shape)}"
            )
        if self.mask is not None and (self.mask.dtype != torch.bool or tuple(self.mask.shape) != self.shape):
            raise CallError(
                f"the mask of a tensor of shape {self.shape} is {self.mask.dtype}, {tuple(self.mask.shape)}"
            )
        num_kept = num_weights if self.mask is None else int(self.mask.count_nonzero())
        if self.codes.dtype != torch.int32 or self.codes.shape != (num_kept,):
            raise CallError(
                f"{num_kept} kept weights need as many codes in int32; there are {tuple(self.codes.shape)} in "
                f"{self.codes.dtype}"
            )
        if num_kept and not 0 <= int(self.codes.min()) <= int(self.codes.max()) < len(self.codebook):
            raise CallError(
                f"codes from {int(self.codes.min())} to {int(self.codes.max())} do not fit a codebook of "
                f"{len(self.codebook)} values"
            )
        if self.codebook.isnan().any():
            raise CallError("a codebook holds NaN: the weights it was made from were not all numbers")
        if self.scales is not None and (
            not self.shape or self.scales.shape != self.shape[:1] or self.scales.dtype != self.codebook.dtype
        ):
            raise CallError(
                f"scales are one per row, of the codebook's dtype; those of a tensor of shape {self.shape} have the "
                f"shape {tuple(self.scales.shape)} and {self.scales.dtype}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.codebook.dtype

    @property
    def num_kept(self) -> int:
        """How many weights have a code."""
        return len(self.codes)

    def dense(self) -> Tensor:
        """All weights, as a tensor."""
        if self.mask is None:
            weights = self.codebook.index_select(0, self.codes).reshape(self.shape)
        else:
            weights = torch.empty(self.shape, dtype=self.dtype)
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self.dtype.itemsize]
            mask, values = self.mask.contiguous().reshape(-1), weights.reshape(-1).view(bits)
            _fill(mask.numpy(), self.codes.numpy(), self.codebook.contiguous().view(bits).numpy(), values.numpy())
        if self.scales is not None:
            weights = weights * self.scales.reshape(-1, *[1] * (len(self.shape) - 1))
        return weights
