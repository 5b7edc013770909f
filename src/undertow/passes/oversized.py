"""`compact_oversized`: some kernels return a small tensor at the front of a large memory; a copy lets that go.

EXACT. A mean loss computes one number per element and returns the first element's memory, resized, as the mean: eager
holds as much as the prediction until the backward pass is over.
"""

from __future__ import annotations

from dataclasses import replace

from undertow.ir import Program
from undertow.ops.own import compact


def compact_oversized(program: Program) -> Program:
    """The Program with a compact form of every such operation."""
    return program.map_nodes(
        lambda node: (replace(node, operation=compact(node.operation)) if node.operation.is_oversized else node,)
    )
