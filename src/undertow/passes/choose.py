"""`choose_kernels`: the best measured way to run each operation, and elementwise operations folded into it.

In: a derived Program whose activations lie as `use_channels_last` put them, a function that measures nodes, and how to
rank what it finds, by time unless memory is short. Out: a Program with other operations for the same values. Choices
are made per shape from the table of measured costs, before any budget is seen: the same table gives the same bits at
every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.fast.convolution import (
    PLAIN_FORM,
    convolution_backward_choices,
    convolution_choices,
    is_prepared,
    prepared_convolution_choices,
)
from undertow.fast.normalization import (
    batch_norm_backward_choices,
    batch_norm_choices,
    batch_norm_evaluation_choices,
    layer_norm_backward_choices,
    layer_norm_choices,
)
from undertow.fast.onednn import PRODUCT_PREPARED
from undertow.fast.pooling import max_pool_choices
from undertow.fast.products import PRODUCT, biased_product_choices, prepared_product_choices, product_choices
from undertow.ir import Node, Origin, Phase, Program, Value
from undertow.ir.cost import Cost
from undertow.ir.pytorch import operation_of
from undertow.ops.own import RESTRIDE, functional
from undertow.passes.chains import fold_chains
from undertow.passes.folding import find_residuals, fold_activations
from undertow.passes.held_weights import find_fixed
from undertow.passes.pairs import choose_pairs

aten = torch.ops.aten

CostTable = Callable[[Sequence[Node]], Callable[[Node], Cost]]

# The nodes that may stand for a node, itself among them.
_CHOICES: dict[Any, Callable[[Node], list[Node]]] = {
    aten.convolution.default: convolution_choices,
    aten.convolution_backward.default: convolution_backward_choices,
    functional(operation_of(aten.native_batch_norm.default)): batch_norm_choices,
    aten.native_batch_norm.default: batch_norm_choices,
    aten._native_batch_norm_legit_no_training.default: batch_norm_evaluation_choices,
    aten.native_batch_norm_backward.default: batch_norm_backward_choices,
    aten.max_pool2d_with_indices.default: max_pool_choices,
    aten.native_layer_norm.default: layer_norm_choices,
    aten.native_layer_norm_backward.default: layer_norm_backward_choices,
    aten.mm.default: product_choices,
    aten.addmm.default: biased_product_choices,
}

# Further ones, with the nodes that prepare their weights, where those are the same in every call.
_PREPARED_CHOICES: dict[Any, Callable[[Node], dict[Node, Node]]] = {
    aten.convolution.default: prepared_convolution_choices,
    aten.mm.default: prepared_product_choices,
    aten.addmm.default: prepared_product_choices,
}
_PLAIN_FORM = PLAIN_FORM | {PRODUCT_PREPARED: PRODUCT}


def choose_kernels(program: Program, measure: CostTable, rank: Callable[[Cost], Any]) -> Program:
    """The Program with the kernel of the lowest rank for each operation that has several."""
    program = choose_pairs(program, measure, rank)
    choices = {
        position: found
        for position, node in enumerate(program.nodes)
        if (found := _CHOICES.get(node.target, lambda node: [])(node))
    }
    if not choices:
        return fold_chains(program, measure)
    preparations: dict[Node, Node] = {}
    fixed = find_fixed(program)
    for position, found in choices.items():
        node = program.nodes[position]
        prepared = _PREPARED_CHOICES[node.target](node) if node.target in _PREPARED_CHOICES else {}
        if prepared and all(fixed.issuperset(item.inputs) for item in prepared.values()):
            needless = {_PLAIN_FORM[item.target] for item in prepared}
            choices[position] = [*(item for item in found if item.target not in needless), *prepared]
            preparations |= prepared
    timed = _as_timed(preparations, find_residuals(program))
    cost_of = measure([timed.get(node, node) for nodes in choices.values() for node in nodes])

    def rank_of(node: Node) -> Any:
        return rank(cost_of(timed.get(node, node)))

    nodes = list(program.nodes)
    renamed: dict[Value, Value] = {}
    for position, candidates in choices.items():
        before = nodes[position]
        nodes[position] = min(candidates, key=rank_of)
        for old, new in zip(before.outputs, nodes[position].outputs, strict=False):
            if old is not None and new is not None and old is not new:
                renamed[old] = new
    program = _with_preparations(_rename(replace(program, nodes=tuple(nodes)), renamed), preparations)
    return fold_chains(fold_activations(program), measure)


def _as_timed(prepared: Iterable[Node], residuals: dict[Value, Value]) -> dict[Node, Node]:
    """Convolutions that are to end with a sum and a ReLU as they will run: how much that takes differs among them."""
    return {
        node: replace(node, args=(*node.args[:-2], residuals[node.named_outputs[0]], True))
        for node in prepared
        if is_prepared(node) and node.named_outputs[0] in residuals
    }


def _with_preparations(program: Program, preparations: dict[Node, Node]) -> Program:
    """The Program in which every chosen node that reads prepared weights finds them, those of equal calls once."""
    by_output = {item.outputs[0]: item for item in preparations.values()}
    made: dict[Any, Value] = {}
    nodes: list[Node] = []
    for node in program.nodes:
        preparation = next((by_output[value] for value in node.inputs if value in by_output), None)
        if preparation is not None:
            (prepared,) = preparation.named_outputs
            key = preparation.target, preparation.args
            if key not in made:
                made[key] = prepared
                nodes.append(preparation)
            args = tuple(made[key] if argument is prepared else argument for argument in node.args)
            node = replace(node, args=args)
        nodes.append(node)
    num_new = len(nodes) - len(program.nodes)
    return replace(program, nodes=tuple(nodes), boundary=program.boundary + num_new)


def _rename(program: Program, renamed: dict[Value, Value]) -> Program:
    """The Program with values read under their new names."""

    def new(value: Value) -> Value:
        return renamed.get(value, value)

    return program.map_nodes(lambda node: (node.with_values(new),)).with_ends(new)


def lay_out_gradients(program: Program) -> Program:
    """Gradients as their parameters lie: a kernel's own layout is not for the user to see."""
    nodes = list(program.nodes)
    gradients = []
    for item in program.gradients:
        if item.value is not None and item.value.tensor_type.strides != item.input.tensor_type.strides:
            value = Value(f"{item.value.name}_as_{item.input.name}", item.input.tensor_type)
            args = (item.value, value.tensor_type.strides)
            nodes.append(Node(RESTRIDE, args, {}, (value,), Origin(item.input.name), Phase.BACKWARD))
            item = replace(item, value=value)
        gradients.append(item)
    return replace(program, nodes=tuple(nodes), gradients=tuple(gradients))
