"""`choose_pairs`: pairs of a forward and a backward operation that are replaced together.

In: a derived Program, a function that measures nodes, how to rank costs. Out: the Program with max pooling by one-byte
codes, and softmax cross entropy from the logits, where the new pair ranks lower than PyTorch's. A pair is replaced only
if nothing else reads the values that are then not made. Max pooling is EXACT, cross entropy REORDERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from undertow.fast.images import is_channels_last, is_float_image
from undertow.fast.losses import CROSS_ENTROPY, CROSS_ENTROPY_BACKWARD
from undertow.fast.pooling import MAX_POOL, MAX_POOL_BACKWARD
from undertow.ir import Node, Program, TensorType, Value
from undertow.ir.cost import Cost
from undertow.kernels.compiler import HAS_NUMBA

aten = torch.ops.aten

# New nodes by position in the Program; None where the old node is only removed.
Exchange = dict[int, Node | None]

_REDUCTIONS = {1: "mean", 2: "sum"}
_MOST_CODES = 256


def choose_pairs(program: Program, measure: Any, rank: Callable[[Cost], Any]) -> Program:
    """The Program with each pair replaced whose replacement ranks lower."""
    readers = program.readers
    exchanges = [found for maker in (_pool, _cross_entropy) for found in maker(program, readers)]
    if not exchanges:
        return program
    nodes: list[Node | None] = list(program.nodes)
    new = [node for exchange in exchanges for node in exchange.values() if node is not None]
    cost_of = measure([*new, *(program.nodes[place] for exchange in exchanges for place in exchange)])
    for exchange in exchanges:
        before = _together(cost_of(program.nodes[place]) for place in exchange)
        after = _together(cost_of(node) for node in exchange.values() if node is not None)
        if rank(after) < rank(before):
            for place, node in exchange.items():
                nodes[place] = node
    return program.with_pieces([() if node is None else (node,) for node in nodes])


def _together(costs: Iterable[Cost]) -> Cost:
    costs = list(costs)
    return Cost(sum(cost.duration_ns for cost in costs), max(cost.workspace_bytes for cost in costs))


def _pool(program: Program, readers: dict[Value, list[int]]) -> Iterator[Exchange]:
    for place, node in enumerate(program.nodes):
        if node.target is not aten.max_pool2d_with_indices.default:
            continue
        x, y, indices = node.args[0], *node.outputs
        geometry = _geometry(*node.args[1:])
        backward = readers.get(indices, []) if indices is not None else []
        if y is None or not is_float_image(x) or geometry[0][0] * geometry[0][1] > _MOST_CODES:
            continue
        if not all(_is_pool_backward(program, at, indices) for at in backward):
            continue
        kind = y.tensor_type
        codes = Value(f"{y.name}_codes", replace(kind, dtype=torch.uint8)) if backward else None
        args = (x, *geometry, tuple(kind.shape[2:]))
        exchange: Exchange = {place: Node(MAX_POOL, args, {}, (y, codes), node.origin)}
        for at in backward:
            old = program.nodes[at]
            size = tuple(old.named_outputs[0].tensor_type.shape[2:])
            exchange[at] = replace(
                old, operation=MAX_POOL_BACKWARD, args=(old.args[0], codes, size, *geometry), kwargs={}
            )
        yield exchange


def _is_pool_backward(program: Program, place: int, indices: Value | None) -> bool:
    if place < 0:
        return False
    node = program.nodes[place]
    is_backward = node.target is aten.max_pool2d_with_indices_backward.default and node.args[-1] is indices
    return is_backward and all(is_channels_last(value.tensor_type) for value in node.named_outputs)


def _geometry(
    kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,), *_: Any
) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation with a number for each dim, as PyTorch fills them in."""
    return tuple(tuple(item) * (2 // len(item)) for item in (kernel, stride or kernel, padding, dilation))


def _cross_entropy(program: Program, readers: dict[Value, list[int]]) -> Iterator[Exchange]:
    for place, node in enumerate(program.nodes):
        if node.target is not aten.nll_loss_forward.default or node.outputs[0] is None:
            continue
        log_softmax, targets, weight, reduction, ignored = node.args
        loss, total = node.outputs
        softmax = program.makers.get(log_softmax)
        if softmax is None or weight is not None or reduction not in _REDUCTIONS:
            continue
        if targets.tensor_type.dtype is not torch.int64 or not targets.tensor_type.is_contiguous:
            continue
        if softmax.target is not aten._log_softmax.default or not _are_rows(softmax.args[0], softmax.args[1]):
            continue
        backward = [at for at in readers[log_softmax] if at != place]
        found = _loss_backward(program, readers, backward, total) if backward else {}
        if found is None or any(
            at not in found for at in (*backward, *([] if total is None else readers.get(total, [])))
        ):
            continue
        logits, name = softmax.args[0], _REDUCTIONS[reduction]
        kind = logits.tensor_type
        rows = TensorType(kind.dtype, kind.shape[:1], (1,), kind.device)
        logsumexp = Value(f"{log_softmax.name}_logsumexp", rows) if found else None
        exchange: Exchange = {program.positions[softmax]: None}
        exchange[place] = Node(CROSS_ENTROPY, (logits, targets, ignored, name), {}, (loss, logsumexp), node.origin)
        for at, ct in found.items():
            old = program.nodes[at]
            args = (ct, logits, targets, ignored, name, logsumexp)
            exchange[at] = None if ct is None else replace(old, operation=CROSS_ENTROPY_BACKWARD, args=args, kwargs={})
        yield exchange


def _loss_backward(
    program: Program, readers: dict[Value, list[int]], places: list[int], total: Value | None
) -> dict[int, Value | None] | None:
    """The two nodes of the backward pass, the second with the loss's cotangent; None if there are others."""
    if len(places) != 2 or min(places) < 0:
        return None
    first, second = (program.nodes[place] for place in places)
    is_pair = (
        first.target is aten.nll_loss_backward.default
        and second.target is aten._log_softmax_backward_data.default
        and second.args[0] is first.named_outputs[0]
        and first.args[-1] is total
        and readers[first.named_outputs[0]] == [places[1]]
    )
    return {places[0]: None, places[1]: first.args[0]} if is_pair else None


def _are_rows(logits: Value, dim: int) -> bool:
    kind = logits.tensor_type
    is_plain = kind.dtype is torch.float32 and kind.device.type == "cpu" and kind.is_contiguous
    return HAS_NUMBA and is_plain and len(kind.shape) == 2 and dim in (1, -1) and kind.num_elements > 0
