"""What a function can reach besides its arguments: its code, closure and globals, and all that these hold.

In: a function. Out: a key, equal as long as nothing of it was replaced or changed, and the objects themselves, since
the id of an object that is gone may be another's. A recording of the function is valid as long as the key is.

Tensors count by what a recording depends on: which one it is, and its type, not its numbers. Functions, classes and
modules of Python, PyTorch and NumPy count as one thing each. What Python cannot look into, such as an iterator or a
large array, has no key: then a function is recorded at every call. Not seen is what a function asks the outside for:
the clock, files, the environment.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from undertow.ir.structure import ATOMS, structure_key

MAX_OBJECTS = 50_000  # looking at so many takes some 50 ms, as recording does
MAX_ARRAY_BYTES = 1 << 16
FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy"}
OPEN_TYPES = (types.SimpleNamespace, functools.partial, types.MethodType)  # of the standard library, and looked into
CONTAINERS = (list, tuple, dict, set, frozenset)


class _Closed(Exception):
    """Something cannot be looked into."""


def reach(function: Callable[..., Any]) -> tuple[Any, list[Any]] | None:
    """The key of all that the function can reach, and what it is made of; None where that cannot be known."""
    walk = _Walk()
    try:
        walk.visit(function)
    except _Closed:
        return None
    return tuple(walk.key), walk.held


class _Walk:
    def __init__(self) -> None:
        self.key: list[Any] = []
        self.held: list[Any] = []
        self._seen: dict[int, int] = {}
        self._slots: dict[type, list[str]] = {}

    def visit(self, first: Any) -> None:
        """Add an object and all that it leads to, without recursion: chains of objects may be long."""
        stack = [first]
        while stack:
            item = stack.pop()
            if isinstance(item, ATOMS):
                self.key.append(structure_key(item))
                continue
            known = self._seen.setdefault(id(item), len(self._seen))
            if known < len(self._seen) - 1 or len(self.held) > known:
                self.key.append(("again", known))
                continue
            self.held.append(item)
            if len(self.held) > MAX_OBJECTS:
                raise _Closed
            self.key.append((type(item), id(item)))
            stack.extend(self._parts(item))

    def _parts(self, item: Any) -> list[Any]:
        if isinstance(item, torch.Tensor):
            self.key.append(structure_key(item))
            return []
        if isinstance(item, numpy.ndarray):
            if item.nbytes > MAX_ARRAY_BYTES or item.dtype.hasobject:
                raise _Closed
            self.key.append(structure_key(item))
            return []
        if isinstance(item, types.FunctionType):
            return [] if _is_foreign(item.__module__) else list(_read_by(item))
        if isinstance(item, types.MethodType):
            return [item.__func__, item.__self__]
        if isinstance(item, functools.partial):
            return [item.func, item.args, item.keywords]
        if isinstance(item, type):
            return [] if _is_foreign(item.__module__) else [*vars(item).values(), *item.__bases__]
        if isinstance(item, property):
            return [item.fget, item.fset]
        if isinstance(item, classmethod | staticmethod):
            return [item.__func__]
        parts = self._contents(item)
        if parts is None:
            parts = [] if _is_one_thing(item) else None
        if parts is None:
            raise _Closed
        return parts

    def _contents(self, item: Any) -> list[Any] | None:
        """What a container or an object holds; None if it is neither."""
        parts: list[Any] = []
        is_container = isinstance(item, CONTAINERS)
        if is_container:
            self.key.append(len(item))
            parts += [*item, *item.values()] if isinstance(item, dict) else item
        if _is_foreign(type(item).__module__) and not isinstance(item, (*OPEN_TYPES, torch.nn.Module)):
            return parts if is_container else None
        fields = getattr(item, "__dict__", None)
        kind = type(item)
        if kind not in self._slots:
            self._slots[kind] = [name for base in kind.__mro__ for name in _slots_of(base)]
        slots = [name for name in self._slots[kind] if hasattr(item, name)]
        if fields is None and not slots:
            return parts if is_container else None
        values = dict(fields or {}) | {name: getattr(item, name) for name in slots}
        self.key.append(tuple(values))
        return [*parts, type(item), *values.values()]


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def _read_by(function: types.FunctionType) -> Iterator[Any]:
    """What the function's code can reach: what it closes over, and globals, by all names that occur in it."""
    yield function.__code__.co_code
    yield function.__defaults__
    yield function.__kwdefaults__
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    names = set(_names_in(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        item = function.__globals__[name]
        yield item
        if isinstance(item, types.ModuleType) and not _is_foreign(item.__name__):
            yield from (vars(item)[other] for other in sorted(names & vars(item).keys()))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _names_in(part)


def _is_foreign(module: str | None) -> bool:
    return (module or "").partition(".")[0] in FOREIGN


def _is_one_thing(item: Any) -> bool:
    """Whether the object counts by itself: it is code of Python or PyTorch, or a type of theirs without settings."""
    if isinstance(item, types.ModuleType | types.BuiltinFunctionType | weakref.ref | torch.Generator):
        return True
    if isinstance(item, Iterator):
        return False
    return _is_foreign(type(item).__module__)
