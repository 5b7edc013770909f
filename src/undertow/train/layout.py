"""Convolutions on a GPU with the channels innermost in memory, PyTorch's channels_last.

cuDNN's fast kernels take this layout, and turn other tensors around first. Weights are enough: a convolution gives its
output in the layout of its weight. With `exact` numerics a model stays as its factory made it, since eager's bits are
those of its own layout. Models that cannot run so, such as those that call `view` on what a convolution gave, stay as
they are too, and the run says why.
"""

from __future__ import annotations

import torch
from torch import nn

from undertow.record.capture import capture
from undertow.train.batches import Batch

CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


def try_channels_last(model: nn.Module, batch: Batch) -> str | None:
    """Lay out the model's convolutions, if it can be called with such a batch then.

    Returns None if it can, why it cannot, or nothing in words where there is no convolution over images.
    """
    if not use_channels_last(model):
        return ""
    try:
        with torch.no_grad():
            capture(model, batch.args, batch.kwargs)  # without data: it takes no memory
    except Exception as error:  # a call that is wrong in itself is refused when the model runs
        _lay_out(model, torch.contiguous_format)
        return str(error).strip().partition("\n")[0]
    return None


def use_channels_last(model: nn.Module) -> bool:
    """Lay out the weights of the model's convolutions; returns whether there are any."""
    return _lay_out(model, torch.channels_last) > 0


def _lay_out(model: nn.Module, layout: torch.memory_format) -> int:
    # A subclass, or a parametrized one, may do anything with its weight.
    found = [module for module in model.modules() if type(module) in CONVOLUTIONS]
    for module in found:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        weight.data = weight.data.contiguous(memory_format=layout)
    return len(found)


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's tensors the strides of their parameters, which fused updates need."""
    for parameter, state in optimizer.state.items():
        for name, item in state.items():
            is_alike = isinstance(item, torch.Tensor) and item.shape == parameter.shape
            if is_alike and item.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=item.dtype).copy_(item)
