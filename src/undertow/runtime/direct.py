"""Running a Program once, forward and backward, outside of autograd."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from undertow.ir import Program, Value
from undertow.ops.modes import below_autograd
from undertow.runtime.code import StepCode


class DirectRun:
    """A forward pass that has run; its values stay, so `backward` may be called with many cotangents."""

    def __init__(self, program: Program, code: StepCode, inputs: Sequence[Any], is_recorded: bool = False) -> None:
        """`code` is the Program's. `is_recorded`: an outer recording is to see, and differentiate, what runs here."""
        self._program = program
        self._inputs = inputs
        self._code = code
        self._slots: list[Any] = [None] * len(self._code.slots)
        self._mode = nullcontext if is_recorded else below_autograd
        with self._mode(), torch.enable_grad():
            results = self._code.forward(inputs, self._slots)
        num_outputs = len(program.outputs)
        self.outputs: list[Any] = list(results[:num_outputs])
        position = {item.value: index for index, item in enumerate(program.inputs)}
        with torch.no_grad():
            for update, new in zip(program.updates, results[num_outputs:], strict=True):
                inputs[position[update.input]].copy_(new)

    def backward(self, cts: Sequence[Any]) -> dict[Value, Any]:
        """The gradients by input, for one cotangent per differentiable output."""
        slots = list(self._slots)
        slots[: len(cts)] = cts
        gradients: dict[Value, Any] = {}
        with self._mode(), torch.set_grad_enabled(self._mode is nullcontext):
            for segment in self._code.segments:
                found = segment.run(self._inputs, slots)
                gradients.update(zip((gradient.input for gradient in segment.gradients), found, strict=True))
        return gradients
