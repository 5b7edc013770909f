"""`compact_oversized`: some kernels return a small tensor at the front of a large memory; a copy lets that go.

EXACT. A mean loss computes one number per element and returns the first element's memory, resized, as the mean: eager
holds as much as the prediction until the backward pass is over.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from undertow.ir import Program, operation_name
from undertow.ops.own import OwnOperation

_OVERSIZED: set[Any] = set()


def register_oversized(*targets: Any) -> None:
    """The outputs of `targets` lie in more memory than they need."""
    _OVERSIZED.update(targets)


def oversized_operations() -> frozenset[Any]:
    """The operations that were registered."""
    return frozenset(_OVERSIZED)


@cache
def compact_of(target: Any) -> OwnOperation:
    """`target` with its output in memory of its own size."""
    return OwnOperation(f"{operation_name(target)}.compact", partial(_run, target))


def _run(target: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    output = target(*args, **kwargs)
    return output if output.untyped_storage().nbytes() == output.nbytes else output.clone()


def compact_oversized(program: Program) -> Program:
    """The Program with a compact form of every such operation."""
    nodes = list(program.nodes)
    for position, node in enumerate(nodes):
        target: Any = node.target
        if target in _OVERSIZED:
            nodes[position] = replace(node, target=compact_of(target))
    return replace(program, nodes=tuple(nodes))
