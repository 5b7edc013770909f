"""Several operations run as one: a group, compiled by Inductor into as few passes over memory as it finds.

In: nodes in order, the values they read from outside, the values that leave. Out: an operation that a Program may hold
like any other, so that the planner times it, repeats it and frees around it. Groups that read the same types and do the
same are compiled once a process; Inductor keeps what it compiled on disk. A group that was not compiled runs its
operations one by one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from undertow.ir import Node, Value, map_values
from undertow.ir.operation import Operation, operation_maker
from undertow.ir.schema import schema_of
from undertow.ops.interpret import run_node

aten = torch.ops.aten

# Their decompositions add into memory in no fixed order.
WHOLE = {aten.embedding_dense_backward.default}

_COMPILED: dict[str, Callable[[list[Any]], Sequence[torch.Tensor]]] = {}


@dataclass(frozen=True, eq=False)
class Group:
    """What runs as one. Groups that do the same with the same types are equal."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        compiled = _COMPILED.get(self.key)
        if compiled is not None:
            return tuple(compiled(list(tensors)))
        environment: dict[Value, Any] = dict(zip(self.reads, tensors, strict=True))
        for node in self.nodes:
            run_node(node, environment)
        return tuple(environment[value] for value in self.makes)

    @cached_property
    def key(self) -> str:
        """The same for groups that do the same with the same types."""
        numbers = {value: number for number, value in enumerate(self.reads)}
        lines = [str(value.type) for value in self.reads]
        for node in self.nodes:
            arguments = map_values((node.args, tuple(node.kwargs.values())), lambda value: f"v{numbers[value]}")
            for value in node.named_outputs:
                numbers[value] = len(numbers)
            places = [None if value is None else numbers[value] for value in node.outputs]
            lines.append(f"{places} = {node.name} {arguments} {list(node.kwargs)}")
        lines.append(f"return {[(numbers[value], str(value.type)) for value in self.makes]}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    def compile(self) -> None:
        """Have Inductor compile the group, unless one like it was compiled before.

        What Inductor makes is called directly: AOTAutograd's wrapper around it, which sees to aliases and mutations
        that a group does not have, takes longer than a small kernel.
        """
        if self.key in _COMPILED:
            return
        from torch._inductor import lowering  # noqa: F401  its decompositions use it without importing it
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        found: list[Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]] = []

        def compile_inner(graph: torch.fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            (results,) = graph.graph.find_nodes(op="output")[0].args
            assert len(results) == len(self.makes) and len(examples) == len(self.reads)
            found.append(compile_fx_inner(graph, examples, **settings))
            return found[-1]

        with torch.no_grad():
            compile_fx(self._as_graph(), [_make_example(value) for value in self.reads], inner_compile=compile_inner)
        (_COMPILED[self.key],) = found

    def parts(self) -> list[Group]:
        """For each result the smaller group, if there is one, that makes it elementwise from the others as well."""
        found = []
        maker = {value: node for node in self.nodes for value in node.named_outputs}
        for wanted in self.makes:
            stop = {*self.reads, *self.makes} - {wanted}
            nodes: set[Node] = set()
            reads: dict[Value, None] = {}
            waiting = [wanted]
            while waiting:
                value = waiting.pop()
                if value in stop:
                    reads[value] = None
                elif maker[value] not in nodes:
                    nodes.add(maker[value])
                    waiting += maker[value].inputs
            if all(map(is_free, nodes)) and not reads.keys().isdisjoint(self.makes):
                found.append(Group(tuple(node for node in self.nodes if node in nodes), tuple(reads), (wanted,)))
        return found

    def _as_graph(self) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        found: dict[Value, Any] = {value: graph.placeholder(f"v{place}") for place, value in enumerate(self.reads)}
        for node in self.nodes:
            args = map_values(node.args, found.__getitem__)
            kwargs = {name: map_values(item, found.__getitem__) for name, item in node.kwargs.items()}
            result = graph.call_function(node.target, args, kwargs)
            for place, value in enumerate(node.outputs):
                if value is not None:
                    is_part = node.operation.returns_tuple
                    found[value] = graph.call_function(operator.getitem, (result, place)) if is_part else result
        graph.output(tuple(found[value] for value in self.makes))
        return torch.fx.GraphModule(torch.nn.Module(), graph)


def _make_example(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


@cache
def is_fusible(operation: Operation) -> bool:
    """Whether Inductor makes part of a pass over memory of it."""
    from torch._inductor.lowering import fallbacks, lowerings

    overload = operation.overload
    if overload is None or operation.must_run or operation.is_view or schema_of(overload).mutated:
        return False
    if overload.overloadpacket in flop_registry or overload in WHOLE or operation.is_empty:
        return False
    return overload in lowerings and overload not in fallbacks


def is_free(node: Node) -> bool:
    """Whether repeating the node within a pass costs nothing: elementwise, nothing summed up or looked up."""
    if node.operation.is_view:
        return True
    largest = max((value.tensor_type.num_elements for value in node.inputs), default=0)
    is_elementwise = all(value.tensor_type.num_elements >= largest for value in node.named_outputs)
    return is_elementwise and is_fusible(node.operation)


@operation_maker
def fused(group: Group) -> Operation:
    """The group as an operation."""
    names = list(dict.fromkeys(node.name.partition(".")[0] for node in group.nodes))
    shown = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
    is_on_gpu = any(value.tensor_type.device.type == "cuda" for value in group.makes)
    return Operation(
        f"fused({shown})#{group.key}",
        group,
        returns_tuple=True,
        second_runs=partial(_make_parts_again, group),
        compile=group.compile if is_on_gpu else None,
    )


def _make_parts_again(group: Group, node: Node) -> Iterator[Node]:
    values = {**dict(zip(group.reads, node.args, strict=True)), **dict(zip(group.makes, node.outputs, strict=True))}
    for part in group.parts():
        args, outputs = (tuple(values[value] for value in side) for side in (part.reads, part.makes))
        yield replace(node, operation=fused(part), args=args, outputs=outputs)
