"""An optimizer's update of one parameter as an operation of the step.

The arithmetic is the optimizer's own: a shallow copy of it, with its live settings and its state, steps on a group of
one parameter. It may therefore run as soon as the gradient is complete and the parameter is read no more, with the
bits of a step afterwards. True for optimizers that treat every parameter by itself; those that were compared are named.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.ir import Node, Value

SEPARABLE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each parameter's update depends on nothing of the others; subclasses may do anything."""
    return type(optimizer) in SEPARABLE_OPTIMIZERS


@dataclass(frozen=True, eq=False)
class UpdateParameter:
    """Steps `optimizer` for one parameter; called with the parameter and its gradient."""

    optimizer: torch.optim.Optimizer = field(repr=False)
    parameter: torch.nn.Parameter = field(repr=False)
    group_index: int
    has_effect = True

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        _step_one(self.optimizer, self.group_index, self.parameter, gradient)

    def overwrites(self, node: Node) -> tuple[Value, ...]:
        """The parameter itself."""
        return (node.args[0],)

    def prepare_rehearsal(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
        """A call that costs what the update costs, on a parameter nobody has."""
        twin = torch.nn.Parameter(parameter)
        optimizer = copy.copy(self.optimizer)
        optimizer.state = type(self.optimizer.state)(dict)
        optimizer.param_groups = [{**self.optimizer.param_groups[self.group_index], "params": [twin]}]
        _step_one(optimizer, 0, twin, gradient)  # makes the state, which is not part of the cost
        return lambda: _step_one(optimizer, 0, twin, gradient)

    def __str__(self) -> str:
        return f"update_{type(self.optimizer).__name__.lower()}"


@dataclass(frozen=True, eq=False)
class DeliverGradient:
    """Gives a finished gradient to its parameter, as autograd's accumulation does."""

    parameter: torch.nn.Parameter = field(repr=False)
    has_effect = True

    def __call__(self, gradient: torch.Tensor) -> None:
        known = self.parameter.grad
        self.parameter.grad = gradient if known is None else known.add_(gradient)

    def __str__(self) -> str:
        return "deliver_gradient"


@dataclass(eq=False)
class StepAfterwards:
    """The optimizer's own step, when all gradients are there: after clipping, or at every so many calls."""

    model: torch.nn.Module = field(repr=False)
    optimizer: torch.optim.Optimizer = field(repr=False)
    clip_norm: float | None
    accumulate: int
    num_calls: int = 0
    has_effect = True

    def __call__(self, parameters: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...]) -> None:
        self.num_calls += 1
        if self.num_calls % self.accumulate:
            return
        if self.clip_norm is not None:
            # In the model's order: a norm is a sum, and its last bit depends on the order.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def overwrites(self, node: Node) -> tuple[Value, ...]:
        """All parameters."""
        return node.args[0]

    @property
    def workspace_bytes(self) -> int:
        """The temporaries of the parameter whose update takes most; parameters are updated one after the other."""
        return max(
            num_temporaries(self.optimizer, group) * parameter.nbytes
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    def __str__(self) -> str:
        return f"step_{type(self.optimizer).__name__.lower()}"


def num_temporaries(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size an update makes and drops, read off torch.optim's loops over tensors."""
    decayed = 1 if group.get("weight_decay") else 0  # the gradient with the decay added
    if type(optimizer) is torch.optim.SGD:
        return decayed + (1 if group["nesterov"] else 0)
    # Adam's denominator and its square root; AdamW decays the parameter itself. Others are taken to be like Adam.
    return 2 + (0 if group.get("decoupled_weight_decay") else decayed)


UPDATES = (UpdateParameter, DeliverGradient, StepAfterwards)


def _step_one(
    optimizer: torch.optim.Optimizer, group_index: int, parameter: torch.nn.Parameter, gradient: torch.Tensor
) -> None:
    single = copy.copy(optimizer)
    single.param_groups = [{**optimizer.param_groups[group_index], "params": [parameter]}]
    # The user's hooks belong to a whole step and run once around it.
    single._optimizer_step_pre_hooks = OrderedDict()
    single._optimizer_step_post_hooks = OrderedDict()
    before, parameter.grad = parameter.grad, gradient
    try:
        type(optimizer).step(single)
    finally:
        parameter.grad = before
