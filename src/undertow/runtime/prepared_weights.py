"""Prepared weights, held from call to call and made again when one of the tensors that they come from has changed.

In: the Program of a preparation, and at each call the tensors it reads. Out: what it makes. A change is noticed by
identity, address and PyTorch's version counter, which optimizers, `load_state_dict` and every in-place operation raise.
Writing through `.data` or NumPy raises no counter, so a few elements of each tensor are compared as well. Such a write
is not noticed if it changes none of these elements.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from undertow.ir import Input, Program, Value
from undertow.kernels.fingerprint import fingerprint, sample_addresses
from undertow.ops.modes import below_autograd
from undertow.runtime.code import compile_program


class Preparation:
    """The outputs of a Program over parameters and buffers on the CPU."""

    def __init__(self, program: Program) -> None:
        self.inputs: tuple[Input, ...] = program.inputs
        self._names: tuple[Value, ...] = program.outputs
        self._code = compile_program(program, {})
        self._state: _State | None = None
        self._values: dict[Value, Any] = {}

    def values(self, tensors: Sequence[torch.Tensor]) -> dict[Value, Any]:
        """The prepared weights, made now unless they were made from the same tensors in the same state."""
        if self._state is not None and self._state.is_of(tensors):
            return self._values
        self.release()  # old and new weights together might not fit
        with below_autograd(), torch.no_grad():
            values = dict(zip(self._names, self._code.forward(tensors, []), strict=True))
        # Inference tensors have no version counter.
        if not any(tensor.is_inference() for tensor in tensors):
            self._state, self._values = _State(tensors), values
        return values

    def release(self) -> None:
        """Free the prepared weights; the next call makes them again."""
        self._state, self._values = None, {}


class _State:
    """What tensors were like at one moment."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._marks = _marks(tensors)
        self._places = sample_addresses(tensors)
        self._fingerprint = fingerprint(self._places)

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        is_same = all(reference() is tensor for reference, tensor in zip(self._references, tensors, strict=True))
        return is_same and _marks(tensors) == self._marks and fingerprint(self._places) == self._fingerprint


def _marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
