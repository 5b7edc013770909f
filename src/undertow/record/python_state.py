"""Python state that recorded code can change: where it is, what it was, and what it is now.

In: the modules of a model and the function that is recorded. Out: the changes that the code made. Each names the place
of the state, which can be read and written, so that a change can be undone and made again.

Found from the modules: their attributes, parameters, buffers, submodules and hooks; containers, arrays and the user's
objects in their attributes, three levels deep; attributes of their classes; globals and closures of their methods and
hooks. Not found: what C code holds (`functools.lru_cache`, an iterator's place), globals of other files whose functions
are called, containers and arrays of 1000 items or more.
"""

from __future__ import annotations

import argparse
import collections
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from undertow.ir.structure import ATOMS, Same, structure_key
from undertow.record.origins import is_users
from undertow.record.traced_tensor import TracedTensor

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
_LISTS = (list, set, collections.deque)
_DICTS = (collections.OrderedDict, dict)
# Python's own classes whose instances hold what the user puts there, and nothing of their own.
_CARRIERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.UserDict,
    collections.UserList,
    collections.ChainMap,
)
_MAX_ITEMS = 1000
_MAX_DEPTH = 3
_GROUPS = ("_parameters", "_buffers")
_MODULE_NAMES = frozenset(torch.nn.Module().__dict__)
_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
_WITHOUT_STATE = (*ATOMS, torch.Tensor, type, types.ModuleType, types.BuiltinFunctionType, weakref.ref)


class Place:
    """Something that holds one Python object; MISSING stands for none."""

    def __init__(self, owner: Any, name: Any = None) -> None:
        self.owner, self.name = owner, name

    def is_at(self, other: Place) -> bool:
        """Whether both are one place."""
        return type(self) is type(other) and self.owner is other.owner and self.name == other.name

    def read(self) -> Any:
        """What is there."""
        raise NotImplementedError

    def write(self, item: Any) -> None:
        """Put `item` there."""
        raise NotImplementedError

    def key(self) -> Any:
        """Hashable; equal as long as the place holds the same."""
        return key_of(self.read())


def _plain(container: Any) -> Any:
    """The class of Python whose methods read and write a container as it is, whatever the user's subclass does."""
    return next(kind for kind in (*_LISTS, *_DICTS) if isinstance(container, kind))


def _copy_of(container: Any) -> Any:
    """What a list, a set, a deque, a dict or an array holds."""
    if isinstance(container, numpy.ndarray):
        return container.copy()
    plain = _plain(container)
    return plain(plain.items(container) if isinstance(container, dict) else plain.__iter__(container))


class Entry(Place):
    """A name in a dict: an attribute, a hook, a buffer, a global."""

    def read(self) -> Any:
        return dict.get(self.owner, self.name, MISSING)

    def write(self, item: Any) -> None:
        plain = _plain(self.owner)
        if item is not MISSING:
            plain.__setitem__(self.owner, self.name, item)
        elif self.name in self.owner:
            plain.__delitem__(self.owner, self.name)


class Attribute(Place):
    """An attribute of a class, of a tensor, or of an object with slots."""

    def read(self) -> Any:
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, MISSING)
        return getattr(self.owner, self.name, MISSING)

    def write(self, item: Any) -> None:
        if item is not MISSING:
            setattr(self.owner, self.name, item)
        elif self.read() is not MISSING:
            delattr(self.owner, self.name)


class Contents(Place):
    """All that a list, a set, a deque or an array holds, or a dict in its order."""

    def read(self) -> Any:
        return _copy_of(self.owner)

    def write(self, item: Any) -> None:
        if isinstance(self.owner, numpy.ndarray):
            self.owner[...] = item
            return
        plain = _plain(self.owner)
        plain.clear(self.owner)
        (plain.extend if isinstance(self.owner, list | collections.deque) else plain.update)(self.owner, item)


class Cell(Place):
    """A variable of a closure."""

    def read(self) -> Any:
        try:
            return self.owner.cell_contents
        except ValueError:  # it has no value yet
            return MISSING

    def write(self, item: Any) -> None:
        if item is not MISSING:
            self.owner.cell_contents = item
        elif self.read() is not MISSING:
            del self.owner.cell_contents


class Reach(enum.Enum):
    """How far state is from the modules."""

    OWN = "attributes, parameters, buffers, submodules and hooks of a module"
    SHOWN = "a list or dict in an attribute without an underscore"
    NEAR = "any other container or object in an attribute"
    FAR = "what lies in those, attributes of classes, globals, closures"


@dataclass(frozen=True, eq=False)
class Change:
    """What recorded code did to one place."""

    path: str
    place: Place
    before: Any
    after: Any
    reach: Reach


class Holder:
    """An object that holds state: names in a dict, a class or slots; a list, set, deque or array; a cell."""

    def __init__(self, path: str, owner: Any, reach: Reach, *, is_ordered: bool = False) -> None:
        self.path, self.owner, self.reach = path, owner, reach
        self._is_ordered = is_ordered
        self._before = self._read()

    def _read(self) -> Any:
        if isinstance(self.owner, types.CellType):
            return Cell(self.owner).read()
        if slots := _slots_of(type(self.owner)):
            return {name: getattr(self.owner, name, MISSING) for name in slots}
        if not self._is_namespace():
            return _copy_of(self.owner)
        names = vars(self.owner) if isinstance(self.owner, type) else self.owner
        return {name: item for name, item in names.items() if not name.startswith("__")}

    def _is_namespace(self) -> bool:
        """Whether it is a class or the globals of a file, where names with two underscores are Python's own."""
        return isinstance(self.owner, type) or (isinstance(self.owner, dict) and "__builtins__" in self.owner)

    def changes(self, is_same: Callable[[Any, Any], bool]) -> Iterator[Change]:
        """What is no longer as it was."""
        before, now = self._before, self._read()
        if isinstance(self.owner, types.CellType):
            if not is_same(now, before):
                yield Change(self.path, Cell(self.owner), before, now, self.reach)
        elif isinstance(self.owner, set):
            if now != before:
                yield Change(self.path, Contents(self.owner), before, now, self.reach)
        elif isinstance(self.owner, numpy.ndarray):
            if now.tobytes() != before.tobytes():
                yield Change(self.path, Contents(self.owner), before, now, self.reach)
        elif isinstance(self.owner, _LISTS):
            if len(now) != len(before) or not all(map(is_same, now, before)):
                yield Change(self.path, Contents(self.owner), before, now, self.reach)
        elif self._is_ordered and list(now)[: len(before)] != list(before):
            yield Change(self.path, Contents(self.owner), before, now, self.reach)
        else:
            kind = Entry if isinstance(self.owner, dict) else Attribute
            for name in dict.fromkeys((*before, *now)):
                left, right = before.get(name, MISSING), now.get(name, MISSING)
                if not is_same(right, left):
                    path = f"{self.path}.{name}".lstrip(".")
                    yield Change(path, kind(self.owner, name), left, right, self.reach)

    def restore_order(self) -> None:
        """Give a dict whose names were deleted and came back its old order."""
        if isinstance(self.owner, _DICTS) and not self._is_namespace():
            names = list(self._before)
            if list(self.owner) != names and self.owner.keys() == self._before.keys():
                Contents(self.owner).write({name: self.owner[name] for name in names})


@contextmanager
def state_put_back(model: torch.nn.Module, function: Any) -> Iterator[None]:
    """Undo whatever is done to Python state inside."""
    modules = dict(model.named_modules())
    holders = find_holders(modules, function)
    try:
        yield
    finally:
        for holder in holders:
            for change in holder.changes(operator.is_):
                change.place.write(change.before)
            holder.restore_order()


def find_holders(modules: dict[str, torch.nn.Module], function: Any) -> list[Holder]:
    """Everything that holds state within reach of the modules and the function, as it is now."""
    walk = _Walk(modules)
    for path, module in modules.items():
        walk.add_module(path, module)
    for kind in {kind: None for module in modules.values() for kind in type(module).__mro__}:
        walk.add_class(kind)
    walk.look("", function, 0)
    return walk.holders


class _Walk:
    """Finds holders, each once."""

    def __init__(self, modules: dict[str, torch.nn.Module]) -> None:
        self.holders: list[Holder] = []
        self._seen: dict[int, Any] = {id(module): module for module in modules.values()}

    def _is_new(self, item: Any) -> bool:
        is_new = id(item) not in self._seen
        self._seen[id(item)] = item  # held, so that no other object gets its id
        return is_new

    def add_module(self, path: str, module: torch.nn.Module) -> None:
        """A module's own attributes and what is in them."""
        self._is_new(module.__dict__)
        self.holders.append(Holder(path, module.__dict__, Reach.OWN))
        for name, item in module.__dict__.items():
            place = f"{path}.{name}".lstrip(".")
            if name in _MODULE_NAMES and isinstance(item, (*_LISTS, *_DICTS)):
                if self._is_new(item):
                    is_group = name in _GROUPS
                    owner = path if is_group or name == "_modules" else place
                    self.holders.append(Holder(owner, item, Reach.OWN, is_ordered=not is_group))
                for part in _parts_of(item) if name.endswith("_hooks") else ():
                    self.look(place, part, 1)
            else:
                is_shown = type(item) in (list, dict) and not name.startswith("_")
                self.look(place, item, 1, Reach.SHOWN if is_shown else Reach.NEAR)

    def add_class(self, kind: type) -> None:
        """The attributes and methods of one of the user's classes."""
        if not _is_users_class(kind) or not self._is_new(kind):
            return
        self.holders.append(Holder(kind.__name__, kind, Reach.FAR))
        for name, item in vars(kind).items():
            if isinstance(item, staticmethod | classmethod):
                item = item.__func__
            for part in (item.fget, item.fset) if isinstance(item, property) else (item,):
                self.look(f"{kind.__name__}.{name}", part, 1)

    def look(self, path: str, item: Any, depth: int, reach: Reach = Reach.FAR) -> None:
        """Find what can be changed in `item`; `depth` counts the objects between it and a module."""
        if isinstance(item, _WITHOUT_STATE) or depth > _MAX_DEPTH or not self._is_new(item):
            return
        if isinstance(item, types.FunctionType):
            self._look_at_function(path, item, depth)
        elif isinstance(item, numpy.ndarray):
            if item.size < _MAX_ITEMS and not item.dtype.hasobject:
                self.holders.append(Holder(path, item, reach))
        elif isinstance(item, (*_LISTS, *_DICTS)):
            if len(item) < _MAX_ITEMS:
                self.holders.append(Holder(path, item, reach, is_ordered=isinstance(item, dict)))
                for part in _copy_of(item).values() if isinstance(item, dict) else _copy_of(item):
                    self.look(path, part, depth + 1)
            self._look_at_attributes(path, item, depth, reach)
        elif isinstance(item, tuple | types.MethodType | functools.partial):
            for part in _parts_of(item):
                self.look(path, part, depth + (type(item) is tuple))
        else:
            self._look_at_attributes(path, item, depth, reach)

    def _look_at_attributes(self, path: str, item: Any, depth: int, reach: Reach) -> None:
        if not (_is_users_class(type(item)) or isinstance(item, _CARRIERS)):
            return
        parts = [(name, getattr(item, name, MISSING)) for name in _slots_of(type(item))]
        if parts:
            self.holders.append(Holder(path, item, reach))
        if isinstance(getattr(item, "__dict__", None), dict):
            self.holders.append(Holder(path, vars(item), reach))
            parts += vars(item).items()
        for name, part in parts:
            self.look(f"{path}.{name}", part, depth + 1)

    def _look_at_function(self, path: str, function: types.FunctionType, depth: int) -> None:
        is_own = is_users(function.__code__.co_filename)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            content = Cell(cell).read()
            if isinstance(content, _CALLABLES):
                self.look(name, content, depth)  # a decorator, such as torch.no_grad, around the user's function
            elif is_own:
                self.look(name, content, depth + 1)
            if is_own and self._is_new(cell):
                self.holders.append(Holder(name, cell, Reach.FAR))
        names = function.__globals__
        if is_own:
            self.holders.append(Holder(path, vars(function), Reach.FAR))
        if is_own and self._is_new(names):
            self.holders.append(Holder(names.get("__name__", ""), names, Reach.FAR))
            for name, item in list(names.items()):
                if isinstance(item, type) and item.__module__ == names.get("__name__"):
                    self.add_class(item)
                elif not name.startswith("__") and not isinstance(item, _CALLABLES):
                    self.look(name, item, _MAX_DEPTH - 1)


def _is_users_class(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ != "builtins" and is_users(file)


def _slots_of(kind: type) -> list[str]:
    """The attributes of the user's objects that are in slots and not in a `__dict__`."""
    if not _is_users_class(kind):
        return []
    members = [item for base in kind.__mro__ if _is_users_class(base) for item in vars(base).items()]
    return [name for name, member in members if isinstance(member, types.MemberDescriptorType)]


def holds_traced(item: Any, known: Container[int]) -> bool:
    """Whether a traced tensor is anywhere in `item`, closures included; objects with `known` ids are not searched."""
    found, seen = [item], dict[int, Any]()
    while found:
        part = found.pop()
        if isinstance(part, TracedTensor):
            return True
        if not isinstance(part, _WITHOUT_STATE) and id(part) not in seen and id(part) not in known:
            seen[id(part)] = part
            found.extend(_parts_of(part))
    return False


def _parts_of(item: Any) -> Iterable[Any]:
    """What an object holds."""
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (*_LISTS, tuple, frozenset)):
        return item
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, *item.args, *item.keywords.values()
    if isinstance(item, types.FunctionType):
        cells = [Cell(cell).read() for cell in item.__closure__ or ()]
        return *cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values(), *vars(item).values()
    attributes = getattr(item, "__dict__", None)
    slots = [getattr(item, name, None) for name in _slots_of(type(item))]
    return [*attributes.values(), *slots] if isinstance(attributes, dict) else slots


def key_of(item: Any) -> Any:
    """Numbers and texts by value, containers by what they hold, other objects by identity."""
    if isinstance(item, list | tuple | collections.deque):
        return type(item), tuple(map(_part_key, item))
    if isinstance(item, dict):
        return type(item), tuple((name, _part_key(part)) for name, part in item.items())
    return (set, frozenset(item)) if isinstance(item, set) else _part_key(item)


def _part_key(part: Any) -> Any:
    return structure_key(part) if isinstance(part, (*ATOMS, numpy.ndarray)) else Same(part)
