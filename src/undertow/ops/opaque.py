"""Derivatives that PyTorch takes at run time: custom autograd Functions, and operations without a rule.

Both run autograd on one operation only. A custom Function runs in the forward pass, and its context is kept for the
backward pass. An operation without a rule runs again in the backward pass, under the generator state of its first run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from undertow.errors import MissingRule
from undertow.ir.operation import Operation, operation_maker
from undertow.ir.schema import flatten_outputs
from undertow.ops.modes import AutocastState, records_in_autograd, restored_autocast, with_autograd
from undertow.ops.own import replayed

_APPLY = torch.autograd.Function.__dict__["apply"]


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, also while a capture has put its own in place of `apply`."""
    # A classmethod up to PyTorch 2.13, a method of C's after that: both bind like this.
    return _APPLY.__get__(None, function)(*args)


@dataclass(frozen=True, eq=False)
class FunctionContext:
    """What a custom Function's backward reads: the part of the autograd graph that its forward made."""

    leaves: list[Any]
    outputs: list[torch.Tensor | None]


@operation_maker
def custom_function(
    name: str,
    requires_grad: tuple[bool, ...],
    has_gradient: tuple[bool, ...],
    autocast: AutocastState,
    is_dirty: bool,
) -> Operation:
    """(function, *args) -> its outputs, then the context that its own backward reads. It calls `function.apply`.

    Per argument: whether it requires a gradient, and whether the Function's backward gives it one (False where it
    returns None). `autocast` is the state that custom_fwd asks about; a dirty Function writes into an argument.
    """
    return Operation(
        name,
        partial(_run_function, requires_grad, autocast, is_dirty),
        returns_tuple=True,
        borrows=True,
        releases_arguments=False,
        can_repeat=False,
        runs_user_code=True,
    )


def gradients_given(operation: Operation) -> tuple[bool, ...]:
    """Per argument of a custom Function, whether its backward gives a gradient."""
    _, _, has_gradient, _, _ = operation.parameters
    return has_gradient


def _run_function(
    requires_grad: tuple[bool, ...],
    autocast: AutocastState,
    is_dirty: bool,
    function: type[torch.autograd.Function],
    *args: Any,
) -> tuple[Any, ...]:
    with with_autograd(), torch.set_grad_enabled(any(requires_grad)), restored_autocast(autocast):
        leaves = [
            arg.detach().requires_grad_(needs) if isinstance(arg, torch.Tensor) else arg
            for arg, needs in zip(args, requires_grad, strict=True)
        ]
        passed = [leaf.clone() if is_dirty and isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        outputs = flatten_outputs(apply_function(function, *passed))
        detached = [None if output is None else output.detach() for output in outputs]
    return (*detached, FunctionContext(leaves, outputs)) if any(requires_grad) else tuple(detached)


@operation_maker
def custom_function_backward(name: str, wanted: tuple[int, ...]) -> Operation:
    """(context, *cts) -> the cotangents of the arguments at the positions `wanted`, by the Function's own backward."""
    return Operation(
        f"{name}.backward",
        partial(_run_function_backward, wanted),
        returns_tuple=True,
        releases_arguments=False,
        can_repeat=False,
    )


def _run_function_backward(
    wanted: tuple[int, ...], context: FunctionContext, *cts: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    with with_autograd():
        leaves = [context.leaves[position] for position in wanted]
        # The graph is retained as long as the step keeps its context: every column of a Hessian reads it.
        return _without_gaps(leaves, gradients_through_autograd(context.outputs, leaves, cts, keeps_graph=True))


@operation_maker
def applied_function(name: str, autocast: AutocastState, is_dirty: bool) -> Operation:
    """(function, *args) -> its outputs, with the history that PyTorch gives them: to be differentiated twice."""

    def run(function: type[torch.autograd.Function], *args: Any) -> tuple[Any, ...]:
        with restored_autocast(autocast):
            passed = [arg.clone() if is_dirty and isinstance(arg, torch.Tensor) else arg for arg in args]
            return tuple(flatten_outputs(function.apply(*passed)))

    return Operation(name, run, returns_tuple=True, can_repeat=False, runs_user_code=True)


@operation_maker
def through_autograd(inner: Operation, wanted: tuple[int, ...]) -> Operation:
    """The derivative of an operation without a rule: run it again under its generator state, with autograd.

    `wanted` are the positions, among all tensors in the arguments, whose cotangents are returned.
    (args, names and values of the named arguments, cts, state or None) -> cotangents
    """
    return Operation(
        f"through_autograd[{inner.name}]",
        lambda *args: _without_gaps(*gradients_of(inner, wanted, *args)),
        returns_tuple=True,
        releases_arguments=False,
        can_repeat=False,
        derivative_of=inner,
    )


def gradients_of(
    inner: Operation,
    wanted: tuple[int, ...],
    args: Any,
    kwargs_names: tuple[str, ...],
    kwargs_values: Any,
    cts: Any,
    state: torch.Tensor | None,
) -> tuple[list[torch.Tensor], tuple[torch.Tensor | None, ...]]:
    """The wanted arguments of an operation without a rule, and their cotangents; None where nothing depends on one.

    When this is called while autograd records, it is being differentiated itself: its arguments keep their history.
    """
    leaves: list[torch.Tensor] = []
    is_differentiated = records_in_autograd()

    def make_leaves(arguments: Any) -> Any:
        if isinstance(arguments, torch.Tensor):
            is_wanted = len(leaves) in wanted
            if is_differentiated and arguments.requires_grad:
                leaf = arguments.view_as(arguments)  # so that a tensor that is given twice is two leaves
            else:
                leaf = arguments.detach().requires_grad_(is_wanted)
            leaves.append(leaf)
            return leaf
        return tuple(map(make_leaves, arguments)) if isinstance(arguments, tuple | list) else arguments

    with with_autograd():
        leaf_args = make_leaves(args)
        leaf_kwargs = dict(zip(kwargs_names, make_leaves(kwargs_values), strict=True))
        if state is None:
            # PyTorch's operation, not a kernel of ours that may stand for it: autograd has no derivative for ours.
            outputs = flatten_outputs((inner.overload or inner.run)(*leaf_args, **leaf_kwargs))
        else:
            outputs = list(replayed(inner, leaves[0].device)(state, *leaf_args, **leaf_kwargs))
        reached = [leaves[position] for position in wanted]
        return reached, gradients_through_autograd(outputs, reached, cts, is_differentiated=is_differentiated)


def _without_gaps(leaves: list[torch.Tensor], found: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    )


def gradients_through_autograd(
    outputs: list[Any], leaves: list[Any], cts: Any, *, keeps_graph: bool = False, is_differentiated: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """The cotangents of `leaves` as PyTorch computes them; None where an output does not depend on a leaf."""
    reached = [
        (output, ct)
        for output, ct in zip(outputs, cts, strict=False)
        if ct is not None and output is not None and output.requires_grad
    ]
    if not reached:
        return (None,) * len(leaves)
    try:
        return torch.autograd.grad(
            [output for output, _ in reached],
            leaves,
            [ct for _, ct in reached],
            allow_unused=True,
            retain_graph=keeps_graph or is_differentiated,
            create_graph=is_differentiated,
        )
    except RuntimeError as error:
        if "derivative for" not in str(error):
            raise
        raise MissingRule(f"PyTorch has no derivative here either: {error}") from error
