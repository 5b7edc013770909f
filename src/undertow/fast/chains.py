"""Several elementwise operations in a row as one operation, by a generated loop.

In: the steps, each an operation and its operands. Out: an operation that goes over memory once.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import torch

from undertow.ir.operation import Operation, operation_maker
from undertow.kernels.outputs import Out, given
from undertow.ops.own import kernel


def _laid_out_like(result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The loop follows memory order; a cotangent from the user may have any layout, or be one number expanded."""
    if tensor.stride() == result.stride():
        return tensor
    return torch.empty_strided(tensor.shape, result.stride(), dtype=tensor.dtype).copy_(tensor)


@operation_maker
def chain(steps: Any, num_inputs: int) -> Operation:
    """(tensors of one dense layout) -> the result of the last step; an operand that is a float is a number."""

    @cache
    def compiled() -> Any:
        from undertow.kernels.elementwise import compile_chain

        return compile_chain(("full",) * num_inputs, steps, (num_inputs + len(steps) - 1,))

    def run(*tensors: torch.Tensor, out: Out = None) -> torch.Tensor:
        result = given(out, 0, lambda: torch.empty_like(tensors[0]))
        compiled()([_laid_out_like(result, tensor) for tensor in tensors], (result,))
        return result

    key = hashlib.sha256(repr((steps, num_inputs)).encode()).hexdigest()[:8]
    return kernel(f"chain({'+'.join(name for name, _ in steps)})#{key}", run, writes_into=True)
