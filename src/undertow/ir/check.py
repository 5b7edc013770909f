"""`check_program`: raises ProgramError where a Program is malformed. Run after every pass."""

from __future__ import annotations

from undertow.errors import ProgramError
from undertow.ir.program import Node, Program
from undertow.ir.values import Value


def check_program(program: Program) -> Program:
    """Every value is assigned once, before it is read; outputs, updates and gradients exist. Returns the Program."""
    defined: set[Value] = set()
    names: set[str] = set()
    _define([item.value for item in program.inputs], "an input", defined, names)
    inputs = set(defined)
    if not 0 <= program.boundary <= len(program.nodes):
        raise ProgramError(f"boundary is {program.boundary} of {len(program.nodes)} nodes")
    for node in program.first_pass:
        _check_node(node, defined, names)
    _require(program.outputs, "output", defined)
    for update in program.updates:
        if update.input not in inputs:
            raise ProgramError(f"update of {update.input}, which is not an input")
        _require((update.value,), "update", defined)
        if update.input.type != update.value.type and update.input.tensor_type.shape != update.value.tensor_type.shape:
            raise ProgramError(f"update of {update.input}: {update.input.type} <- {update.value.type}")
    _define([item.value for item in program.cotangents], "a cotangent", defined, names)
    for node in program.second_pass:
        _check_node(node, defined, names)
    for gradient in program.gradients:
        if gradient.input not in inputs:
            raise ProgramError(f"gradient of {gradient.input}, which is not an input")
        if gradient.value is not None:
            _require((gradient.value,), "gradient", defined)
            if not gradient.is_in_rows:
                _check_gradient_type(gradient.input, gradient.value)
    for value in program.differentiable:
        if not value.type.is_differentiable:
            raise ProgramError(f"{value} of type {value.type} cannot carry a gradient")
    return program


def _check_node(node: Node, defined: set[Value], names: set[str]) -> None:
    for value in node.inputs:
        if value not in defined:
            raise ProgramError(f"{node.name} ({node.origin}) reads {value}, which is not assigned yet")
    _define([value for value in node.outputs if value is not None], f"{node.name} ({node.origin})", defined, names)


def _define(values: list[Value], by: str, defined: set[Value], names: set[str]) -> None:
    for value in values:
        if value in defined or value.name in names:
            raise ProgramError(f"{by} assigns {value}, which is assigned already")
        defined.add(value)
        names.add(value.name)


def _require(values: tuple[Value, ...], role: str, defined: set[Value]) -> None:
    for value in values:
        if value not in defined:
            raise ProgramError(f"{role} {value} is never assigned")


def _check_gradient_type(value: Value, gradient: Value) -> None:
    if (value.tensor_type.shape, value.tensor_type.dtype, value.tensor_type.device) != (
        gradient.tensor_type.shape,
        gradient.tensor_type.dtype,
        gradient.tensor_type.device,
    ):
        raise ProgramError(f"gradient of {value}: {gradient.type} where {value.type} is required")
