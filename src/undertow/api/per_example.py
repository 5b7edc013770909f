"""Gradients per example: the backward pass derived for one example, run for all examples at once.

In: a function of shared arguments and of one example, and a batch of examples. Out: for every example, the value and
the derivative by the shared arguments. What is recorded and differentiated is the function of one example.
`torch.func.vmap` then runs each operation of that Program for all examples: a product becomes a batched product, a
convolution's gradient by its weights a grouped convolution. `torch.func.vmap(torch.func.grad(f))` runs the same kernels
in the same order. Forward and backward pass are one straight line of code that frees each value after its last
use, where autograd's graph keeps them until its end (`torch.func.grad` makes a graph of the backward pass too).

Refused is what would not be the same for every example: branches on values, buffers that are written, user's own
Functions, strides that are read from memory. The gradients together take the memory of the shared arguments times the
number of examples; give fewer examples where that is too much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from undertow.errors import CallError, CaptureError
from undertow.ir import Node, Program, Value
from undertow.ir.cleaning import remove_unused
from undertow.ir.pytorch import operation_of
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.record.traced_tensor import TracedTensor
from undertow.runtime.code import ON_ANY_STRIDES


class ExampleBatch:
    """The arguments of a call: those at `shared` are the same for all examples, all others are batches of them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], shared: Sequence[int]) -> None:
        self._args, self._kwargs, self._shared = args, kwargs, frozenset(shared)
        named = [(f"argument {index}{path}", tensor) for index, path, tensor in self._batched(enumerate(args))]
        named += [(f"argument {name}{path}", tensor) for name, path, tensor in self._batched(kwargs.items())]
        if any(isinstance(tensor, TracedTensor) for _, tensor in tensors_in((args, kwargs))):
            raise CallError(
                "gradients per example cannot be differentiated again: call ut.grad(..., per_example=True) outside of "
                "what is recorded"
            )
        if not named:
            raise CallError(
                "per_example=True takes the arguments at argnums as shared and all others as batches of examples, "
                "and there is no other: give the examples as arguments"
            )
        sizes = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in named}
        self.num_examples = next(iter(sizes.values())) or 0
        if None in sizes.values() or len(set(sizes.values())) > 1 or not self.num_examples:
            found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named)
            raise CallError(
                f"with per_example=True the arguments that argnums does not name hold one example per index of their "
                f"first dimension, at least one and all equally many; got {found}"
            )

    def _batched(self, items: Any) -> list[tuple[Any, str, torch.Tensor]]:
        return [(key, path, t) for key, item in items if key not in self._shared for path, t in tensors_in(item)]

    def first(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call for the first example."""
        args = tuple(
            item if index in self._shared else replace_tensors(item, lambda tensor: tensor[0])
            for index, item in enumerate(self._args)
        )
        return args, {name: replace_tensors(item, lambda tensor: tensor[0]) for name, item in self._kwargs.items()}

    def run(self, call: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        """`call` for all examples at once; it gets the tensors of one example's arguments, in their order."""
        is_shared = [index in self._shared for index, item in enumerate(self._args) for _ in tensors_in(item)]
        is_shared += [False for _ in tensors_in(self._kwargs)]
        tensors = [tensor.detach() for _, tensor in tensors_in((self._args, self._kwargs))]

        def call_one(*examples: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest = iter(examples)
            return call([tensor if same else next(rest) for tensor, same in zip(tensors, is_shared, strict=True)])

        batched = [tensor for tensor, same in zip(tensors, is_shared, strict=True) if not same]
        try:
            # Each example draws its own numbers, as it would if the examples came one after the other.
            found: tuple[torch.Tensor, ...] = torch.func.vmap(call_one, randomness="different")(*batched)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise CaptureError(
                f"gradients per example: PyTorch cannot run this function for all examples at once: {reason}"
            ) from error
        return found


def one_line_of_code(program: Program, outputs: Sequence[Value]) -> Program:
    """The Program of one example so that it can run for all: `program` has no cotangents any more.

    Raises CaptureError for what would not be the same for every example.
    """
    for node in program.nodes:
        if (reason := _why_not(node)) is not None:
            where = f" ({node.origin})" if str(node.origin) else ""
            raise CaptureError(f"gradients per example: {node.name}{where} {reason}")
    if program.updates:
        path = next(item.path for item in program.inputs if item.value is program.updates[0].input)
        raise CaptureError(
            f"gradients per example: the function writes over a tensor that it did not make ({path}), and each example "
            f"would write something else; for batch normalisation use eval(), or another normalisation"
        )
    cleaned = remove_unused(replace(program, outputs=tuple(outputs)))
    return replace(cleaned, nodes=tuple(map(_on_any_strides, cleaned.nodes)))


def _why_not(node: Node) -> str | None:
    """Why an operation recorded for one example does not stand for all of them; None if it does."""
    operation = node.operation
    if operation.is_guard:
        return "branches on a value, and examples may differ in it; use torch.where"
    if operation.derivative_of is not None:
        return "has no derivative rule, and PyTorch takes its derivative for one example at a time; use torch.func"
    if operation.runs_user_code:
        return "is a custom autograd Function, which PyTorch runs for one example only; write it with tensor operations"
    if node.name.startswith("as_strided"):
        return "reads memory by strides, which all examples together do not have; use view, permute or unfold"
    return None


def _on_any_strides(node: Node) -> Node:
    """Among others, the values of one example may have other strides: what was a view may have to be a copy."""
    other = ON_ANY_STRIDES.get(node.operation.overload)
    return node if other is None else replace(node, operation=operation_of(other))
