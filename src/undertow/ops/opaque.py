"""Derivatives that PyTorch takes at run time: custom autograd Functions, and operations without a rule.

Both run autograd on the one operation alone. A custom Function runs in the forward pass with its own context kept for
the backward pass. An operation without a rule is run again in the backward pass, under the generator state it had.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir import operation_name
from undertow.ops.modes import AutocastState, restored_autocast, with_autograd
from undertow.ops.own import Replayed
from undertow.ops.schema import flatten_outputs

OriginalApply = torch.autograd.Function.__dict__["apply"].__func__


@dataclass(frozen=True, eq=False)
class CustomFunction:
    """`function.apply`, opaque: its outputs, then the context that its own backward reads."""

    function: type[torch.autograd.Function]
    requires_grad: tuple[bool, ...]  # per argument
    has_gradient: tuple[bool, ...]  # per argument: False where its backward returns None
    autocast: AutocastState  # custom_fwd asks for it
    is_dirty: bool  # writes into an argument
    returns_tuple = True

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        with with_autograd(), torch.set_grad_enabled(any(self.requires_grad)), restored_autocast(self.autocast):
            leaves = [
                arg.detach().requires_grad_(needs) if isinstance(arg, torch.Tensor) else arg
                for arg, needs in zip(args, self.requires_grad, strict=True)
            ]
            passed = [leaf.clone() if self.is_dirty and isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            outputs = flatten_outputs(OriginalApply(self.function, *passed))
            detached = [None if output is None else output.detach() for output in outputs]
        return (*detached, FunctionContext(leaves, outputs)) if any(self.requires_grad) else tuple(detached)

    def __str__(self) -> str:
        return self.function.__name__


@dataclass(frozen=True, eq=False)
class FunctionContext:
    """What a custom Function's backward reads: the piece of autograd graph that its forward made."""

    leaves: list[Any]
    outputs: list[torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class CustomFunctionBackward:
    """The custom Function's own backward; `wanted` are positions of arguments."""

    forward: CustomFunction
    wanted: tuple[int, ...]
    returns_tuple = True

    def __call__(self, context: FunctionContext, *cts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        with with_autograd():
            return _pull_back(context.outputs, [context.leaves[position] for position in self.wanted], cts)

    def __str__(self) -> str:
        return f"{self.forward}.backward"


@dataclass(frozen=True, eq=False)
class ThroughAutograd:
    """The derivative of an operation without a rule: run it again, under its generator state, and ask PyTorch.

    `wanted` are the positions, among all tensors in the arguments, whose cotangents are returned.
    """

    target: Any
    wanted: tuple[int, ...]
    returns_tuple = True

    def __call__(
        self, args: Any, kwargs_names: tuple[str, ...], kwargs_values: Any, cts: Any, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        leaves: list[torch.Tensor] = []
        with with_autograd():
            leaf_args = self._make_leaves(args, leaves)
            leaf_kwargs = dict(zip(kwargs_names, self._make_leaves(kwargs_values, leaves), strict=True))
            if state is None:
                outputs = flatten_outputs(self.target(*leaf_args, **leaf_kwargs))
            else:
                outputs = list(Replayed(self.target, leaves[0].device)(state, *leaf_args, **leaf_kwargs))
            return _pull_back(outputs, [leaves[position] for position in self.wanted], cts)

    def _make_leaves(self, arguments: Any, leaves: list[torch.Tensor]) -> Any:
        if isinstance(arguments, torch.Tensor):
            leaf = arguments.detach()
            leaves.append(leaf.requires_grad_(len(leaves) in self.wanted))
            return leaf
        if isinstance(arguments, tuple | list):
            return tuple(self._make_leaves(item, leaves) for item in arguments)
        return arguments

    def __str__(self) -> str:
        return f"through_autograd[{operation_name(self.target)}]"


def _pull_back(outputs: list[Any], leaves: list[torch.Tensor], cts: Any) -> tuple[torch.Tensor, ...]:
    found = gradients_through_autograd(outputs, leaves, cts)
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    )


def gradients_through_autograd(outputs: list[Any], leaves: list[Any], cts: Any) -> tuple[torch.Tensor | None, ...]:
    """The cotangents of `leaves` as PyTorch computes them; None where an output does not depend on a leaf."""
    reached = [
        (output, ct)
        for output, ct in zip(outputs, cts, strict=False)
        if ct is not None and output is not None and output.requires_grad
    ]
    if not reached:
        return (None,) * len(leaves)
    return torch.autograd.grad([pair[0] for pair in reached], leaves, [pair[1] for pair in reached], allow_unused=True)
