"""What of a model, besides its arguments, decides which operations run.

In: the model, at every call. Out: a key, equal for calls that may share a capture: submodules, Python attributes,
hooks, the types of tensors, grad mode, autocast and PyTorch's own settings. At most calls nothing has changed since the
last one. So what modules hold, and what is in their containers and settings objects, is first compared by identity, all
at once. Keys are made again only where something was replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import chain
from operator import call, is_, itemgetter, methodcaller
from typing import Any

import torch

from undertow.ir.structure import ATOMS, Same, structure_key
from undertow.record.lazy_modules import refuse_lazy

_INTERNAL = frozenset(torch.nn.Module().__dict__) - {"training"}
_CONTAINERS = frozenset((tuple, list, set, dict))
_MAX_CONTAINER = 64  # longer ones are not looked into
_ATOMS = frozenset(ATOMS)
_GROUPS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)

_Read = tuple[Callable[[Any], Iterable[Any]], Any]
_values = methodcaller("values")


def _is_fixed(item: Any) -> bool:
    """Whether the item cannot change while it is the same object."""
    return type(item) in _ATOMS or (type(item) is tuple and all(type(part) in _ATOMS for part in item))


class _Frozen:
    """A value whose hash is computed once."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Frozen) and self.value == other.value)


class _Contents:
    """The parts of some objects, by identity, as they were last seen.

    `reads` pairs each object with the function that lists its parts; `sized` are those whose length has to stay.
    """

    __slots__ = ("_functions", "_lengths", "_objects", "_parts", "_sized")

    def __init__(self, reads: Sequence[_Read], sized: Sequence[Any]) -> None:
        self._functions = [function for function, _ in reads]
        self._objects = [item for _, item in reads]
        self._parts = list(chain.from_iterable(map(call, self._functions, self._objects)))
        self._sized = sized
        self._lengths = list(map(len, sized))

    def are_same(self) -> bool:
        """Whether each still has the same parts, by identity."""
        if list(map(len, self._sized)) != self._lengths:
            return False
        try:
            return all(map(is_, chain.from_iterable(map(call, self._functions, self._objects)), self._parts))
        except KeyError:  # an attribute was deleted
            return False


class _Watched:
    """The attributes of one module as they were last seen; of those in `assigned`, only numbers, texts and flags."""

    __slots__ = ("_length", "_parts", "atoms", "attributes", "groups", "others", "read")

    def __init__(self, module: torch.nn.Module, assigned: Container[str]) -> None:
        self.attributes = module.__dict__
        self.groups = [self.attributes[name] for name in _GROUPS]
        shown = [(name, item, _is_fixed(item)) for name, item in self.attributes.items() if name not in _INTERNAL]
        self.atoms = tuple([(name, structure_key(item) if is_fixed else None) for name, item, is_fixed in shown])
        self.others = [name for name, _, is_fixed in shown if not is_fixed]
        # By name: a module has a dozen more dicts, and each object that is touched takes a line of the CPU's cache.
        watched = [name for name, _, is_fixed in shown if is_fixed or name not in assigned]
        self.read = itemgetter(*watched, *_GROUPS)
        self._length = len(self.attributes)
        self._parts = self.read(self.attributes)

    def is_same(self) -> bool:
        """Whether every attribute is still the same object."""
        try:
            is_same = all(map(is_, self.read(self.attributes), self._parts))
        except KeyError:  # one was deleted
            return False
        return is_same and len(self.attributes) == self._length


class ModelState:
    """Watches one model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._assigned: dict[int, set[str]] = {}  # names by the id of their dict
        self._atoms = _Frozen(())
        self._tensors = _Frozen(())
        self._find_modules()

    def mark_assigned(self, attributes: Iterable[tuple[int, str]]) -> None:
        """Compare attributes that forward itself assigns by structure; each is the id of its dict and its name."""
        for owner, name in attributes:
            self._assigned.setdefault(owner, set()).add(name)
        self._find_modules()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The parameters of the modules that the last key was made for."""
        return (item for item in chain.from_iterable(self._parameter_views) if item is not None)

    def key(self) -> Any:
        """Equal for calls that may share a capture, hashable."""
        if any(_is_fixed(attributes.get(name)) for attributes, name in self._opened):
            self._find_modules()  # one became a number, a text or a flag, or was deleted
        elif not self._contents.are_same():
            self._look_again()
        tensors = tuple(
            [
                None
                if item is None
                else (
                    item.requires_grad,
                    item.dtype,
                    item.shape,
                    item.device,
                    item.stride() if item.layout is torch.strided else item.layout,
                )
                for item in chain.from_iterable(self._tensor_views)
            ]
        )
        if tensors != self._tensors.value:
            self._tensors = _Frozen(tensors)
        opened = tuple([_open_key(attributes[name]) for attributes, name in self._opened])
        return self._lasting, self._tensors, opened, settings_key()

    def _look_again(self) -> None:
        if self._list_children() != self._children.value:  # a submodule was replaced
            self._find_modules()
            return
        pairs = zip(self._watched, self.modules.values(), strict=True)
        self._watch([item if item.is_same() else self._watch_module(module) for item, module in pairs])

    def _find_modules(self) -> None:
        modules = dict(self._model.named_modules())
        refuse_lazy(modules)
        self.modules = modules
        self._children = _Frozen(self._list_children())
        self._watch([self._watch_module(module) for module in self.modules.values()])

    def _list_children(self) -> Any:
        return tuple([tuple(module._modules.values()) for module in self.modules.values()])

    def _watch_module(self, module: torch.nn.Module) -> _Watched:
        return _Watched(module, self._assigned.get(id(module.__dict__), ()))

    def _watch(self, watched: list[_Watched]) -> None:
        self._watched = watched
        # Every call looks up parameters in these, so they may be replaced; the dicts themselves hardly ever change.
        self.modules = dict(self.modules)
        parameters, buffers, _, *hook_groups = zip(*(item.groups for item in watched), strict=True)
        self._parameter_views = [group.values() for group in parameters if group]
        self._tensor_views = [*self._parameter_views, *(group.values() for group in buffers if group)]
        hooks = tuple((place, *group.values()) for place, group in enumerate(chain(*hook_groups)) if group)
        atoms = tuple([item.atoms for item in watched])
        if atoms != self._atoms.value:
            self._atoms = _Frozen(atoms)
        self._lasting = _Frozen((self._children, self._atoms, self._look_into_others(), hooks))

    def _look_into_others(self) -> tuple[Any, ...]:
        """The keys of attributes that are not atoms, None for those that are looked into at every call."""
        self._opened: list[tuple[dict[str, Any], str]] = []
        keys: list[Any] = []
        found: dict[int, Any] = {}
        for watched in self._watched:
            assigned = self._assigned.get(id(watched.attributes), ())
            for name in watched.others:
                item = watched.attributes[name]
                if isinstance(item, torch.Tensor) or name in assigned:
                    self._opened.append((watched.attributes, name))
                    keys.append(None)
                else:
                    keys.append(_attribute_key(item, is_known=id(item) in found))
                    found[id(item)] = item
        groups = list(chain.from_iterable(item.groups for item in self._watched))
        children_and_hooks = chain.from_iterable(item.groups[2:] for item in self._watched)
        reads: list[_Read] = [(item.read, item.attributes) for item in self._watched]
        reads += [(_values, group) for group in children_and_hooks if group]
        reads += [(read, item) for item in found.values() if (read := _reader_of(item)) is not None]
        sized = [*(item.attributes for item in self._watched), *groups]
        sized += [item for item in found.values() if _is_short(item)]
        sized += [vars(item) for item in found.values() if _has_settings(item)]
        self._contents = _Contents(reads, sized)
        return tuple(keys)


def settings_key() -> tuple[Any, ...]:
    """PyTorch's own settings that decide which operations run."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def _is_short(item: Any) -> bool:
    """Whether it is a container and what it holds is part of the key."""
    return type(item) in _CONTAINERS and len(item) <= _MAX_CONTAINER


def _has_settings(item: Any) -> bool:
    """Whether it is an object and its attributes are part of the key."""
    return type(item) not in _CONTAINERS and hasattr(item, "__dict__") and not callable(item)


def _reader_of(item: Any) -> Callable[[Any], Iterable[Any]] | None:
    """The function that lists the parts of an attribute on which its key depends, if any."""
    if _is_short(item):
        return _names_and_values if type(item) is dict else iter
    if type(item) in _CONTAINERS:
        return lambda item: (_is_short(item),)
    return (lambda item: _names_and_values(vars(item))) if _has_settings(item) else None


def _names_and_values(names: dict[Any, Any]) -> Iterable[Any]:
    return names, *names, *names.values()


def _open_key(item: Any) -> Any:
    """Tensors by type, other attributes that forward assigns by their structure."""
    if isinstance(item, torch.Tensor):
        strides = item.stride() if item.layout is torch.strided else item.layout
        return item.requires_grad, item.dtype, item.shape, item.device, strides
    return structure_key(item)


def _part_key(part: Any) -> Any:
    """2 and 2.0, 1 and True, 0.0 and -0.0 are told apart."""
    return structure_key(part) if type(part) in _ATOMS else Same(part)


def _attribute_key(item: Any, is_known: bool) -> Any:
    """Containers and settings by what they hold, others by identity; settings that are known are not read again."""
    if _is_short(item):
        if type(item) is dict:
            return tuple((name, _part_key(part)) for name, part in item.items())
        return type(item), tuple(map(_part_key, item))
    if is_known or not _has_settings(item):
        return Same(item)
    settings = ((name, part) for name, part in vars(item).items() if type(part) in _ATOMS)
    return Same(item), tuple((name, _part_key(part)) for name, part in settings)
