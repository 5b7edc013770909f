"""Prepared weights, kept from call to call and made anew when one of the tensors behind them has changed.

In: the Program of a preparation, and at each call the tensors it reads. Out: what it makes. A change is noticed by
identity, address and PyTorch's version counter, which optimizers, `load_state_dict` and every in-place operation raise.
Not noticed: writing to a few elements through `.data` or NumPy, which raises no counter; see `_sample`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from undertow.ir import Input, Program, Value
from undertow.ops.modes import below_autograd
from undertow.runtime.code import compile_program


class Preparation:
    """The outputs of a Program over parameters and buffers."""

    def __init__(self, program: Program) -> None:
        self.inputs: tuple[Input, ...] = program.inputs
        self._names: tuple[Value, ...] = program.outputs
        self._code = compile_program(program)
        self._marks: list[Any] = []
        self._values: dict[Value, Any] = {}

    def values(self, tensors: list[torch.Tensor]) -> dict[Value, Any]:
        """The prepared weights, made now unless they were made of the same tensors in the same state."""
        if self._values and not any(map(_has_changed, self._marks, tensors)):
            return self._values
        self._values = {}  # both at once might not fit
        marks = [_mark(tensor) for tensor in tensors]
        with below_autograd(), torch.no_grad():
            made = self._code.forward(tensors, [])
        self._marks, self._values = marks, dict(zip(self._names, made, strict=True))
        return self._values


def _mark(tensor: torch.Tensor) -> Any:
    return None if tensor.is_inference() else (weakref.ref(tensor), tensor._version, tensor.data_ptr())


def _has_changed(mark: Any, tensor: torch.Tensor) -> bool:
    if mark is None or tensor.is_inference():  # inference tensors have no version counter
        return True
    reference, version, address = mark
    return reference() is not tensor or tensor._version != version or tensor.data_ptr() != address
