"""Checking what users pass in, before anything is done with it."""

from __future__ import annotations

from typing import Any

import torch

from undertow.errors import CallError


def check_call(model: Any, args: Any, kwargs: Any) -> None:
    """Raise CallError unless `model` is a plain module, `args` a tuple and `kwargs` a dict or None."""
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
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


def check_argnums(argnums: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """The positions that `argnums` names, counted from 0; raises CallError for any other thing."""
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
    """Raise CallError unless `optimizer` is None, or an optimizer that holds parameters of the model."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise CallError(f"optimizer must be a torch.optim optimizer, got {type(optimizer).__name__}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise CallError("optimizer holds no parameter of the model: make it from model.parameters()")
