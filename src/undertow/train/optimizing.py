"""From a config to the optimizer and its learning rate at each step.

The rate is a function of the step alone, so a resumed run needs no state of a schedule.
"""

from __future__ import annotations

import math

import torch

from undertow.errors import CallError
from undertow.torch_internals import BatchNormBase
from undertow.train.config import TrainConfig

NORMS = (
    BatchNormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
)
# `step` divides the rate by ten at these shares of the run (He et al., CVPR 2016, for CIFAR-10: 32k and 48k of 64k).
STEP_DROPS = (0.5, 0.75)


def make_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trained parameters; those without weight decay are a group of their own."""
    groups = group_parameters(model, config.decay_all)
    if not any(groups.values()):
        raise CallError("the model has no parameter that requires a gradient: there is nothing to train")
    parameters = [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0}
        for decays, members in groups.items()
        if members
    ]
    rate = config.learning_rate
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.sgd_momentum or 0.0, nesterov=config.nesterov)
    classes: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return classes[config.optimizer](parameters, lr=rate)


def group_parameters(model: torch.nn.Module, decay_all: bool) -> dict[bool, list[torch.nn.Parameter]]:
    """Trained parameters by whether weight decay acts on them: not on biases and not on parameters of norms."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            # Recurrent layers have several biases, each with a suffix. The gain of any norm is a vector.
            is_weight = parameter.dim() > 1 and "bias" not in name and not isinstance(module, NORMS)
            groups[decay_all or is_weight].append(parameter)
    return groups


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """The rate of update `step`, counted from 0, of a run of `num_steps`."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    share = min((step - config.warmup) / max(num_steps - config.warmup, 1), 1.0)
    factors = {
        "constant": 1.0,
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "step": 0.1 ** sum(share >= drop for drop in STEP_DROPS),
    }
    return config.learning_rate * factors[config.schedule]


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
