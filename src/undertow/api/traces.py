"""`trace`: a function's computation graph with value and derivative at every node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from undertow.api.calls import check_arguments
from undertow.autodiff.backward import backward_as_forward, differentiate_everywhere
from undertow.errors import CallError
from undertow.ir import InputKind, Node, Value
from undertow.ir.cleaning import remove_unused
from undertow.ir.printer import format_argument
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.record.capture import capture
from undertow.report.value_graph import GraphNode, Trace
from undertow.runtime.code import compile_program
from undertow.runtime.direct import DirectRun


def trace(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Trace:
    """Every node's value and the derivative of `function`'s result, a scalar, by it."""
    check_arguments(args, kwargs)
    module = function if isinstance(function, torch.nn.Module) else None
    called = module.forward if module is not None else function
    fresh_args, fresh_kwargs = replace_tensors(
        (args, kwargs or {}), lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point())
    )
    with torch.enable_grad():
        captured = capture(called, fresh_args, fresh_kwargs, module)
    program = captured.program
    if len(program.outputs) != 1 or program.outputs[0].tensor_type.num_elements != 1:
        shapes = ", ".join(str(value.type) for value in program.outputs) or "no tensor"
        raise CallError(f"the function must return one scalar tensor, got {shapes}: reduce it, for example with .sum()")
    wanted = [item.value for item in program.inputs if item.value in program.differentiable]
    joint, cotangents = differentiate_everywhere(program, program.outputs, wanted)
    shown = [item.value for item in program.inputs]
    shown += [
        value for node in program.nodes for value in node.outputs if value is not None and node.outputs[0] is value
    ]
    outputs = [*shown, *(cotangents[value] for value in shown if value in cotangents)]
    whole = remove_unused(replace(backward_as_forward(joint, outputs), updates=()))
    tensors = [tensor for _, tensor in tensors_in((fresh_args, fresh_kwargs))]
    modules = dict(module.named_modules()) if module is not None else {}
    inputs = [
        torch.ones(
            item.value.tensor_type.shape, dtype=item.value.tensor_type.dtype, device=item.value.tensor_type.device
        )
        if item.kind is InputKind.COTANGENT
        else captured.tensor_behind(item, tensors, modules)
        for item in whole.inputs
    ]
    found = dict(zip(outputs, DirectRun(whole, compile_program(whole, captured.live), inputs).outputs, strict=True))
    makers = program.makers
    return Trace(
        tuple(
            GraphNode(
                name=value.name,
                label=_label(makers[value]) if value in makers else value.name,
                reads=tuple(dict.fromkeys(read.name for read in makers[value].inputs)) if value in makers else (),
                value=found[value],
                derivative=found[cotangents[value]] if value in cotangents else None,
                location=str(makers[value].origin) if value in makers else "",
            )
            for value in shown
        )
    )


def _label(node: Node) -> str:
    constants = [format_argument(argument) for argument in node.args if not isinstance(argument, Value)]
    name = node.name.partition(".")[0]
    return f"{name} {', '.join(constants)}" if constants else name
