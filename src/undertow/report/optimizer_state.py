"""The bytes of an optimizer's state. In: a torch.optim optimizer and the parameters that get gradients. Out: a count.

State that exists is counted. Where there is none yet, a copy of the optimizer takes one step on parameters without
data, and what that step creates is counted: the optimizer itself says what it keeps, whichever it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir.structure import tensors_in


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps between steps; `num_bytes` is None where that cannot be known before its first step."""

    name: str
    num_bytes: int | None


def count_optimizer_state(
    optimizer: torch.optim.Optimizer, with_gradient: Iterable[torch.nn.Parameter]
) -> OptimizerState:
    """The state `optimizer` has, or will have after a step in which the parameters `with_gradient` got gradients."""
    name = type(optimizer).__name__
    if optimizer.state:
        return OptimizerState(name, _count(optimizer))
    twin = _copy_without_data(optimizer, {id(parameter) for parameter in with_gradient})
    try:
        twin.step()
    except Exception:  # foreign code: it may read values, or ask for a closure
        return OptimizerState(name, None)
    return OptimizerState(name, _count(twin))


def _count(optimizer: torch.optim.Optimizer) -> int:
    tensors = {id(tensor): tensor for entry in optimizer.state.values() for _, tensor in tensors_in(entry)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _copy_without_data(optimizer: torch.optim.Optimizer, with_gradient: set[int]) -> torch.optim.Optimizer:
    twins: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            twin = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            twin.grad = torch.empty_like(twin) if id(parameter) in with_gradient else None
            twins[id(parameter)] = twin
    # deepcopy takes a parameter that the memo knows for copied already.
    copied = copy.deepcopy(optimizer, twins)
    for group in copied.param_groups:
        # These choose kernels that run on real tensors only; the state is the same.
        group.update({name: False for name in ("fused", "capturable") if name in group})
    return copied
