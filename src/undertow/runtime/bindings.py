"""PyTorch's Python functions for operations of a Program: `torch.mm` for `aten::mm`, called with the same arguments.

In: an operation and the arguments of a node. Out: what to call. A Python function reaches the same kernel through the
same dispatcher. It takes two thirds of the time of the operation's own call, which looks through its schema (1.2
instead of 1.8 microseconds for a small `mm`). The arguments decide which operation a function calls, so each function
is tried once: it must pass exactly these arguments to exactly this operation. Nothing is computed in the trial. Most
backward operations have no such function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from undertow.ir import Value
from undertow.ir.schema import bind_arguments
from undertow.ir.structure import ATOMS
from undertow.ops.modes import below_autograd
from undertow.torch_internals import (
    OpOverload,
    SchemaTensorType,
    TensorBase,
    TorchDispatchMode,
    VariableFunctions,
    c_nn,
)

_HOLDERS = (VariableFunctions, c_nn, TensorBase)


_KNOWN: dict[Any, Callable[..., Any]] = {}


def callable_for(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What to call for `target` with these arguments: a Python function that does the same, or the operation itself."""
    kind = target, _kind_of(args), _kind_of(kwargs)
    if kind not in _KNOWN:
        _KNOWN[kind] = _find_callable(target, args, kwargs)
    return _KNOWN[kind]


def _find_callable(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    arguments = target._schema.arguments
    if target.namespace == "aten" and arguments and isinstance(arguments[0].type, SchemaTensorType):
        stand_ins: dict[Value, torch.Tensor] = {}
        args, kwargs = _stand_in(args, stand_ins), _stand_in(kwargs, stand_ins)
        for holder in _HOLDERS:
            function: Any = getattr(holder, target._schema.name.removeprefix("aten::"), None)
            if function is not None and _comes_to(function, target, args, kwargs):
                return function
    return target._op  # the operation itself would only pass its arguments on to this, in one more Python frame


def _kind_of(item: Any) -> Any:
    """What decides which operation a Python function calls; a tensor without dimensions may stand for a number."""
    if isinstance(item, Value):
        return item.tensor_type.dtype, not item.tensor_type.shape
    if isinstance(item, tuple | list):
        return tuple(map(_kind_of, item))
    if isinstance(item, dict):
        return tuple((name, _kind_of(part)) for name, part in item.items())
    return type(item)


class _Reached(Exception):
    """Raised with the operation that a function called."""

    def __init__(self, target: OpOverload, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.target = target
        self.arguments = bind_arguments(target, args, kwargs)


class _Intercept(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Reached(func, args, kwargs or {})


def _comes_to(function: Callable[..., Any], target: OpOverload, args: Any, kwargs: Any) -> bool:
    try:
        with below_autograd(), _Intercept():
            function(*args, **kwargs)
    except _Reached as reached:
        return reached.target is target and _is_same(reached.arguments, bind_arguments(target, args, kwargs))
    except TypeError:  # the function does not take these arguments
        return False
    return False


def _stand_in(item: Any, known: dict[Value, torch.Tensor]) -> Any:
    """Arguments with an empty tensor for each value, the same one wherever the value occurs."""
    if isinstance(item, Value):
        if item not in known:
            known[item] = torch.empty(item.tensor_type.shape, dtype=item.tensor_type.dtype, device="meta")
        return known[item]
    if isinstance(item, tuple | list):
        return type(item)(_stand_in(part, known) for part in item)
    if isinstance(item, dict):
        return {name: _stand_in(part, known) for name, part in item.items()}
    return item


def _is_same(found: Any, given: Any) -> bool:
    if isinstance(given, dict):
        return all(_is_same(found[name], given[name]) for name in given)
    if isinstance(given, tuple | list):
        is_list = isinstance(found, tuple | list) and len(found) == len(given)
        return is_list and all(map(_is_same, found, given))
    return found is given or (isinstance(given, ATOMS) and isinstance(found, ATOMS) and found == given)
