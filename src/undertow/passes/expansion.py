"""`expand`: norms, softmaxes and losses as the elementwise operations and sums that they consist of.

In: a derived Program. Out: the Program with each such node replaced by PyTorch's own decomposition of it. Its parts can
then be computed again separately, and joined with the nodes around them. REORDERS: sums are taken in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import flop_registry

from undertow.fast.groups import WHOLE
from undertow.ir import Node, Operation, Program, TensorType, Value, map_values
from undertow.ir.cost import signature
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import flatten_outputs, schema_of
from undertow.ops.own import functional
from undertow.torch_internals import FakeTensorMode, inductor_decompositions

aten = torch.ops.aten

# Batch normalisation as an operation that gives its new statistics instead of writing them.
_FUNCTIONAL: dict[Any, Callable[..., Any]] = {
    functional(operation_of(aten.native_batch_norm.default)): lambda *args: aten._native_batch_norm_legit_functional(
        *args
    ),
    functional(operation_of(aten.cudnn_batch_norm.default)): lambda *args: _cudnn_batch_norm(*args),
}


def _cudnn_batch_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    y, mean, deviation, *updates = aten._native_batch_norm_legit_functional(*args)
    return (y, mean, deviation, args[0].new_empty(0, dtype=torch.uint8), *updates)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return inductor_decompositions((aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward, aten.native_layer_norm))


def _is_expandable(operation: Operation) -> bool:
    if operation in _FUNCTIONAL:
        return True
    overload = operation.overload
    if overload is None or operation.must_run or operation.is_view or overload in WHOLE:
        return False
    is_known = overload in _decompositions() and overload.overloadpacket not in flop_registry
    return is_known and not schema_of(overload).mutated


def expand(program: Program) -> Program:
    """The Program in operations that can be joined, where there are decompositions."""
    return _Expander(program).run()


class _Expander:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graphs: dict[str, torch.fx.Graph | None] = {}
        self.renamed: dict[Value, Value] = {}
        self.nodes: list[Node] = []

    def run(self) -> Program:
        pieces = []
        for node in self.program.nodes:
            start = len(self.nodes)
            self._add(node.with_values(self._now))
            pieces.append(self.nodes[start:])
        return self.program.with_pieces(pieces).with_ends(self._now)

    def _now(self, value: Value) -> Value:
        return self.renamed.get(value, value)

    def _add(self, node: Node) -> None:
        graph = None
        if _is_expandable(node.operation):
            key = signature(node)
            if key not in self.graphs:
                self.graphs[key] = _decompose(node)
            graph = self.graphs[key]
        if graph is None:
            self.nodes.append(node)
        else:
            self._paste(node, graph)

    def _paste(self, node: Node, graph: torch.fx.Graph) -> None:
        """Put the decomposition's nodes instead of `node`; they make the values that it made."""
        inputs = iter(dict.fromkeys(node.inputs))
        results = graph.find_nodes(op="output")[0].args[0]
        known = {item: value for item, value in zip(results, node.outputs, strict=True) if value is not None}
        found: dict[torch.fx.Node, Any] = {}
        base = node.named_outputs[0].name
        for item in graph.nodes:
            if item.op == "placeholder":
                found[item] = next(inputs)
            elif item.target is operator.getitem:
                found[item] = found[item.args[0]][item.args[1]]
            elif item.op == "call_function":
                holders = [item] if schema_of(item.target).returns_single else _parts_of(item)
                outputs = []
                for place, (holder, fake) in enumerate(zip(holders, flatten_outputs(item.meta["val"]), strict=True)):
                    assert fake is not None
                    kind = TensorType.of(fake)
                    value = known.get(holder) if holder is not None else None
                    is_new = value is None or value.type != kind
                    outputs.append(Value(f"{base}_{len(found)}_{place}", kind) if is_new else value)
                args, kwargs = torch.fx.map_arg((item.args, dict(item.kwargs)), found.__getitem__)
                self.nodes.append(
                    Node(item.target, _tuples(args), dict(kwargs), tuple(outputs), node.origin, node.phase)
                )
                found[item] = outputs[0] if schema_of(item.target).returns_single else outputs
        for item, value in known.items():
            if found[item] is not value:
                self.renamed[value] = found[item]


def _parts_of(item: torch.fx.Node) -> list[torch.fx.Node | None]:
    """For each of several outputs the node that takes it; None where there is none."""
    parts: list[torch.fx.Node | None] = [None] * len(item.meta["val"])
    for user in item.users:
        place = user.args[1]
        assert isinstance(place, int)
        parts[place] = user
    return parts


def _tuples(argument: Any) -> Any:
    return tuple(_tuples(item) for item in argument) if isinstance(argument, tuple | list) else argument


def _decompose(node: Node) -> torch.fx.Graph | None:
    """The node's decomposition, with its distinct inputs in order; None where there is none, or types would change."""
    distinct = list(dict.fromkeys(node.inputs))

    def run(*tensors: torch.Tensor) -> list[torch.Tensor | None]:
        known = dict(zip(distinct, tensors, strict=True))
        args = map_values(node.args, known.__getitem__)
        kwargs = {name: map_values(item, known.__getitem__) for name, item in node.kwargs.items()}
        outputs = flatten_outputs(_FUNCTIONAL.get(node.target, node.target)(*args, **kwargs))
        return [None if value is None else output for value, output in zip(node.outputs, outputs, strict=False)]

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = [
            torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype, device=kind.device)
            for kind in (value.tensor_type for value in distinct)
        ]
        graph = make_fx(run, decomposition_table=_decompositions())(*fakes).graph
    graph.eliminate_dead_code()
    calls = [item for item in graph.nodes if item.op == "call_function"]
    if any(item.op == "get_attr" for item in graph.nodes) or [item.target for item in calls] == [node.target]:
        return None
    results = next(item for item in graph.nodes if item.op == "output").args[0]
    is_same = all(_has_type(item, value) for value, item in zip(node.outputs, results, strict=True))
    return graph if is_same else None


def _has_type(item: Any, value: Value | None) -> bool:
    if value is None:
        return True
    if not isinstance(item, torch.fx.Node):
        return False
    # What cuDNN reserves for its own derivative is left empty: that is decomposed as well.
    return TensorType.of(item.meta["val"]) == value.type or item.meta["val"].numel() == 0
