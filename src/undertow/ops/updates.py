"""What a step does with gradients, as operations: an optimizer's update of one parameter, or of all of them.

The arithmetic is the optimizer's own: a shallow copy of it, with its settings and its state, steps on a group of one
parameter. So an update can run as soon as the gradient is complete and nothing reads the parameter any more, with the
bits of a later step. This holds for optimizers that treat each parameter separately; those that were compared are named
here. Their most common settings run in one pass over memory, with the same bits (see `one_pass_updates`).

The records hold what the choice of kernels depends on. The optimizer is bound when a step is made (`OPTIMIZER`,
`LATER_STEP`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from undertow.ir import Node, Origin, TensorType, Value
from undertow.ir.cost import Cost
from undertow.ir.live import Live
from undertow.ir.operation import Operation, Parts, operation_maker, register_operation
from undertow.ops.one_pass_updates import is_known, step_in_one_pass
from undertow.ops.sending import SendGradients

ELEMENTWISE_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
SEPARABLE_OPTIMIZERS = (*ELEMENTWISE_OPTIMIZERS, torch.optim.Adagrad, torch.optim.SparseAdam)
OPTIMIZER = Live("optimizer")
LATER_STEP = Live("later step")  # a LaterStep


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no parameter's update depends on other parameters; of subclasses this is not known."""
    return type(optimizer) in (*SEPARABLE_OPTIMIZERS, SendGradients)


def gradient_chain(parameter: Value) -> str:
    """The name of the chain of all uses of a parameter's gradient."""
    return chain_of(parameter.name)


def chain_of(name: str) -> str:
    """The same, by the parameter's name."""
    return f"gradient of {name}"


@operation_maker
def update_parameter(kind: str, settings: str, needs_cpu: bool) -> Operation:
    """(optimizer, group, parameter, gradient, the forward pass's new value of the parameter if any): one update.

    `kind` and `settings` decide which kernels run; `needs_cpu` where the optimizer counts its steps there.
    """
    reason = f"{kind} counts its steps on the CPU; make it with capturable=True" if needs_cpu else None
    return Operation(
        f"update_{kind.lower()}",
        update_with,
        writes=lambda node: (node.args[2],),
        must_run=True,
        chains=lambda node: (gradient_chain(node.args[2]),),
        can_repeat=False,
        settings=settings,
        rehearse=rehearse_update,
        assumed_workspace=lambda node: 0,
        why_not_captured=lambda node: reason,
    )


def update_by(optimizer: torch.optim.Optimizer, group_index: int) -> Operation:
    """The update of one parameter of a group."""
    group = optimizer.param_groups[group_index]
    passes = "one pass " if is_known(group, type(optimizer)) else ""
    needs_cpu = not isinstance(optimizer, torch.optim.SGD) and not group.get("capturable")
    return update_parameter(type(optimizer).__name__, passes + settings_of(optimizer, group_index), needs_cpu)


def update_with(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameter: torch.nn.Parameter,
    gradient: torch.Tensor,
    assigned: torch.Tensor | None = None,
) -> None:
    """Let the optimizer update one parameter of a group, which first gets the value that was assigned to it."""
    if assigned is not None:
        assign(parameter, assigned)
    if not step_in_one_pass(optimizer, group_index, parameter, gradient):
        step_alone(optimizer, group_index, [parameter], [gradient])


def rehearse_update(
    optimizer: torch.optim.Optimizer, group_index: int, parameter: torch.Tensor, gradient: torch.Tensor, *_: Any
) -> Callable[[], Any]:
    """A call that costs as much as the update, on a made-up parameter."""
    twin = torch.nn.Parameter(parameter)
    double = double_of(optimizer, group_index, [twin])
    step_alone(double, 0, [twin], [gradient])  # makes the state, which is not part of the cost
    return lambda: update_with(double, 0, twin, gradient)


def _deliver_gradient(parameter: torch.nn.Parameter, gradient: torch.Tensor, is_added_up: bool) -> None:
    known = parameter.grad
    if known is None:
        parameter.grad = gradient.clone() if is_added_up else gradient
    else:
        known.add_(gradient)


# (parameter, gradient, is_added_up): gives a finished gradient to its parameter, as autograd's accumulation does. Where
# gradients are added from call to call, the sum has its own memory: the step may still write over what it was given.
DELIVER_GRADIENT = register_operation(
    Operation(
        "deliver_gradient",
        _deliver_gradient,
        releases_arguments=False,
        hands_over=1,
        must_run=True,
        chains=lambda node: (gradient_chain(node.args[0]),),
        can_repeat=False,
        is_measurable=False,
    )
)


@dataclass(eq=False)
class LaterStep:
    """What the later step of an optimizer works on; `num_calls` counts the calls of the training step.

    `norm` is that of all gradients at the last update, where they are clipped: a number that stays.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    num_calls: int = 0
    norm: torch.Tensor | None = None
    count_call: Callable[[], int] | None = None  # where workers add to one gradient, over all of them
    keeps_sums: bool = False  # gradients are set to 0 where they lie
    locked: Callable[[], AbstractContextManager[None]] = nullcontext
    clip: Callable[[Iterable[torch.Tensor], float], torch.Tensor] = torch.nn.utils.clip_grad_norm_


NORM_BYTES = 2 * 64  # per gradient: its norm and a copy of it in the stack, each in an allocation of its own


@operation_maker
def step_afterwards(kind: str) -> Operation:
    """(later step, norm to clip to, calls to accumulate, parameters, gradients, assignments): the optimizer's own step.

    It runs when all gradients are there: with clipping, or once in `accumulate` calls. `assignments` are parameters to
    which the forward pass itself assigned, each with its new value.
    """
    return Operation(
        f"step_{kind.lower()}",
        _step_afterwards,
        writes=lambda node: node.args[3],
        releases_arguments=False,
        must_run=True,
        chains=lambda node: tuple(map(gradient_chain, node.args[3])),
        can_repeat=False,
        is_measurable=False,
        parts=_parts_of_step,
        why_not_captured=lambda node: "the optimizer steps after the backward pass",
    )


def _step_afterwards(
    later: LaterStep,
    clip_norm: float | None,
    accumulate: int,
    parameters: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    assignments: tuple[tuple[torch.Tensor, torch.Tensor], ...],
) -> None:
    for parameter, value in assignments:
        assign(parameter, value)
    later.num_calls = later.num_calls + 1 if later.count_call is None else later.count_call()
    if later.num_calls % accumulate:
        return
    with later.locked():
        _step_now(later, clip_norm)


def _step_now(later: LaterStep, clip_norm: float | None) -> None:
    if clip_norm is not None:
        # In the model's order: a norm is a sum, and its last bit depends on the order.
        norm = later.clip(later.model.parameters(), clip_norm)
        assert later.norm is not None
        later.norm.copy_(norm)
    later.optimizer.step()
    later.optimizer.zero_grad(set_to_none=not later.keeps_sums)


def _parts_of_step(node: Node, live: Mapping[str, Any]) -> Parts:
    """What a later step is measured by: updates of two parameters in a row.

    The temporaries of one update are freed only when the next update assigns to the same names. A `foreach` step has
    all its temporaries at once.
    """
    optimizer, clip_norm = live[LATER_STEP.name].optimizer, node.args[1]
    is_at_once = any(group.get("foreach") for group in optimizer.param_groups)
    nodes = []
    for index, group in enumerate(optimizer.param_groups):
        values = [Value("parameter", TensorType.of(parameter)) for parameter in group["params"]]
        rows = [(value,) for value in values] if group.get("foreach") else [(values[0],), *pairwise(values)]
        operation = rehearsed_updates(type(optimizer).__name__, settings_of(optimizer, index))
        nodes += [Node(operation, (LATER_STEP, index, row), {}, (), Origin()) for row in rows]

    def combine(costs: Sequence[Cost]) -> Cost:
        workspace_bytes = (sum if is_at_once else max)(cost.workspace_bytes for cost in costs)
        workspace_bytes += NORM_BYTES * (len(costs) + 8) if clip_norm is not None else 0
        return Cost(sum(cost.duration_ns for cost in costs) // (1 if is_at_once else 2), workspace_bytes)

    return Parts(nodes, combine)


@operation_maker
def rehearsed_updates(kind: str, settings: str) -> Operation:
    """(later step, group, parameters): updates in a row, to measure a later step; no step runs them."""
    return Operation(f"updates_{kind.lower()}", _never_run, settings=settings, rehearse=_rehearse_updates)


def _never_run(*args: Any) -> None:
    raise AssertionError("a rehearsal is not part of any step")


def _rehearse_updates(later: LaterStep, group_index: int, parameters: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    gradients = [torch.ones_like(parameter) for parameter in parameters]
    twins = [torch.nn.Parameter(parameter) for parameter in parameters]
    double = double_of(later.optimizer, group_index, twins)
    step_alone(double, 0, twins, gradients)  # makes the state, which is not part of the cost
    return lambda: step_alone(double, 0, twins, gradients)


def assign(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Give a parameter the value that the forward pass assigned to it."""
    with torch.no_grad():
        parameter.copy_(value)


def settings_of(optimizer: torch.optim.Optimizer, group_index: int) -> str:
    """The settings that kernels depend on: switches, and whether a number is zero."""
    group = optimizer.param_groups[group_index]
    return f"[{', '.join(f'{name}={_as_switch(item)}' for name, item in sorted(group.items()) if name != 'params')}]"


def _as_switch(setting: Any) -> str:
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        return "0" if setting == 0 else "number"
    if isinstance(setting, torch.Tensor):
        return "tensor"
    return str(setting) if isinstance(setting, bool | str | None) else type(setting).__name__


def step_alone(
    optimizer: torch.optim.Optimizer,
    group_index: int,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
) -> None:
    """The optimizer's own step, on some parameters of a group with these gradients."""
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


def double_of(optimizer: torch.optim.Optimizer, group_index: int, parameters: list[torch.nn.Parameter]) -> Any:
    """An optimizer with the settings of a group, other parameters and no state."""
    double = copy.copy(optimizer)
    double.state = type(optimizer.state)(dict)
    double.param_groups = [{**optimizer.param_groups[group_index], "params": parameters}]
    if isinstance(optimizer, torch.optim.Adagrad):  # it makes its state when it is made, not when it first steps
        double.state.update(torch.optim.Adagrad(parameters).state)
    return double
