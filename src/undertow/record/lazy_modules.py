"""Lazy modules of PyTorch: their parameters have no shape before the model has been called once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from undertow.errors import CaptureError


def refuse_lazy(modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise CaptureError if a module's parameters or buffers are not initialized yet; `modules` are by path.

    The first call of the model draws them in between the draws of other modules. Nothing else can do so in that order.
    """
    for path, module in modules.items():
        tensors: list[Any] = [*module._parameters.values(), *module._buffers.values()]
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in tensors):
            raise CaptureError(
                f"module {path or 'given'} has uninitialized (lazy) parameters; run the model once first"
            )
