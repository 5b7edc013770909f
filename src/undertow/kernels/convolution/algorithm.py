"""What every convolution algorithm offers.

In: dense channels_last activations, contiguous [out, in / groups, kernel height, kernel width] weights, float32, on the
CPU. Out: written into given tensors of the same layouts, using a given workspace.

A pass computes, with x the input, w the weights, y the output and ct the cotangent of y:

    FORWARD          y[o]   = relu(sum over taps and input channels of w x + bias[o])     bias and relu are optional
    BACKWARD_DATA    ct_x   = the adjoint of the sum in x, applied to ct
    BACKWARD_WEIGHT  ct_w   = the adjoint of the sum in w, applied to ct;  ct_bias = sum of ct over the pixels

If the forward pass had a ReLU, `mask` tells the backward passes where it passes the cotangent on: one bit per element
of y in the order of memory (uint8, see kernels/bits.py), or y itself (float32).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import final

import torch
from torch import Tensor

from undertow.kernels.convolution.shape import ConvolutionShape

# Half a unit in the last place of float32: the largest relative error of one rounding.
UNIT_ROUNDOFF = 2.0**-24
ALIGNMENT_BYTES = 64


class Pass(Enum):
    """The three products of a convolution."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_WEIGHT = "backward weight"


def accumulated_error(num_roundings: int) -> float:
    """gamma_k = k u / (1 - k u): what k roundings in a row do to a value, relative to it (Higham 2002, lemma 3.1)."""
    return num_roundings * UNIT_ROUNDOFF / (1 - num_roundings * UNIT_ROUNDOFF)


def num_terms(shape: ConvolutionShape, step: Pass) -> int:
    """How many products are added up, at most, for one element of the result."""
    if step is Pass.FORWARD:
        return shape.num_taps * shape.in_channels // shape.groups
    if step is Pass.BACKWARD_DATA:
        return shape.num_taps * shape.out_channels // shape.groups
    return shape.num_out_pixels


def direct_error_bound(shape: ConvolutionShape, step: Pass) -> float:
    """For n products added in any order: n gamma_n, relative to the largest factors."""
    terms = num_terms(shape, step)
    return terms * accumulated_error(terms)


def align(num_bytes: int) -> int:
    """The next multiple of a cache line."""
    return (num_bytes + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES


class Workspace:
    """Hands out aligned pieces of a uint8 tensor, front to back; nothing is allocated."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        base = tensor.data_ptr()
        self.used_bytes = align(base) - base

    def take(self, num_bytes: int) -> Tensor:
        """The next `num_bytes`."""
        start, self.used_bytes = self.used_bytes, self.used_bytes + align(num_bytes)
        if start + num_bytes > self.tensor.numel():
            raise ValueError(
                f"a convolution needs a workspace of at least {self.used_bytes:,} bytes; it was given "
                f"{self.tensor.numel():,}; allocate workspace_bytes(...), called with the same number of threads"
            )
        return self.tensor[start : start + num_bytes]

    def take_floats(self, *sizes: int) -> Tensor:
        """The next elements as a contiguous float32 tensor."""
        return self.take(4 * torch.Size(sizes).numel()).view(torch.float32).view(sizes)


class Algorithm(ABC):
    """One way to compute the three passes. Stateless."""

    name: str

    @abstractmethod
    def refusal(self, shape: ConvolutionShape) -> str | None:
        """Why this shape cannot be computed this way, or None."""

    @abstractmethod
    def workspace_bytes(self, shape: ConvolutionShape, step: Pass) -> int:
        """The workspace that the pass needs, with PyTorch's present number of threads."""

    @abstractmethod
    def error_bound(self, shape: ConvolutionShape, step: Pass) -> float:
        """b such that every element is within b max|p| max|q| of the exact result, for the two factors p and q.

        (x and w; ct and w; x and ct.) Rounding only: it holds while nothing overflows or underflows. A bias adds
        one more rounding of the sum.
        """

    @abstractmethod
    def forward(
        self, shape: ConvolutionShape, x: Tensor, weight: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, has_relu: bool = False, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write y to `out`, and where the ReLU passes the cotangent on to `mask`."""

    @abstractmethod
    def backward_data(
        self, shape: ConvolutionShape, ct: Tensor, weight: Tensor, ct_x: Tensor, workspace: Tensor, *,
        mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the cotangent of the input to `ct_x`."""

    @abstractmethod
    def backward_weight(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor, ct_weight: Tensor, workspace: Tensor, *,
        ct_bias: Tensor | None = None, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write the cotangents of the weights and the bias."""

    def backward_bytes(self, shape: ConvolutionShape) -> int:
        """The workspace that `backward` needs to compute all results."""
        return max(self.workspace_bytes(shape, step) for step in (Pass.BACKWARD_DATA, Pass.BACKWARD_WEIGHT))

    def backward(
        self, shape: ConvolutionShape, ct: Tensor, x: Tensor | None, weight: Tensor, ct_x: Tensor | None,
        ct_weight: Tensor | None, ct_bias: Tensor | None, workspace: Tensor, *, mask: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Run each backward pass whose result tensor is given."""
        if ct_weight is not None:
            assert x is not None
            self.backward_weight(shape, ct, x, ct_weight, workspace, ct_bias=ct_bias, mask=mask)
        if ct_x is not None:
            self.backward_data(shape, ct, weight, ct_x, workspace, mask=mask)

    @final
    def new_workspace(self, shape: ConvolutionShape, step: Pass | None = None) -> Tensor:
        """A workspace for one pass, or for `backward`."""
        num_bytes = self.backward_bytes(shape) if step is None else self.workspace_bytes(shape, step)
        return torch.empty(num_bytes, dtype=torch.uint8)


class PreparedAlgorithm(Algorithm):
    """An algorithm with its own form of the weights, which can be made once for many evaluations.

    `evaluate` has the same arithmetic as `forward`, and the same bits. Abstract.
    """

    @abstractmethod
    def prepared_bytes(self, shape: ConvolutionShape) -> int:
        """The size of the prepared weights."""

    @abstractmethod
    def prepare(self, shape: ConvolutionShape, weight: Tensor, prepared: Tensor) -> None:
        """Write the weights to `prepared`, float32 in one dim."""

    @abstractmethod
    def evaluation_bytes(self, shape: ConvolutionShape) -> int:
        """The workspace that `evaluate` needs."""

    @abstractmethod
    def evaluate(
        self, shape: ConvolutionShape, x: Tensor, prepared: Tensor, out: Tensor, workspace: Tensor, *,
        bias: Tensor | None = None, residual: Tensor | None = None, has_relu: bool = False,
    ) -> None:  # fmt: skip
        """Write relu(convolution + bias + residual) to `out`; the residual has the layout of `out`."""
