"""`compact_oversized`: some kernels return a small tensor at the start of a large storage; after a copy, it is freed.

EXACT. A mean loss computes one number per element, and returns the mean in the same storage. So eager holds as many
bytes as the prediction has until the backward pass is over.
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
