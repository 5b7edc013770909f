"""Gradients in rows: of a table of which a step reads some rows, as `nn.Embedding(sparse=True)` asks for.

The gradient of such a table is a sparse tensor, as in eager: which rows, and what is added to each. How many different
rows there are is known only at run time. It is at most the number of indices, and that many rows are counted.

Where an optimizer updates inside the step, there is no such tensor between two operations: `update_rows` makes it from
what its maker reads, and the optimizer's own step takes it. So its memory is the workspace of the update, which is
measured as if all rows differed. Elsewhere the gradient is an opaque value with memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir import Node, OpaqueType, Program, Value
from undertow.ir.operation import Operation, operation_maker, register_operation
from undertow.ir.schema import bind_arguments
from undertow.ops.updates import assign, double_of, gradient_chain, settings_of, step_alone

aten = torch.ops.aten

# Eager's own functions that make the gradient of a table, and which of their arguments are indices.
_MAKERS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "embedding": (aten.embedding_backward.default, 1),
    "embedding_bag": (aten._embedding_bag_backward.default, 1),
}
_ROW_INDEX_BYTES = 8


@dataclass(frozen=True)
class Reading:
    """How an operation reads a table of which the gradient is in rows: the table, the indices, and the maker's call."""

    table: Value
    indices: Value
    kind: str
    args: tuple[Any, ...]  # of the maker, after the cotangent
    num_copies: int  # of the rows, while it runs


def find_reading(node: Node) -> Reading | None:
    """How a node reads rows whose gradient the user wants in rows; None for all other nodes. Refuses other ones."""
    overload = node.operation.overload
    bound = {} if overload is None else bind_arguments(overload, node.args, node.kwargs)
    if bound.get("sparse_grad"):
        raise CaptureError(
            f"{node.name} ({node.origin}) makes a sparse gradient, which is planned for embeddings alone; make it with "
            f"sparse_grad=False"
        )
    if not bound.get("sparse"):
        return None
    table, num_rows = bound["weight"], bound["weight"].tensor_type.shape[0]
    args: tuple[Any, ...]
    if overload is aten.embedding.default:
        args = (bound["indices"], num_rows, bound["padding_idx"], bound["scale_grad_by_freq"], True)
        return Reading(table, bound["indices"], "embedding", args, 1 if bound["padding_idx"] < 0 else 2)
    if overload is aten._embedding_bag.default:
        _, offset_to_bag, bag_sizes, largest = node.outputs
        args = (bound["indices"], bound["offsets"], offset_to_bag, bag_sizes, largest, num_rows)
        args += (bound["scale_grad_by_freq"], bound["mode"], True, bound["per_sample_weights"], bound["padding_idx"])
        return Reading(table, bound["indices"], "embedding_bag", args, 2)
    raise CaptureError(f"{node.name} ({node.origin}) makes a sparse gradient, which is planned for embeddings alone")


def type_of_rows(reading: Reading) -> OpaqueType:
    """The type of a gradient in rows: at most a row per index, with copies that its maker takes on the way."""
    table, num_rows = reading.table.tensor_type, reading.indices.tensor_type.num_elements
    row_bytes = torch.Size(table.shape[1:]).numel() * table.dtype.itemsize + _ROW_INDEX_BYTES
    return OpaqueType(f"sparse gradient {table}, at most {num_rows} rows", reading.num_copies * num_rows * row_bytes)


def type_of_sum(first: OpaqueType, second: OpaqueType) -> OpaqueType:
    """The type of a sum, which has the rows of both."""
    return OpaqueType("sum of sparse gradients", first.num_bytes + second.num_bytes)


@operation_maker
def row_gradient(kind: str) -> Operation:
    """(ct, indices, ...) -> the gradient of a table, as a sparse tensor that has memory of its own."""
    return Operation(f"{kind}_rows", partial(_make_own, kind), can_repeat=False, is_measurable=False)


def _make_own(kind: str, ct: torch.Tensor, *args: Any) -> torch.Tensor:
    make, index = _MAKERS[kind]
    made = make(ct, *args)
    indices, values = made._indices(), made._values()
    is_shared = values.untyped_storage().data_ptr() == ct.untyped_storage().data_ptr()
    # Eager's has the memory of the cotangent and of the user's indices, which a plan may free.
    return torch.ops.aten._sparse_coo_tensor_unsafe.default(
        indices.clone(), values.clone() if is_shared else values, made.shape
    )


# Two gradients in rows; and a dense one to which rows are added, as where the table is also an output layer.
ADD_ROWS = register_operation(
    Operation("add_rows", lambda first, second: first + second, can_repeat=False, is_measurable=False)
)
ADD_ROWS_TO_DENSE = register_operation(
    Operation("add_rows_to_dense", lambda dense, rows: dense + rows, can_repeat=False, is_measurable=False)
)


def find_chain(program: Program, value: Value) -> list[Node]:
    """The nodes that make a gradient in rows: a maker for each use of the table, and sums."""
    node = program.makers[value]
    if node.operation is not ADD_ROWS:
        return [node]
    return [*(item for part in node.inputs for item in find_chain(program, part)), node]


@operation_maker
def update_rows(kind: str, settings: str, makers: tuple[str, ...]) -> Operation:
    """(optimizer, group, parameter, calls, the forward pass's new value of the parameter if any): one update of rows.

    `calls` are the arguments by which `makers` make gradients in rows, which are added up in their order.
    """
    return Operation(
        f"update_rows_{kind.lower()}",
        partial(_update_rows, makers),
        writes=lambda node: (node.args[2],),
        must_run=True,
        chains=lambda node: (gradient_chain(node.args[2]),),
        can_repeat=False,
        settings=settings,
        rehearse=partial(_rehearse, makers),
        why_not_captured=lambda node: "which rows it writes is known only at run time",
    )


def update_rows_by(optimizer: torch.optim.Optimizer, group_index: int, chain: Sequence[Node]) -> Operation:
    """The update of the rows of one parameter of a group, by the nodes that would make its gradient."""
    kinds = tuple(node.operation.parameters[0] for node in chain if node.operation is not ADD_ROWS)
    return update_rows(type(optimizer).__name__, settings_of(optimizer, group_index), kinds)


def _update_rows(
    makers: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameter: torch.nn.Parameter,
    calls: tuple[tuple[Any, ...], ...],
    assigned: torch.Tensor | None = None,
) -> None:
    if assigned is not None:
        assign(parameter, assigned)
    step_alone(optimizer, group_index, [parameter], [_add_up(makers, calls)])


def _add_up(makers: tuple[str, ...], calls: tuple[tuple[Any, ...], ...]) -> torch.Tensor:
    gradients: Iterator[torch.Tensor] = (_MAKERS[kind][0](*args) for kind, args in zip(makers, calls, strict=True))
    total = next(gradients)
    for gradient in gradients:
        total = total + gradient
    return total


def _rehearse(
    makers: tuple[str, ...],
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameter: torch.Tensor,
    calls: tuple[tuple[Any, ...], ...],
    *unused: Any,
) -> Callable[[], Any]:
    """The update where all rows differ, as far as there are so many: that takes the most."""
    num_before = 0
    for kind, args in zip(makers, calls, strict=True):
        indices = args[_MAKERS[kind][1]]
        numbers = torch.arange(num_before, num_before + indices.numel()).remainder_(len(parameter))
        indices.copy_(numbers.view(indices.shape))
        num_before += indices.numel()
    twin = torch.nn.Parameter(parameter)
    double = double_of(optimizer, group_index, [twin])
    _update_rows(makers, double, 0, twin, calls)  # makes the state, which is not part of the cost
    return lambda: _update_rows(makers, double, 0, twin, calls)


def why_refused(optimizer: torch.optim.Optimizer, group_index: int, is_sparse: bool) -> str:
    """Why an optimizer cannot take a gradient in rows, or a dense one, in PyTorch's own words; empty if it can."""
    table = torch.nn.Parameter(torch.zeros(2, 2))
    double = double_of(optimizer, group_index, [table])
    dense = torch.ones(2, 2)
    try:
        step_alone(double, 0, [table], [dense.to_sparse(1) if is_sparse else dense])
    except RuntimeError as error:
        return str(error).partition("\n")[0].rstrip(".")
    return ""
