"""The planned module: an nn.Module that runs the plan and is otherwise the user's own.

It is an instance of a subclass of the model's class and shares the model's attribute dictionary: parameters, buffers,
submodules, `training`, hooks and configuration are the same objects, so `state_dict`, optimizers, `isinstance` and
attribute access behave as with the model itself. Only `forward` differs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from undertow.calls.runner import Runner
from undertow.pipeline import Request
from undertow.terms import Terms


class _Forward:
    """The forward of a planned module. It overrides a forward that the model had as an attribute of its own.

    A forward that is assigned later, such as a trainer's wrapper, overrides this one.
    """

    def __init__(self, function: Callable[..., Any], replaced: Any) -> None:
        self._function, self._replaced = function, replaced

    def __get__(self, module: Any, kind: Any = None) -> Any:
        if module is None:
            return self._function
        assigned = module.__dict__.get("forward", self._replaced)
        return MethodType(self._function, module) if assigned is self._replaced else assigned

    def __set__(self, module: Any, function: Any) -> None:
        module.__dict__["forward"] = function

    def __delete__(self, module: Any) -> None:
        del module.__dict__["forward"]


def make_planned(model: torch.nn.Module, terms: Terms, is_strict: bool = False) -> Any:
    """A module that runs `model` through a Runner."""
    kind = type(model)
    replaced = model.__dict__.get("forward")
    original = MethodType(kind.forward, model) if replaced is None else replaced
    runner = Runner(Request(model, original, terms, is_strict=is_strict))

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return runner(*args, **kwargs)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        return make_planned(copy.deepcopy(model, memo), terms, is_strict)

    def reduce(self: Any, protocol: Any) -> Any:
        return make_planned, (model, terms, is_strict)

    namespace = {
        "forward": _Forward(forward, replaced),
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "undertow_runner": runner,
        "plan": property(lambda self: runner.plan),
    }
    # The base is set afterwards: making a subclass would call the model's __init_subclass__, which may register it.
    metaclass: Any = type(kind)
    planned_kind = metaclass(kind.__name__, (torch.nn.Module,), namespace)
    planned_kind.__bases__ = (kind,)
    planned: Any = object.__new__(planned_kind)
    planned.__dict__ = model.__dict__
    return planned
