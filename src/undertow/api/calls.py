"""Checking what users pass in, before anything is done with it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from undertow.errors import CallError
from undertow.record.lazy_modules import refuse_lazy
from undertow.torch_internals import is_compiled


def check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Raise CallError unless `model` is a plain module, `args` a tuple and `kwargs` a dict or None.

    CaptureError is for a lazy module that was never called.
    """
    if is_compiled(model):
        raise CallError("model is wrapped in torch.compile; give the module inside it, model._orig_mod")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        raise CallError(
            f"model is wrapped in {type(model).__name__}; give the module inside it, model.module "
            f"(a planned module may then be wrapped)"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CallError("model is a TorchScript module; give the Python module it was made from")
    if not isinstance(model, torch.nn.Module):
        raise CallError(f"model must be an nn.Module, got {type(model).__name__}; for a function use ut.grad")
    check_arguments(args, kwargs)
    refuse_lazy(dict(model.named_modules()))


def check_argnums(argnums: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions that `argnums` names, counted from 0; raises CallError for anything else."""
    positions = (argnums,) if isinstance(argnums, int) else argnums
    if not isinstance(positions, tuple | list) or not all(type(position) is int for position in positions):
        raise CallError(f"argnums must be an int or a tuple of ints, got {argnums!r}")
    for position in positions:
        if not -len(args) <= position < len(args):
            raise CallError(f"argnums has {position}, but {len(args)} positional arguments were given")
    return tuple(position % len(args) for position in positions)


def check_arguments(args: Any, kwargs: Any) -> None:
    """Raise CallError unless `args` is a tuple and `kwargs` a dict or None."""
    if not isinstance(args, tuple):
        raise CallError(f"args must be a tuple of positional arguments, got {type(args).__name__}: write (x,)")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise CallError(f"kwargs must be a dict of keyword arguments, got {type(kwargs).__name__}")


def check_optimizer(model: torch.nn.Module, optimizer: Any) -> None:
    """Raise CallError unless `optimizer` is None, or one that holds parameters of the model and can step them."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CallError(f"optimizer must be a torch.optim optimizer, got {type(optimizer).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise CallError("optimizer holds no parameter of the model: make it from model.parameters()")
    for group in optimizer.param_groups:
        if group.get("capturable") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise CallError(
                f"optimizer {type(optimizer).__name__} has capturable=True, which is for CUDA graphs, and parameters "
                f"on the CPU, where PyTorch refuses to step; leave capturable out"
            )


def check_training(model: torch.nn.Module, optimizer: Any, loss: Any, targets: Any) -> None:
    """Raise CallError unless a step can be made of them: `loss` a function or None, `targets` a tuple."""
    check_optimizer(model, optimizer)
    if loss is not None and not callable(loss):
        raise CallError(f"loss must be a function of the model's output and the targets, got {type(loss).__name__}")
    if not isinstance(targets, tuple):
        raise CallError(f"targets must be a tuple, got {type(targets).__name__}: write (y,)")
    if optimizer is None:
        return
    name = type(optimizer).__name__
    # The function of the type: a learning rate scheduler assigns one without `self` to the optimizer.
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    required = [item for item in parameters if item.default is item.empty]
    if any(item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY) for item in required):
        raise CallError(
            f"optimizer {name} asks for a closure that runs the model again, and a planned step runs it once; "
            f"use another optimizer, or ut.plan(model, ...) in a loop of your own"
        )


def check_time_limit(time_limit_s: Any) -> None:
    """Raise CallError unless `time_limit_s` is a number of seconds."""
    if not _is_number(time_limit_s) or not time_limit_s >= 0:
        raise CallError(f"time_limit_s must be a number of seconds of at least 0, got {time_limit_s!r}")


def check_clip_norm(clip_norm: Any) -> None:
    """Raise CallError unless `clip_norm` is None or a norm to clip to."""
    if clip_norm is not None and (not _is_number(clip_norm) or not clip_norm > 0):
        raise CallError(f"clip_norm must be a number of more than 0, got {clip_norm!r}")


def _is_number(item: Any) -> bool:
    return isinstance(item, int | float) and not isinstance(item, bool)
