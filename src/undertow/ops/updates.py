"""An optimizer's update of one parameter as an operation of the step.

The arithmetic is the optimizer's own: a shallow copy of it, with its live settings and its state, steps on a group of
one parameter. It may therefore run as soon as the gradient is complete and the parameter is read no more, with the
bits of a step afterwards. True for optimizers that treat every parameter by itself; those that were compared are named.
The commonest settings of these run in one pass over memory, with the same bits (see `one_pass_updates`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from undertow.ir import Node, Origin, TensorType, Value
from undertow.ir.cost import Cost
from undertow.ops.one_pass_updates import is_known, step_in_one_pass

SEPARABLE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether each parameter's update depends on nothing of the others; subclasses may do anything."""
    return type(optimizer) in SEPARABLE_OPTIMIZERS


@dataclass(frozen=True, eq=False)
class UpdateParameter:
    """Steps `optimizer` for one parameter; called with the parameter and its gradient.

    Where the forward pass itself gave the parameter another value, that comes third and is written first.
    """

    optimizer: torch.optim.Optimizer = field(repr=False)
    parameter: torch.nn.Parameter = field(repr=False)
    group_index: int
    has_effect = True

    def __call__(self, parameter: torch.Tensor, gradient: torch.Tensor, assigned: torch.Tensor | None = None) -> None:
        if assigned is not None:
            _assign(parameter, assigned)
        if not step_in_one_pass(self.optimizer, self.group_index, self.parameter, gradient):
            _step(self.optimizer, self.group_index, [self.parameter], [gradient])

    def overwrites(self, node: Node) -> tuple[Value, ...]:
        """The parameter itself."""
        return (node.args[0],)

    def prepare_rehearsal(self, parameter: torch.Tensor, gradient: torch.Tensor, *_: torch.Tensor) -> Callable[[], Any]:
        """A call that costs what the update costs, on a parameter nobody has."""
        twin = torch.nn.Parameter(parameter)
        double = _double(self.optimizer, self.group_index, [twin])
        _step(double, 0, [twin], [gradient])  # makes the state, which is not part of the cost
        update = UpdateParameter(double, twin, 0)
        return lambda: update(parameter, gradient)

    @property
    def settings(self) -> str:
        """What decides which kernels run."""
        passes = "one pass " if is_known(self.optimizer.param_groups[self.group_index], type(self.optimizer)) else ""
        return passes + _settings(self.optimizer, self.group_index)

    def __str__(self) -> str:
        return f"update_{type(self.optimizer).__name__.lower()}"


@dataclass(frozen=True, eq=False)
class DeliverGradient:
    """Gives a finished gradient to its parameter, as autograd's accumulation does.

    One that is added up from call to call is kept apart: the step may go on to write over what it was given.
    """

    parameter: torch.nn.Parameter = field(repr=False)
    is_added_up: bool
    has_effect = True

    def __call__(self, gradient: torch.Tensor) -> None:
        known = self.parameter.grad
        if known is None:
            self.parameter.grad = gradient.clone() if self.is_added_up else gradient
        else:
            known.add_(gradient)

    def __str__(self) -> str:
        return "deliver_gradient"


@dataclass(frozen=True, eq=False)
class RehearsedUpdates:
    """Updates of several parameters in a row, which never run in a step: for what a step afterwards costs."""

    optimizer: torch.optim.Optimizer = field(repr=False)
    group_index: int

    def __call__(self, parameters: tuple[torch.Tensor, ...]) -> None:
        raise AssertionError("a rehearsal is not part of any step")

    def prepare_rehearsal(self, parameters: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
        """A call that costs what the updates cost."""
        return _rehearse(
            self.optimizer, self.group_index, parameters, [torch.ones_like(parameter) for parameter in parameters]
        )

    @property
    def settings(self) -> str:
        """What decides which kernels run."""
        return _settings(self.optimizer, self.group_index)

    def __str__(self) -> str:
        return f"updates_{type(self.optimizer).__name__.lower()}"


NORM_BYTES = 2 * 64  # of a gradient: a number and its copy in the stack, each in an allocation of its own


@dataclass(eq=False)
class StepAfterwards:
    """The optimizer's own step, when all gradients are there: after clipping, or at every so many calls.

    `assignments` are parameters to which the forward pass itself gave another value, and that value.
    """

    model: torch.nn.Module = field(repr=False)
    optimizer: torch.optim.Optimizer = field(repr=False)
    clip_norm: float | None
    accumulate: int
    num_calls: int = 0
    has_effect = True

    def __call__(
        self,
        parameters: tuple[torch.Tensor, ...],
        gradients: tuple[torch.Tensor, ...],
        assignments: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    ) -> None:
        for parameter, value in assignments:
            _assign(parameter, value)
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

    def parts(self) -> list[Node]:
        """What the step is measured by: updates of two parameters in a row.

        The temporaries of one update live on until those of the next take their names.
        """
        parts = []
        for index, group in enumerate(self.optimizer.param_groups):
            values = [Value("parameter", TensorType.of(parameter)) for parameter in group["params"]]
            rows = [(value,) for value in values] if group.get("foreach") else [(values[0],), *pairwise(values)]
            parts += [Node(RehearsedUpdates(self.optimizer, index), (row,), {}, (), Origin()) for row in rows]
        return parts

    def cost(self, parts: Sequence[Cost]) -> Cost:
        """The cost of the step from those of its parts: temporaries of a `foreach` step are there all at once."""
        is_at_once = any(group.get("foreach") for group in self.optimizer.param_groups)
        workspace_bytes = (sum if is_at_once else max)(part.workspace_bytes for part in parts)
        workspace_bytes += NORM_BYTES * (len(parts) + 8) if self.clip_norm is not None else 0
        return Cost(sum(part.duration_ns for part in parts) // (1 if is_at_once else 2), workspace_bytes)

    def __str__(self) -> str:
        return f"step_{type(self.optimizer).__name__.lower()}"


UPDATES = (UpdateParameter, DeliverGradient, StepAfterwards)


def _assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def _settings(optimizer: torch.optim.Optimizer, group_index: int) -> str:
    """Switches, and whether a number is zero: other kernels run then."""
    group = optimizer.param_groups[group_index]
    return f"[{', '.join(f'{name}={_as_switch(item)}' for name, item in sorted(group.items()) if name != 'params')}]"


def _as_switch(setting: Any) -> str:
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        return "0" if setting == 0 else "number"
    if isinstance(setting, torch.Tensor):
        return "tensor"
    return str(setting) if isinstance(setting, bool | str | None) else type(setting).__name__


def _step(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
) -> None:
    single = copy.copy(optimizer)
    single.param_groups = [{**optimizer.param_groups[group_index], "params": list(parameters)}]
    # The user's hooks belong to a whole step and run once around it.
    single._optimizer_step_pre_hooks = OrderedDict()
    single._optimizer_step_post_hooks = OrderedDict()
    before = [parameter.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        type(optimizer).step(single)
    finally:
        for parameter, gradient_before in zip(parameters, before, strict=True):
            parameter.grad = gradient_before


def _rehearse(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> Callable[[], Any]:
    twins = [torch.nn.Parameter(parameter) for parameter in parameters]
    double = _double(optimizer, group_index, twins)
    _step(double, 0, twins, gradients)  # makes the state, which is not part of the cost
    return lambda: _step(double, 0, twins, gradients)


def _double(optimizer: torch.optim.Optimizer, group_index: int, parameters: list[torch.nn.Parameter]) -> Any:
    """An optimizer with the settings of a group, other parameters and no state."""
    double = copy.copy(optimizer)
    double.state = type(optimizer.state)(dict)
    double.param_groups = [{**optimizer.param_groups[group_index], "params": parameters}]
    return double
