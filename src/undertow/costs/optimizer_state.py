"""The bytes of an optimizer's state. In: a torch.optim optimizer and the parameters that get gradients. Out: a count.

State that exists is counted. Where there is none yet, a copy of the optimizer takes one step on parameters without
data, and what that step makes is counted. This works for any optimizer. An optimizer that reads values cannot step
without data: its copy steps on one real parameter after another.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
    reached = {id(parameter) for parameter in with_gradient}
    if isinstance(optimizer, torch.optim.SparseAdam):
        return OptimizerState(name, _count_sparse_adam(optimizer, reached))
    twin = _copy_with(optimizer, {id(item): _twin(item, "meta", reached) for item in _parameters(optimizer)})
    try:
        twin.step()
        return OptimizerState(name, _count(twin))
    except Exception:  # foreign code: it may read values
        return OptimizerState(name, _count_one_by_one(optimizer, reached))


def count_part_state(optimizer: torch.optim.Optimizer, num_elements: Mapping[int, int]) -> int:
    """The state after steps on so many elements of each parameter, by its id; of none of them there is no state.

    For optimizers that treat each element by itself, which can step without data.
    """
    bare = copy.copy(optimizer)
    bare.state = defaultdict(dict)
    twins: dict[int, Any] = {}
    for parameter in _parameters(optimizer):
        count = num_elements.get(id(parameter), 0)
        twin = torch.nn.Parameter(torch.zeros(count, dtype=parameter.dtype, device="meta"))
        twin.grad = torch.zeros_like(twin) if count else None
        twins[id(parameter)] = twin
    copied = _copy_with(bare, twins)
    copied.step()
    return _count(copied)


def _count_one_by_one(optimizer: torch.optim.Optimizer, reached: set[int]) -> int | None:
    """The same with data, one parameter at a time, so that it takes no more memory than one update."""
    total = 0
    known: dict[Any, int] = {}
    for parameter in _parameters(optimizer):
        if id(parameter) not in reached:
            continue
        kind = (parameter.shape, parameter.dtype, parameter.device)
        if kind not in known:
            twins = {id(item): _twin(item, "meta", set()) for item in _parameters(optimizer)}
            twins[id(parameter)] = _twin(parameter, parameter.device, reached)
            twin = _copy_with(optimizer, twins)
            try:
                twin.step()
            except Exception:  # foreign code: it may ask for a closure
                return None
            known[kind] = _count(twin)
        total += known[kind]
    return total


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _twin(parameter: torch.nn.Parameter, device: Any, reached: set[int]) -> torch.nn.Parameter:
    twin = torch.nn.Parameter(torch.zeros_like(parameter, device=device), parameter.requires_grad)
    twin.grad = torch.zeros_like(twin) if id(parameter) in reached else None
    return twin


def _count_sparse_adam(optimizer: torch.optim.Optimizer, reached: set[int]) -> int:
    """SparseAdam steps on no dense gradient. It keeps two tensors like each parameter."""
    return 2 * sum(item.nbytes for item in _parameters(optimizer) if id(item) in reached)


def _count(optimizer: torch.optim.Optimizer) -> int:
    tensors = {id(tensor): tensor for entry in optimizer.state.values() for _, tensor in tensors_in(entry)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _copy_with(optimizer: torch.optim.Optimizer, twins: dict[int, Any]) -> torch.optim.Optimizer:
    # deepcopy takes what is in the memo as already copied.
    copied = copy.deepcopy(optimizer, twins)
    for group in copied.param_groups:
        # These settings choose kernels that run only on real tensors; the state is the same without them.
        group.update({name: False for name in ("fused", "capturable") if name in group})
    return copied
