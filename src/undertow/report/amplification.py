"""How much im2col would amplify the data of a convolution.

In: the forward pass of a Program. Out: for each convolution, the bytes of its input and of the patch matrix that turns
it into one product of matrices: a column for every position of the output, with the input's elements under the kernel
there (Chellapilla, Puri & Simard, "High performance convolutional neural networks for document processing", 2006).
With a stride of 1 that is close to the kernel's number of elements times the input: 9 times for a kernel of 3x3.

Undertow and oneDNN convolve without this matrix, or make a few rows of it at a time. Transposed convolutions have none:
they scatter patches instead of gathering them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from undertow.ir import Node

_TRANSPOSED = 6  # the argument of `convolution` that says so


@dataclass(frozen=True)
class Amplification:
    """A convolution's input, and the matrix that im2col would make of it."""

    layer: str
    location: str
    input_bytes: int
    patch_bytes: int

    @property
    def factor(self) -> float:
        """How many times the input the patch matrix is."""
        return self.patch_bytes / self.input_bytes


def find_amplifications(nodes: Iterable[Node]) -> tuple[Amplification, ...]:
    """One for each convolution that is not transposed and has an input, in their order."""
    found = []
    for node in nodes:
        if node.target is not torch.ops.aten.convolution.default or node.args[_TRANSPOSED]:
            continue
        given, weight = node.args[0].tensor_type, node.args[1].tensor_type
        batch, channels = given.shape[:2]
        positions = math.prod(node.named_outputs[0].tensor_type.shape[2:])
        # Groups change which rows belong together, not how many there are.
        elements = batch * positions * channels * math.prod(weight.shape[2:])
        size = given.dtype.itemsize
        if given.num_elements:
            origin = node.origin
            found.append(Amplification(origin.module_path, origin.location, given.num_elements * size, elements * size))
    return tuple(found)
