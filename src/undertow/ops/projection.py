"""The projection of a parameter on its mask: an operation of the step, which runs after the parameter's update.

In: which weights are kept. Out: the others are 0 after every step. What the update would have added to a removed weight
is added to its hidden value instead. So a removed weight that the loss asks for again grows unseen, and may come back
(dynamic network surgery: Guo, Yao & Chen 2016). Who changes `kept` between two steps changes what the next one keeps;
nothing is planned again. It does not choose the masks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from undertow.errors import CallError
from undertow.ir.live import Live
from undertow.ir.operation import Operation, register_operation
from undertow.kernels.compiler import HAS_NUMBA, cached_njit
from undertow.ops.updates import chain_of

MASKS = Live("masks")  # a Masks


class Masks:
    """Which weights of some parameters are kept, and the hidden values of the others.

    `kept` and `hidden` have a tensor for each masked parameter, by its first name in the model. Where a weight is kept,
    its hidden value has no meaning.
    """

    def __init__(self, model: torch.nn.Module, kept: Mapping[str, Tensor]) -> None:
        parameters = dict(model.named_parameters())
        for name, mask in kept.items():
            if name not in parameters:
                raise CallError(f"masks: the model has no parameter {name!r}, or knows it by an earlier name as well")
            if mask.dtype is not torch.bool or mask.shape != parameters[name].shape:
                raise CallError(
                    f"masks: the mask of {name} is {mask.dtype}, {list(mask.shape)}; it must be boolean, "
                    f"{list(parameters[name].shape)}"
                )
        self.parameters = {name: parameters[name] for name in kept}
        self.kept = {name: mask.to(parameters[name].device, copy=True) for name, mask in kept.items()}
        self.hidden = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.project()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._names

    def tensors(self) -> list[Tensor]:
        """What stays from step to step."""
        return [*self.kept.values(), *self.hidden.values()]

    def name_of(self, parameter: Tensor) -> str:
        """The name of a masked parameter."""
        return self._names[id(parameter)]

    def begin(self, kept: Mapping[str, Tensor]) -> None:
        """Take other masks, in the memory of these, and forget hidden values."""
        for name, mask in kept.items():
            self.kept[name].copy_(mask)
            self.hidden[name].zero_()
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """Set removed weights to 0, outside of a step."""
        for name, parameter in self.parameters.items():
            parameter.masked_fill_(~self.kept[name], 0)


@cached_njit(error_model="numpy")
def _project_loop(weights: Any, kept: Any, hidden: Any) -> None:
    for index in range(weights.size):
        if not kept[index]:
            hidden[index] += weights[index]
            weights[index] = 0


def project(weights: Tensor, kept: Tensor, hidden: Tensor) -> None:
    """hidden += weights, weights = 0 where a weight is removed."""
    is_plain = all(item.is_contiguous() for item in (weights, kept, hidden))
    if HAS_NUMBA and is_plain and weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.float64):
        _project_loop(*(item.view(-1).numpy() for item in (weights, kept, hidden)))
    else:
        hidden.add_(weights)
        weights.mul_(kept)


def _run(masks: Masks, name: str, known_as: str) -> None:
    project(masks.parameters[name].detach(), masks.kept[name], masks.hidden[name])


def _rehearse(masks: Masks, name: str, known_as: str) -> Callable[[], Any]:
    weights, kept = (torch.zeros_like(item.detach()) for item in (masks.parameters[name], masks.kept[name]))
    hidden = torch.zeros_like(weights)
    return lambda: project(weights, kept, hidden)


# (masks, name of the parameter, its name in the Program): follows the update in the parameter's chain. It names the
# parameter and does not read its value, which is gone: the update has written over it.
PROJECT = register_operation(
    Operation(
        "project_on_mask",
        _run,
        must_run=True,
        chains=lambda node: (chain_of(node.args[2]),),
        can_repeat=False,
        rehearse=_rehearse,
        assumed_workspace=lambda node: 0,
    )
)
