"""Gradients of weights that travel as two factors: which of them could, and which gain by it.

In: the Program of a rank's only shard, costs, the speed of the link. Out: for each gradient that is one matrix product,
the node that makes it; and those for which sending the factors and multiplying again on every rank ends the step sooner
on its lanes than sending the gradient.

A gradient can be sent so if every rank holds one shard, all shards have as many examples, and nothing in the forward
pass depends on values: then the factors have the same shapes on all ranks. A weight that is used twice has a gradient
that is a sum, and is left out by that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from undertow.costs.links import LinkSpeed
from undertow.ir import Gradient, Node, OpaqueType, Origin, Phase, Program, Value
from undertow.ir.cost import Cost
from undertow.ir.pytorch import operation_of
from undertow.ops.communication import LINK, Link
from undertow.ops.factors import FINISH_FACTORS, START_FACTORS
from undertow.passes.bucket_sizes import Sent, time_on_lanes

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64)  # whose products have one kernel


def find_products(program: Program, blocks: Mapping[Value, tuple[Value, ...]], link: Link) -> dict[Value, Node]:
    """For each differentiated input whose gradient is one product, the node that makes it."""
    holds_one = all(len(span) == 1 for span in link.division.spans)
    if link.own is not None or not holds_one or any(node.operation.is_guard for node in program.nodes):
        return {}
    found: dict[Value, Node] = {}
    for parameter, (total, *_) in blocks.items():
        node = program.makers.get(program.makers[total].args[0])
        while node is not None and node.operation.is_view and _has_all(node):
            node = program.makers.get(node.inputs[0])
        if node is not None and node.target is aten.mm.default and not node.kwargs and _can_travel(node):
            found[parameter] = node
    return found


def _has_all(view: Node) -> bool:
    kinds = [view.inputs[0].tensor_type, view.named_outputs[0].tensor_type]
    return kinds[0].num_elements == kinds[1].num_elements and all(kind.is_dense for kind in kinds)


def _can_travel(product: Node) -> bool:
    kinds = [value.tensor_type for value in (*product.inputs, *product.named_outputs)]
    return all(kind.is_dense and kind.dtype in DTYPES and kind.device.type == "cpu" for kind in kinds)


def factors_bytes(product: Node, num_ranks: int) -> int:
    """What each rank sends."""
    return (num_ranks - 1) * sum(value.tensor_type.num_bytes for value in product.inputs)


def choose_products(
    products: Mapping[Value, Node],
    ready_ns: Mapping[Value, int],
    sent_bytes: Mapping[Value, int],
    num_ranks: int,
    cost_of: Callable[[Node], Cost],
    speed: LinkSpeed,
) -> set[str]:
    """The names of those that travel as factors. `ready_ns` is when each gradient is there, all of them in order."""
    chosen: dict[Value, Sent] = {}
    for parameter, product in products.items():
        value = product.named_outputs[0]
        row = Value("sum", replace(value.tensor_type, shape=(value.tensor_type.num_elements,), strides=(1,)))
        adding = Node(operation_of(aten.add_.Tensor), (row, row), {}, (row,), Origin())
        after_ns = (num_ranks - 1) * (cost_of(product).duration_ns + cost_of(adding).duration_ns)
        as_factors = speed.ns_per_byte * factors_bytes(product, num_ranks)
        chosen[parameter] = Sent(ready_ns[parameter], round(as_factors), after_ns)
    # Latency is left out, because how many share a bucket is not known yet.
    sent = {name: Sent(ready, round(speed.ns_per_byte * sent_bytes[name])) for name, ready in ready_ns.items()}

    def gain(parameter: Value) -> int:
        return sent[parameter].link_ns - chosen[parameter].link_ns - chosen[parameter].after_ns

    names: set[str] = set()
    best_ns = time_on_lanes(list(sent.values()))
    for parameter in sorted(chosen, key=gain, reverse=True):
        tried = sent | {parameter: chosen[parameter]}
        time_ns = time_on_lanes(list(tried.values()))
        if chosen[parameter].link_ns < sent[parameter].link_ns and time_ns < best_ns:
            sent, best_ns = tried, time_ns
            names.add(parameter.name)
    return names


def send_factors(
    number: int, item: Gradient, total: Value, product: Node, link: Link
) -> tuple[list[Node], list[Node], Value]:
    """The node that sends the factors, the one that waits and multiplies, and the sum over all shards."""
    num_ranks, origin = len(link.division.spans), Origin(item.input.name)
    num_bytes = factors_bytes(product, num_ranks)
    transfer = Value(f"transfer_{number}", OpaqueType("transfer", num_bytes))
    start = Node(START_FACTORS, (LINK, number, num_bytes, *product.args), {}, (transfer,), origin, Phase.BACKWARD)
    found = Value(f"{item.input.name}_reduced", total.type)
    types: Sequence[object] = [(value.tensor_type.shape, value.tensor_type.strides) for value in product.args]
    finish = Node(FINISH_FACTORS, (total, transfer, LINK, *types), {}, (found,), origin, Phase.BACKWARD)
    return [start], [finish], found
