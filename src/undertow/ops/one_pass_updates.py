"""The updates of SGD, Adam and AdamW in one pass over memory, with the optimizer's own state and bits.

torch.optim takes about ten passes over parameter, gradient and state. The state stays where torch.optim keeps it, so
that checkpoints and later steps of the optimizer itself find it. The optimizer itself takes the first step, which makes
the state.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.kernels.compiler import HAS_NUMBA
from undertow.kernels.optimizers import adam_step, is_bit_identical, sgd_step

# Smaller parameters fit the cache, and starting a parallel loop takes longer than the passes that it saves.
FEWEST_ELEMENTS = 1 << 14

_OTHER_KERNELS = ("maximize", "capturable", "differentiable", "fused", "foreach", "amsgrad")


def is_known(group: dict[str, Any], kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a group's settings are among those that were compared bit for bit."""
    is_plain = not any(group.get(name) for name in _OTHER_KERNELS) and isinstance(group["lr"], float | int)
    return HAS_NUMBA and is_plain and kind in _STEPS and is_bit_identical()


def step_in_one_pass(
    optimizer: torch.optim.Optimizer, group_index: int, parameter: torch.nn.Parameter, gradient: torch.Tensor
) -> bool:
    """Update the parameter and its state; where only the optimizer can do it, does nothing and returns False."""
    group, state = optimizer.param_groups[group_index], optimizer.state.get(parameter)
    if not state or parameter.numel() < FEWEST_ELEMENTS or not is_known(group, type(optimizer)):
        return False
    tensors = [parameter, gradient, *(item for item in state.values() if _is_like(item, parameter))]
    is_suited = all(item.dtype is torch.float32 and item.device.type == "cpu" for item in tensors)
    if not is_suited or any(item.stride() != parameter.stride() for item in tensors) or not _is_dense(parameter):
        return False
    is_done = _STEPS[type(optimizer)](group, state, parameter, gradient)
    if is_done:
        torch.autograd.graph.increment_version(parameter)
    return is_done


def _is_like(item: Any, parameter: torch.Tensor) -> bool:
    return isinstance(item, torch.Tensor) and item.shape == parameter.shape


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _adam(group: dict[str, Any], state: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    if any(isinstance(beta, torch.Tensor) for beta in group["betas"]):
        return False
    beta1, beta2 = group["betas"]
    state["step"] += 1
    adam_step(
        parameter,
        gradient,
        state["exp_avg"],
        state["exp_avg_sq"],
        int(state["step"]),
        group["lr"],
        beta1,
        beta2,
        group["eps"],
        group["weight_decay"],
        bool(group.get("decoupled_weight_decay")),
    )
    return True


def _sgd(group: dict[str, Any], state: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    buffer = state.get("momentum_buffer")
    if group["momentum"] != 0 and buffer is None:
        return False
    settings = (group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"])
    sgd_step(parameter, gradient, buffer, False, group["lr"], *settings)
    return True


_STEPS: dict[type, Any] = {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
