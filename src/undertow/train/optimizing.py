"""From a config to the optimizer: any of `torch.optim`, with groups of parameters by weight decay and learning rate."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from undertow.errors import CallError
from undertow.torch_internals import BatchNormBase
from undertow.train.config import DEFAULT_RATES, TrainConfig
from undertow.train.schedules import check_names

NORMS = (
    BatchNormBase,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.RMSNorm,
    torch.nn.LocalResponseNorm,
)
LEFT_OUT = (torch.optim.Optimizer, torch.optim.LBFGS)  # not for a planned step: it runs the model again


def make_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all trained parameters; those without weight decay are a group of their own."""
    groups = group_parameters(model, config.decay_all, config.lr_scale or {})
    if not groups:
        raise CallError("the model has no parameter that requires a gradient: there is nothing to train")
    kind = find_optimizer(config.optimizer)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = dict(config.optimizer_args or {})
    check_names(options, [name for name in accepted if name != "params"], f"--optimizer {config.optimizer}")
    rate = config.lr if config.lr is not None else DEFAULT_RATES.get(config.optimizer, accepted["lr"].default)
    options["lr"] = rate
    if config.optimizer == "sgd":
        options |= {"momentum": config.sgd_momentum or 0.0, "nesterov": config.nesterov}
    device = next(iter(groups.values()))[0].device
    if device.type == "cuda":
        options = on_gpu(kind, options)
    parameters = []
    for (decays, scale), members in groups.items():
        group: dict[str, Any] = {"params": members, "lr": rate * scale}
        if device.type == "cuda" and options.get("fused"):
            group["lr"] = torch.tensor(rate * scale, device=device)
        if "weight_decay" in accepted:
            group["weight_decay"] = config.weight_decay if decays else 0.0
        elif config.weight_decay:
            raise CallError(f"--weight-decay: torch.optim.{kind.__name__} has no weight decay; leave it out")
        parameters.append(group)
    try:
        return kind(parameters, **options)
    except (TypeError, ValueError) as error:
        raise CallError(f"--optimizer {config.optimizer} with --optimizer-args {options}: {error}") from None


def on_gpu(kind: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Options under which a CUDA graph may hold the update: one kernel that counts and reads its rate on the GPU."""
    accepted = inspect.signature(kind).parameters
    if kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) and not options.keys() & {"foreach", "fused"}:
        options = {"fused": True, **options}
        if "capturable" in accepted:
            options = {"capturable": True, **options}
    return options


def find_optimizer(name: str) -> type[Any]:
    """The class of `torch.optim` by its name in small letters; raises CallError that lists them."""
    classes = {
        item.lower(): kind
        for item, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind not in LEFT_OUT
    }
    if name not in classes:
        near = difflib.get_close_matches(name, classes, n=1)
        advice = f"did you mean {near[0]}? torch.optim" if near else "torch.optim"
        raise CallError(f"there is no optimizer {name!r}; {advice} has {', '.join(sorted(classes))}")
    return classes[name]


def group_parameters(
    model: torch.nn.Module, decay_all: bool, scales: dict[str, float]
) -> dict[tuple[bool, float], list[torch.nn.Parameter]]:
    """Trained parameters by whether weight decay acts on them, and by the factor of their learning rate.

    Weight decay does not act on biases and parameters of norms. A factor is that of the first pattern that matches.
    """
    groups: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    unused = set(scales)
    for name, module, parameter in named_owners(model):
        factors = {pattern: factor for pattern, factor in scales.items() if fnmatch.fnmatchcase(name, pattern)}
        unused -= factors.keys()
        if not parameter.requires_grad:
            continue
        # Recurrent layers have several biases, each with a suffix. The gain of any norm is a vector.
        is_weight = parameter.dim() > 1 and "bias" not in name.rpartition(".")[2] and not isinstance(module, NORMS)
        key = decay_all or is_weight, next(iter(factors.values()), 1.0)
        groups.setdefault(key, []).append(parameter)
    if unused:
        raise no_match("--lr-scale", min(unused), model)
    return {key: groups[key] for key in sorted(groups, key=lambda key: (not key[0], list(groups).index(key)))}


def named_owners(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Parameter]]:
    """Each parameter once, with its first name and the module that holds it."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, module, parameter


def no_match(option: str, pattern: str, model: torch.nn.Module) -> CallError:
    """The error for a pattern that matches no parameter."""
    names = [name for name, _, _ in named_owners(model)]
    shown = ", ".join([*names[:4], "..."] if len(names) > 4 else names)
    return CallError(f"{option} {pattern!r} matches no parameter of the model, whose names are {shown}")


def set_learning_rates(optimizer: torch.optim.Optimizer, rates: list[float]) -> None:
    """Set the rate of each group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # where it lies: a CUDA graph reads it there
        else:
            group["lr"] = rate
