"""`numerics="bf16"`: a forward pass as autocast runs it, products and convolutions in bfloat16, weights in float32.

In: a function of the model. Out: the same function inside an autocast region of its own. A recorded Program then holds
every cast as an operation, and gradients are in float32. As always with nested regions, the innermost one counts: this
one overrides a region around the user's call, and a region inside the model overrides this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from undertow.errors import CallError
from undertow.ir.structure import tensors_in
from undertow.terms import Numerics


def with_precision(numerics: Numerics, model: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`; in bf16 numerics under autocast, on the devices of the model and of the arguments."""
    if numerics is not Numerics.BF16:
        return forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check_master_weights(model)
        tensors = [*model.parameters(), *(tensor for _, tensor in tensors_in((args, kwargs)))]
        with ExitStack() as regions:
            for kind in sorted({tensor.device.type for tensor in tensors}):
                regions.enter_context(torch.autocast(kind, torch.bfloat16))
            return forward(*args, **kwargs)

    return run


def _check_master_weights(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_floating_point() and parameter.dtype is not torch.float32:
            raise CallError(
                f'numerics="bf16" computes in bfloat16 from float32 weights, and parameter {name} is '
                f'{parameter.dtype}; leave the model in float32, or take numerics="fast"'
            )
