"""Several operations run as one: a group, which Inductor compiles into as few passes over memory as it finds.

In: nodes in order, the values they read from outside, the values that leave. Out: an operation like any other in a
Program, so that the planner can time it, repeat it and free values around it. Groups that read the same types and do
the same are compiled once per process; Inductor stores what it compiled on disk. A group that was not compiled runs its
operations one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from undertow.ir import Node, Value, map_values
from undertow.ir.fragment import Fragment
from undertow.ir.operation import Operation, operation_maker
from undertow.ir.schema import schema_of
from undertow.ops.interpret import run_node
from undertow.torch_internals import can_inductor_fuse, inductor_compilers

aten = torch.ops.aten

# Not fused: their decompositions add into memory in no fixed order.
WHOLE = {aten.embedding_dense_backward.default}

_COMPILED: dict[str, Callable[[list[Any]], Sequence[torch.Tensor]]] = {}


@dataclass(frozen=True, eq=False)
class Group:
    """A fragment as something that can be called and compiled."""

    fragment: Fragment

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        compiled = _COMPILED.get(self.fragment.key)
        if compiled is not None:
            return tuple(compiled(list(tensors)))
        environment: dict[Value, Any] = dict(zip(self.fragment.reads, tensors, strict=True))
        for node in self.fragment.nodes:
            run_node(node, environment)
        return tuple(environment[value] for value in self.fragment.makes)

    def compile(self) -> None:
        """Have Inductor compile the group, unless one like it was compiled before.

        What Inductor makes is called directly. AOTAutograd's wrapper around it handles aliases and mutations, which a
        group does not have, and takes longer than a small kernel.
        """
        if self.fragment.key in _COMPILED:
            return
        compile_fx, compile_fx_inner = inductor_compilers()
        found: list[Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]] = []

        def compile_inner(graph: torch.fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Any:
            (results,) = graph.graph.find_nodes(op="output")[0].args
            assert len(results) == len(self.fragment.makes) and len(examples) == len(self.fragment.reads)
            found.append(compile_fx_inner(graph, examples, **settings))
            return found[-1]

        with torch.no_grad():
            examples = [_make_example(value) for value in self.fragment.reads]
            compile_fx(self._as_graph(), examples, inner_compile=compile_inner)
        (_COMPILED[self.fragment.key],) = found

    def _as_graph(self) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        found: dict[Value, Any] = {
            value: graph.placeholder(f"v{index}") for index, value in enumerate(self.fragment.reads)
        }
        for node in self.fragment.nodes:
            args = map_values(node.args, found.__getitem__)
            kwargs = {name: map_values(item, found.__getitem__) for name, item in node.kwargs.items()}
            result = graph.call_function(node.target, args, kwargs)
            for index, value in enumerate(node.outputs):
                if value is not None:
                    is_part = node.operation.returns_tuple
                    found[value] = graph.call_function(operator.getitem, (result, index)) if is_part else result
        graph.output(tuple(found[value] for value in self.fragment.makes))
        return torch.fx.GraphModule(torch.nn.Module(), graph)


def _make_example(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


@cache
def is_fusible(operation: Operation) -> bool:
    """Whether Inductor can make the operation part of a pass over memory."""
    overload = operation.overload
    if overload is None or operation.must_run or operation.is_view or schema_of(overload).mutated:
        return False
    if overload.overloadpacket in flop_registry or overload in WHOLE or operation.is_empty:
        return False
    return can_inductor_fuse(overload)


def is_free(node: Node) -> bool:
    """Whether repeating the node within a pass costs nothing: it is elementwise, and sums up or looks up nothing."""
    if node.operation.is_view:
        return True
    largest = max((value.tensor_type.num_elements for value in node.inputs), default=0)
    is_elementwise = all(value.tensor_type.num_elements >= largest for value in node.named_outputs)
    return is_elementwise and is_fusible(node.operation)


@operation_maker
def fused(fragment: Fragment) -> Operation:
    """A fragment as one operation."""
    names = list(dict.fromkeys(node.name.partition(".")[0] for node in fragment.nodes))
    shown = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
    group = Group(fragment)
    is_on_gpu = any(value.tensor_type.device.type == "cuda" for value in fragment.makes)
    return Operation(
        f"fused({shown})#{fragment.key}",
        group,
        returns_tuple=True,
        second_runs=partial(_make_parts_again, fragment),
        compile=group.compile if is_on_gpu else None,
    )


def _make_parts_again(whole: Fragment, node: Node) -> Iterator[Node]:
    values = {**dict(zip(whole.reads, node.args, strict=True)), **dict(zip(whole.makes, node.outputs, strict=True))}
    for part in _find_parts(whole):
        args, outputs = (tuple(values[value] for value in side) for side in (part.reads, part.makes))
        yield replace(node, operation=fused(part), args=args, outputs=outputs)


def _find_parts(whole: Fragment) -> Iterator[Fragment]:
    """For each result, the smaller fragment, if there is one, that makes it elementwise from other results as well."""
    maker = {value: node for node in whole.nodes for value in node.named_outputs}
    for wanted in whole.makes:
        stop = {*whole.reads, *whole.makes} - {wanted}
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
        if all(map(is_free, nodes)) and not reads.keys().isdisjoint(whole.makes):
            yield Fragment(tuple(node for node in whole.nodes if node in nodes), tuple(reads), (wanted,))
