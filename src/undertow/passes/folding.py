"""`fold_activations`: a ReLU and the sum before it become part of the operation before them. So does a GELU, and the
backward of a ReLU.

In: a Program whose kernels `choose_kernels` has chosen. Out: the Program with fewer passes over memory. An operation is
folded only if nothing else reads the value that is then not made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from undertow.fast.convolution import is_own_backward, is_own_forward, is_prepared, with_mask, with_relu
from undertow.fast.normalization import BATCH_NORM, BATCH_NORM_BACKWARD, BATCH_NORM_EVALUATE
from undertow.fast.onednn import PRODUCT_PREPARED
from undertow.ir import Node, Program, Value

aten = torch.ops.aten


def fold_activations(program: Program) -> Program:
    """The Program with every activation folded that can be."""
    return _Folder(program).run()


def find_residuals(program: Program) -> dict[Value, Value]:
    """For each result of a convolution that will end with a sum and a ReLU, the value that is added to it."""
    maker, readers = program.makers, program.readers
    found: dict[Value, Value] = {}
    for node in program.nodes:
        addition = maker.get(node.args[0]) if node.target is aten.relu.default else None
        if addition is None or not _is_plain_sum(addition) or len(readers[node.args[0]]) > 1:
            continue
        for term, residual in (addition.args, addition.args[::-1]):
            is_made = term in maker and maker[term].target is aten.convolution.default
            if is_made and len(readers[term]) == 1 and _is_alike(term, residual):
                found[term] = residual
                break
    return found


def _is_plain_sum(node: Node) -> bool:
    return node.target is aten.add.Tensor and len(node.args) == 2 and not node.kwargs


def _is_alike(term: Any, residual: Any) -> bool:
    # One channel lies in both layouts: oneDNN may take the two terms for different ones, and refuse.
    return isinstance(residual, Value) and residual.type == term.type and term.tensor_type.shape[1] > 1


class _Folder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes: list[Node | None] = list(program.nodes)
        self.maker = {value: place for place, node in enumerate(program.nodes) for value in node.named_outputs}
        self.readers = program.readers

    def run(self) -> Program:
        for place, node in enumerate(self.program.nodes):
            if node.target is aten.relu.default:
                self._fold_relu(place, node)
                self._fold_into_product(place, node, "relu")
            elif node.target is aten.gelu.default:
                self._fold_into_product(place, node, f"gelu {node.kwargs.get('approximate', 'none')}")
            elif is_own_backward(node) or node.target is BATCH_NORM_BACKWARD:
                self._fold_mask(place, node)
        return self.program.with_pieces([() if node is None else (node,) for node in self.nodes])

    def _made_for(self, value: Any, place: int) -> Node | None:
        """The node that makes `value`, if the node at `place` is its only reader."""
        if not isinstance(value, Value) or self.readers.get(value) != [place] or value not in self.maker:
            return None
        return self.nodes[self.maker[value]]

    def _fold_relu(self, place: int, node: Node) -> None:
        before = self._made_for(node.args[0], place)
        if before is None:
            return
        (result,) = node.named_outputs
        if is_own_forward(before):
            self._move(before, place, with_relu(before, result))
        elif _takes_residual(before):
            self._move(before, place, _with_residual_and_relu(before, None, result))
        elif _is_plain_sum(before):
            self._fold_sum(place, before, result)

    def _fold_into_product(self, place: int, node: Node, activation: str) -> None:
        """An activation of a product, which may be seen through a view."""
        (result,) = node.named_outputs
        before = self._made_for(node.args[0], place)
        if before is not None and before.operation.is_view and result.type == node.args[0].type:
            view, before = before, self._made_for(before.args[0], self.maker[node.args[0]])
        else:
            view = None
        if before is None or before.target is not PRODUCT_PREPARED or before.args[-1] != "none":
            return
        product = replace(before, args=(*before.args[:-1], activation))
        if view is None:
            self._move(before, place, replace(product, outputs=(result,)))
        else:
            self.nodes[self.nodes.index(before)] = product
            self._move(view, place, replace(view, outputs=(result,)))

    def _fold_sum(self, place: int, addition: Node, result: Value) -> None:
        """relu(norm(x) + residual), or of a convolution; either may come first."""
        at = self.maker[addition.named_outputs[0]]
        for term, residual in (addition.args, addition.args[::-1]):
            before = self._made_for(term, at)
            # A value that is added to itself cannot be folded: it would not be made before the sum.
            is_other = term is not residual
            if before is not None and is_other and _is_alike(term, residual) and _takes_residual(before):
                self.nodes[at] = None
                self._move(before, place, _with_residual_and_relu(before, residual, result))
                return

    def _move(self, old: Node, place: int, new: Node) -> None:
        """Run `new` instead of `old` and of the node at `place`, at `place`: what it reads is made by then."""
        self.nodes[self.nodes.index(old)] = None
        self.nodes[place] = new

    def _fold_mask(self, place: int, node: Node) -> None:
        masked = node.args[0]
        at = self.maker.get(masked)
        before = self.nodes[at] if at is not None else None
        if at is None or before is None or before.target is not aten.threshold_backward.default or before.args[2] != 0:
            return
        ct, y, _ = before.args
        is_alone = self.readers[masked] == [place]
        if is_own_backward(node) and is_alone:
            self.nodes[at], self.nodes[place] = None, with_mask(node, ct, y)
        elif node.target is BATCH_NORM_BACKWARD and (is_alone or min(self.readers[masked], key=_order) == place):
            # The first node that reads the masked cotangent makes it for the others: it is the residual's cotangent.
            args = (ct, *node.args[1:5], y, not is_alone)
            outputs = (*node.outputs[:3], None if is_alone else masked)
            self.nodes[at], self.nodes[place] = None, replace(node, args=args, outputs=outputs)


def _takes_residual(node: Node) -> bool:
    """Whether the node could end with a sum and a ReLU, its last two arguments, and has neither yet."""
    is_able = node.target in (BATCH_NORM, BATCH_NORM_EVALUATE) or is_prepared(node)
    return is_able and node.args[-2:] == (None, False)


def _with_residual_and_relu(norm: Node, residual: Value | None, result: Value) -> Node:
    return replace(norm, args=(*norm.args[:-2], residual, True), outputs=(result, *norm.outputs[1:]))


def _order(place: int) -> float:
    return place if place >= 0 else float("inf")
