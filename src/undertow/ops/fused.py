"""Several operations run as one: a group, compiled by Inductor into as few passes over memory as it finds.

In: nodes in order, the values they read from outside, the values that leave. Out: an operation that a Program may hold
like any other, so that the planner times it, repeats it and frees around it. Groups that read the same types and do the
same are compiled once a process; Inductor keeps what it compiled on disk. A group that was not compiled runs its
operations one by one.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from undertow.ir import Node, Value, map_values, operation_name
from undertow.ops.interpret import run_node
from undertow.ops.own import OwnOperation, has_effect, is_view
from undertow.ops.schema import schema_of

aten = torch.ops.aten

# Their decompositions add into memory in no fixed order.
WHOLE = {aten.embedding_dense_backward.default}


aten = torch.ops.aten

_COMPILED: dict[str, Callable[[list[Any]], Sequence[torch.Tensor]]] = {}


@dataclass(frozen=True, eq=False)
class Group:
    """What runs as one."""

    nodes: tuple[Node, ...]
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]

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
            for value in node.kept_outputs:
                numbers[value] = len(numbers)
            places = [None if value is None else numbers[value] for value in node.outputs]
            lines.append(f"{places} = {node.target} {arguments} {list(node.kwargs)}")
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
        maker = {value: node for node in self.nodes for value in node.kept_outputs}
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
            is_single = schema_of(node.target).returns_single  # type: ignore[arg-type]
            for place, value in enumerate(node.outputs):
                if value is not None:
                    found[value] = result if is_single else graph.call_function(operator.getitem, (result, place))
        graph.output(tuple(found[value] for value in self.makes))
        return torch.fx.GraphModule(torch.nn.Module(), graph)


def _make_example(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)


def is_fusible(target: Any) -> bool:
    """Whether Inductor makes part of a pass over memory of it."""
    return isinstance(target, OpOverload) and _is_lowered(target)


@cache
def _is_lowered(target: OpOverload) -> bool:
    from torch._inductor.lowering import fallbacks, lowerings

    if has_effect(target) or is_view(target) or schema_of(target).mutated:
        return False
    if target.overloadpacket in flop_registry or target in WHOLE or "empty" in target._schema.name:
        return False
    return target in lowerings and target not in fallbacks


def is_free(node: Node) -> bool:
    """Whether repeating the node within a pass costs nothing: elementwise, nothing summed up or looked up."""
    if is_view(node.target):
        return True
    largest = max((value.tensor_type.num_elements for value in node.inputs), default=0)
    return is_fusible(node.target) and all(value.tensor_type.num_elements >= largest for value in node.kept_outputs)


def fused(group: Group) -> OwnOperation:
    """The group as an operation."""
    names = list(dict.fromkeys(operation_name(node.target).partition(".")[0] for node in group.nodes))
    shown = "+".join(names[:3]) + (f"+{len(names) - 3}" if len(names) > 3 else "")
    return OwnOperation(f"fused({shown})#{group.key}", group, returns_tuple=True)


def compile_groups(nodes: Iterable[Node]) -> None:
    """Compile the groups among the nodes that run on a GPU."""
    for node in nodes:
        group = getattr(node.target, "run", None)
        if isinstance(group, Group) and any(value.tensor_type.device.type == "cuda" for value in group.makes):
            group.compile()
