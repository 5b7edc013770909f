"""PyTorch's own operations as records: what PyTorch says of them, and what it does not say.

In: an overload such as `aten.add.Tensor`. Out: its Operation. What an overload mutates, aliases, draws and returns is
read from its schema and its tags (`schema.py`). What these do not say is declared: here for PyTorch as a whole, and by
`declare` in the file of the operation's family.
"""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from undertow.errors import ProgramError
from undertow.ir.live import Live
from undertow.ir.operation import REVERSIBLE, Operation, nothing, operation_maker
from undertow.ir.out_overloads import destination_of_overload
from undertow.ir.schema import bind_arguments, inplace_of, schema_of
from undertow.ir.values import Value, values_in
from undertow.torch_internals import OpOverload, has_kernel

if TYPE_CHECKING:
    from undertow.ir.program import Node

aten = torch.ops.aten

# Autograd treats these as fresh tensors, but their outputs lie in their input's memory.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
}

# Attention whose kernels draw only where something is dropped out; PyTorch marks the derivatives of two as random.
_DRAWING_BY_DROPOUT = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
}

# Running statistics: in training mode the outputs do not depend on them.
_STATISTICS = {aten.native_batch_norm.default, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default}

_GATHERS = {"embedding", "index", "index_select", "gather", "take"}

# Operations of these keep no reference to their arguments; those of other libraries may.
_KNOWN_NAMESPACES = ("aten", "prims", "mkldnn", "undertow")

_READ_ON_THE_CPU = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

_REFUSED = {"aten::from_file", "aten::from_file.out"}  # they map a file of any name into memory

_DECLARED: dict[OpOverload, dict[str, Any]] = {}


def declare(overload: OpOverload, **facts: Any) -> None:
    """Set fields of the record of one of PyTorch's operations that PyTorch does not tell, before its first use."""
    if overload in _RECORDS:
        raise ValueError(f"{overload} was used before all was said of it")
    _DECLARED.setdefault(overload, {}).update(facts)


def declared(fact: str) -> dict[OpOverload, Any]:
    """The operations for which a field was declared, each with what was declared."""
    return {overload: facts[fact] for overload, facts in _DECLARED.items() if fact in facts}


_RECORDS: dict[OpOverload, Operation] = {}


def operation_of(target: Any) -> Operation:
    """The record of one of PyTorch's operations; a record itself."""
    if isinstance(target, Operation):
        return target
    found = _RECORDS.get(target)
    if found is None:
        found = _RECORDS[target] = pytorch(target.name())
    return found


@operation_maker
def pytorch(name: str) -> Operation:
    """The record of the operation that PyTorch's dispatcher knows by `name`, such as `aten::add.Tensor`."""
    overload = _find_overload(name)
    schema = schema_of(overload)
    packet = overload.overloadpacket.__name__.rstrip("_")
    is_view = schema.is_view or overload in _UNDECLARED_VIEWS
    facts: dict[str, Any] = {
        "run": overload,
        "overload": overload,
        "returns_tuple": not schema.returns_single,
        "shares": 0 if is_view or schema.is_inplace else None,
        "is_view": is_view,
        "costs_nothing": is_view,
        "writes": _written if any(item.is_write for item in overload._schema.arguments) else nothing,
        "is_fresh": True,
        "releases_arguments": overload.namespace in _KNOWN_NAMESPACES,
        "find_destination": lambda: destination_of_overload(overload),
        "must_run": schema.has_effect,
        "chains": (lambda node: (REVERSIBLE,)) if schema.has_effect else nothing,
        "is_random": schema.is_random,
        "draws": partial(_drops_out, overload) if overload in _DRAWING_BY_DROPOUT else lambda node: schema.is_random,
        "droppable": (3, 4) if overload in _STATISTICS else (),
        "reads_elements": not (packet.endswith("_like") or packet.startswith("new_")),
        "is_gather": packet in _GATHERS,
        "is_empty": "empty" in packet,
        "why_not_captured": partial(_why_not_captured, overload),
    }
    return Operation(name=_printed_name(overload), **(facts | _DECLARED.get(overload, {})))


def _find_overload(name: str) -> OpOverload:
    if name in _REFUSED or not has_kernel(name):
        raise ProgramError(f"PyTorch {torch.__version__} has no operation {name!r}")
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _printed_name(overload: OpOverload) -> str:
    """`aten.add.Tensor` as `add.Tensor`, `aten.relu.default` as `relu`."""
    return str(overload).removeprefix("aten.").removesuffix(".default")


def _written(node: Node) -> tuple[Value, ...]:
    overload = node.operation.overload
    assert overload is not None
    written = [
        given for argument, given in zip(overload._schema.arguments, node.args, strict=False) if argument.is_write
    ]
    return values_in(written)


def _drops_out(overload: OpOverload, node: Node) -> bool:
    return bool(bind_arguments(overload, node.args, node.kwargs)["dropout_p"])


def _why_not_captured(overload: OpOverload, node: Node) -> str | None:
    if node.operation.is_random and any(isinstance(item, Live) for item in (*node.args, *node.kwargs.values())):
        return f"{node.name} draws from a generator that is not PyTorch's own ({node.origin})"
    if not _READ_ON_THE_CPU.isdisjoint(overload.tags):
        return f"{node.name} reads a tensor's values on the CPU ({node.origin})"
    return None


@cache
def in_place_of(operation: Operation) -> Operation | None:
    """The operation that writes what `operation` computes over its first argument, by the same kernel, element by
    element; None if there is none.
    """
    inner = operation.functional_of
    if operation.in_place is not None:
        return operation.in_place
    if inner is not None:
        return inner if inner.writes_over else None
    if operation.overload is None or torch.Tag.pointwise not in operation.overload.tags:
        return None
    found = inplace_of(operation.overload)
    return None if found is None else operation_of(found)
