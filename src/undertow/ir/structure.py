"""Nested inputs and outputs: finding the tensors in any Python object, and replacing them by others.

Tuples, lists and dicts are walked directly. Every other object (a dataclass, a `transformers` ModelOutput, a cache)
is copied by `copy.deepcopy`, and its tensors are replaced through the memo, so that no type has to be registered.
"""

from __future__ import annotations

import collections
import copy
import enum
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy
import torch

# What is compared by identity or by name: nothing inside it can be a tensor of the call.
_WITHOUT_TENSORS = (type, enum.Enum, types.ModuleType, types.FunctionType)

ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Stands for a tensor in a skeleton."""

    index: int

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.tensors[self.index] if isinstance(memo, _SlotMemo) else self


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """An object in a skeleton that is the same one whenever the skeleton is filled."""

    item: Any

    def __deepcopy__(self, memo: Any) -> Any:
        return self.item


def keep_objects(tree: Any) -> Any:
    """A skeleton of `tree`: filling it makes new containers, with the same objects in them."""
    if type(tree) in (tuple, list):
        return type(tree)(keep_objects(item) for item in tree)
    if type(tree) is dict:
        return {name: keep_objects(item) for name, item in tree.items()}
    return tree if isinstance(tree, ATOMS) else Kept(tree)


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `tree` with its path, such as `[0]['mask']` or `.loss`."""
    return leaves_in(tree, torch.Tensor, path)


def leaves_in(tree: Any, kind: type[Leaf], path: str = "", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Leaf]]:
    """Every object of `kind` in `tree` with its path; `above` are the ids of what holds it.

    The slots of a skeleton come in the order of the tensors that fill them.
    """
    if isinstance(tree, kind):
        yield path, tree
    elif isinstance(tree, ATOMS) or id(tree) in above:
        return
    elif isinstance(tree, tuple | list):
        for index, item in enumerate(tree):
            yield from leaves_in(item, kind, f"{path}[{index}]", (*above, id(tree)))
    elif isinstance(tree, dict):
        for name, item in tree.items():
            yield from leaves_in(item, kind, f"{path}[{name!r}]", (*above, id(tree)))
    elif not isinstance(tree, _WITHOUT_TENSORS):
        for name, item in getattr(tree, "__dict__", {}).items():
            yield from leaves_in(item, kind, f"{path}.{name}", (*above, id(tree)))


def list_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor in the arguments of a call, in the order of `tensors_in`."""
    found: list[torch.Tensor] = []
    for item in (*args, *kwargs.values()):
        if isinstance(item, torch.Tensor):
            found.append(item)
        else:
            found += [tensor for _, tensor in tensors_in(item)]
    return found


class Same:
    """An object as a key: equal only to itself, and kept alive, so that no later object gets its id."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.item is other.item

    def __hash__(self) -> int:
        return id(self.item)


def structure_key(tree: Any, above: tuple[int, ...] = ()) -> Any:
    """A hashable summary of `tree`: tensors by what a capture depends on, Python values by themselves."""
    if isinstance(tree, torch.Tensor):
        # Subclasses and non-strided layouts are told apart by type and layout.
        strides = tree.stride() if tree.layout is torch.strided else tree.layout
        return type(tree), tree.dtype, tree.shape, strides, tree.device, tree.requires_grad, tree.is_leaf
    if id(tree) in above:
        return "a cycle", above.index(id(tree))
    if isinstance(tree, (tuple, list)):
        within = (*above, id(tree))
        return type(tree), tuple([structure_key(item, within) for item in tree])
    if isinstance(tree, dict):
        within = (*above, id(tree))
        return type(tree), tuple([(name, structure_key(item, within)) for name, item in tree.items()])
    if isinstance(tree, float):
        return float, tree.hex()  # -0.0 and NaN are told apart
    if isinstance(tree, ATOMS):
        return type(tree), tree
    if isinstance(tree, set | frozenset | collections.deque):
        return type(tree), tuple(sorted(map(repr, tree)) if isinstance(tree, set | frozenset) else map(repr, tree))
    if isinstance(tree, numpy.ndarray):
        return numpy.ndarray, tree.shape, tree.dtype.str, tree.tobytes()
    if hasattr(tree, "__dict__") and not isinstance(tree, _WITHOUT_TENSORS) and not callable(tree):
        items = vars(tree).items()
        return type(tree), tuple((name, structure_key(item, (*above, id(tree)))) for name, item in items)
    return type(tree), tree if _is_plain_value(tree) else Same(tree)


def _is_plain_value(item: Any) -> bool:
    """Whether an object compares by its content, like a range or a fraction, and not by identity."""
    own_hash: Any = type(item).__hash__
    return own_hash is not None and own_hash is not object.__hash__


def replace_tensors(tree: Any, replace: Callable[[torch.Tensor], Any]) -> Any:
    """A copy of `tree` with every tensor t replaced by `replace(t)`."""
    if isinstance(tree, torch.Tensor):
        return replace(tree)
    if isinstance(tree, ATOMS):
        return tree
    if type(tree) in (tuple, list):
        return type(tree)(replace_tensors(item, replace) for item in tree)
    if type(tree) is dict:
        return {name: replace_tensors(item, replace) for name, item in tree.items()}
    found = [tensor for _, tensor in tensors_in(tree)]
    if not found:
        return tree
    return copy.deepcopy(tree, {id(tensor): replace(tensor) for tensor in found})


def fill_slots(skeleton: Any, tensors: list[Any]) -> Any:
    """A copy of `skeleton` with every Slot replaced by its tensor."""
    if type(skeleton) is Slot:
        return tensors[skeleton.index]
    if type(skeleton) is Kept:
        return skeleton.item
    if isinstance(skeleton, ATOMS):
        return skeleton
    if type(skeleton) in (tuple, list):
        return type(skeleton)(fill_slots(item, tensors) for item in skeleton)
    if type(skeleton) is dict:
        return {name: fill_slots(item, tensors) for name, item in skeleton.items()}
    return copy.deepcopy(skeleton, _SlotMemo(tensors))


class _SlotMemo(dict[int, Any]):
    """A deepcopy memo under which a Slot copies to its tensor."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self.tensors = tensors
