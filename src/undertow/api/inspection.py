"""`inspect`: where the memory and the arithmetic of a training step go. The model is neither run nor changed."""

from __future__ import annotations

from typing import Any

import torch

from undertow.api.calls import check_call, check_optimizer
from undertow.costs.optimizer_state import count_optimizer_state
from undertow.ir import Input, InputKind, Program, TensorType, Value
from undertow.memory.tables import make_plan
from undertow.pipeline import Request, derive, expected_pattern, record
from undertow.report.inspection import Inspection, inspect_plans
from undertow.terms import Terms


def inspect(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> Inspection:
    """Memory, arithmetic and memory traffic of a training step of `model`, layer by layer.

    The model is taken as it is, in train() or eval() mode. Inference is its forward pass alone.
    """
    check_call(model, args, kwargs)
    check_optimizer(model, optimizer)
    runner = getattr(model, "undertow_runner", None)
    request = Request(model, model.forward if runner is None else runner.request.forward, Terms())
    with torch.enable_grad():
        captured = record(request, args, kwargs or {})
    pattern = expected_pattern(request, captured)
    plan = make_plan(derive(request, captured.program, pattern))
    forward_plan = make_plan(derive(request, captured.program, (False,) * len(pattern)))
    step = plan.program
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = [
        parameters[item.path]
        for item in step.inputs
        if item.kind is InputKind.PARAMETER
        and any(gradient.input is item.value and gradient.value is not None for gradient in step.gradients)
    ]
    return inspect_plans(
        plan,
        forward_plan,
        {path: type(module).__name__ for path, module in model.named_modules()},
        _find_unused(model, step),
        None if optimizer is None else count_optimizer_state(optimizer, trained),
    )


def _find_unused(model: torch.nn.Module, program: Program) -> list[Input]:
    """Parameters and buffers that the Program does not use, tied ones once."""
    known = {item.path for item in program.inputs if item.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    found = []
    for kind, tensors in ((InputKind.PARAMETER, model.named_parameters()), (InputKind.BUFFER, model.named_buffers())):
        found += [Input(Value(path, TensorType.of(item)), kind, path) for path, item in tensors if path not in known]
    return found
