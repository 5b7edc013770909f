"""The pipeline, spelled out once: capture, autodiff, runtime.

Public names live here and are re-exported by the package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undertow import ops as ops
from undertow.api.calls import check_call
from undertow.autodiff.backward import differentiate
from undertow.capture.capture import capture
from undertow.capture.origins import place_of
from undertow.ir import Program
from undertow.ops.cleaning import remove_unused
from undertow.ops.reuse import reuse_dead_inputs
from undertow.runtime.planned import Runner, make_planned
from undertow.runtime.step import Pattern


def plan(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, strict: bool = False
) -> Any:
    """A module with the model's parameters that trains by an explicit, derived backward pass."""
    check_call(model, args, kwargs)

    def make_runner(module: torch.nn.Module, forward: Callable[..., Any]) -> Runner:
        return Runner(module, forward, capture, lambda program, pattern: _derive(program, pattern, strict), place_of)

    planned = make_planned(model, make_runner)
    planned.undertow_runner.variant_for(args, kwargs or {}).step()
    return planned


def _derive(program: Program, pattern: Pattern, is_strict: bool) -> Program:
    """The backward pass from the outputs marked in `pattern`, and memory reused where that changes no bit."""
    if any(pattern):
        inputs = {item.value for item in program.inputs}
        carriers = [value for value in program.outputs if value in program.differentiable and value not in inputs]
        outputs = [value for value, is_present in zip(carriers, pattern, strict=True) if is_present]
        wanted = [item.value for item in program.inputs if item.value in program.differentiable]
        program = differentiate(program, outputs, wanted, is_strict=is_strict)
    return reuse_dead_inputs(remove_unused(program))
