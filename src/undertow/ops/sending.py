"""An optimizer that updates nothing: it hands each gradient to somebody else, who sends it on.

A step treats it like any optimizer that updates inside the backward pass. So a gradient leaves as soon as it is
complete, while the rest of the backward pass runs, and its memory is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Receiver:
    """Takes the gradients of known parameters. A copy of it is itself, so that copies of an optimizer share it."""

    def __init__(self, take: Callable[[str, torch.Tensor], None], names: dict[int, str]) -> None:
        self.take, self.names = take, names

    def __deepcopy__(self, memo: Any) -> Receiver:
        return self


class SendGradients(torch.optim.Optimizer):
    """`take(name, gradient)` is called for each parameter; the gradient must not be kept, only copied."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], take: Callable[[str, torch.Tensor], None]
    ) -> None:
        named = list(named_parameters)
        # A setting of the group, since a shallow copy of an optimizer has nothing else.
        receiver = Receiver(take, {id(parameter): name for name, parameter in named})
        super().__init__([parameter for _, parameter in named], {"lr": 0.0, "receiver": receiver})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Hand over the gradients. Those of made-up parameters, on which the cost is measured, are only copied."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                name = group["receiver"].names.get(id(parameter))
                if name is None:
                    parameter.grad.clone()
                else:
                    group["receiver"].take(name, parameter.grad)
