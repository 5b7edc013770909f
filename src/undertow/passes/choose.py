"""`choose_kernels`: the best measured way to run each operation, and elementwise operations folded into it.

In: a derived Program whose activations have the layout of `use_channels_last`, a function that measures nodes, and how
to rank costs, by time unless memory is short. Out: a Program with other operations for the same values. Choices are
made per shape from the table of measured costs and do not depend on the budget: the same table gives the same bits at
every budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.fast.convolution import is_prepared
from undertow.fast.registry import find_choices, find_prepared_choices, plain_form_of
from undertow.ir import Node, Program, Value
from undertow.ir.cost import Cost
from undertow.passes.chains import fold_chains
from undertow.passes.folding import find_residuals, fold_activations
from undertow.passes.held_weights import find_fixed
from undertow.passes.pairs import choose_pairs

aten = torch.ops.aten

CostTable = Callable[[Sequence[Node]], Callable[[Node], Cost]]


def choose_kernels(program: Program, measure: CostTable, rank: Callable[[Cost], Any]) -> Program:
    """The Program with the kernel of the lowest rank for each operation that has several."""
    program = choose_pairs(program, measure, rank)
    choices: dict[int, list[Node]] = {}
    preparations: dict[Node, Node] = {}
    fixed = find_fixed(program)
    for position, node in enumerate(program.nodes):
        found, prepared = [node, *find_choices(node)], find_prepared_choices(node) if fixed else {}
        if prepared and all(fixed.issuperset(item.inputs) for item in prepared.values()):
            needless = {plain_form_of(item.operation) for item in prepared}
            found = [*(item for item in found if item.target not in needless), *prepared]
            preparations |= prepared
        if found != [node]:
            choices[position] = found
    if not choices:
        return fold_chains(program, measure)
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
    """Convolutions that will end with a sum and a ReLU, as they will run: this costs some kernels more than others."""
    return {
        node: replace(node, args=(*node.args[:-2], residuals[node.named_outputs[0]], True))
        for node in prepared
        if is_prepared(node) and node.named_outputs[0] in residuals
    }


def _with_preparations(program: Program, preparations: dict[Node, Node]) -> Program:
    """The Program with a preparation for each chosen node that reads prepared weights, one for equal calls."""
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
