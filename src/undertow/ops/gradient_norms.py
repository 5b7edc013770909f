"""The norm of each gradient, found where the gradient is complete, since an update inside the backward pass frees it.

The norms lie in tensors of their own, made with the step, so that a CUDA graph may write them. Their root of the sum of
squares is the norm of all gradients together. In a batch in shards norms are of blocks, as clipping takes them
(`clipping.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from undertow.ir.live import Live
from undertow.ir.operation import Operation, register_operation
from undertow.ops.clipping import BLOCK, block_norms, in_memory_order, norm_of_blocks
from undertow.ops.updates import gradient_chain

GRADIENT_NORMS = Live("gradient norms")  # a GradientNorms


class GradientNorms:
    """The norm of each gradient in the step that ran last."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], in_blocks: bool = False) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.in_blocks = in_blocks
        self.reached: set[int] = set()  # parameters that had a gradient
        self.found = {
            id(item): item.new_zeros((-(-item.numel() // BLOCK),) if in_blocks else ()).detach()
            for item in self.parameters
        }

    def total(self) -> torch.Tensor:
        """The norm of all gradients together."""
        if self.in_blocks:
            return norm_of_blocks([norms for key, norms in self.found.items() if key in self.reached])
        return torch.stack([norm.double() for norm in self.found.values()]).square().sum().sqrt()


def _find_norm(norms: GradientNorms, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
    if norms.in_blocks:
        norms.reached.add(id(parameter))
        norms.found[id(parameter)].copy_(block_norms(in_memory_order(gradient)))
    else:
        torch.linalg.vector_norm(gradient, out=norms.found[id(parameter)])


def _rehearse(norms: GradientNorms, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
    norm = torch.zeros((), dtype=gradient.dtype, device=gradient.device)
    return lambda: torch.linalg.vector_norm(gradient, out=norm)


# (norms, parameter, gradient): finds the norm before the update that follows in the chain.
FIND_GRADIENT_NORM = register_operation(
    Operation(
        "find_gradient_norm",
        _find_norm,
        must_run=True,
        chains=lambda node: (gradient_chain(node.args[1]),),
        can_repeat=False,
        rehearse=_rehearse,
        assumed_workspace=lambda node: 0,
    )
)
