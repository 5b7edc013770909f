"""Nested inputs and outputs: finding the tensors in any Python object, and putting others in their place.

Tuples, lists and dicts are walked directly. Every other object (a dataclass, a `transformers` ModelOutput, a cache)
is copied by `copy.deepcopy` with its tensors exchanged through the memo, so no type has to be registered anywhere.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

ATOMS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """The place of a tensor in a skeleton."""

    index: int

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.tensors[self.index] if isinstance(memo, _SlotMemo) else self


def tensors_in(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `tree` with its path, such as `[0]['mask']` or `.loss`."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, ATOMS):
        return
    elif isinstance(tree, tuple | list):
        for index, item in enumerate(tree):
            yield from tensors_in(item, f"{path}[{index}]")
    elif isinstance(tree, dict):
        for name, item in tree.items():
            yield from tensors_in(item, f"{path}[{name!r}]")
    else:
        for name, item in getattr(tree, "__dict__", {}).items():
            yield from tensors_in(item, f"{path}.{name}")


def structure_key(tree: Any) -> Any:
    """A hashable summary of `tree`: tensors by what a capture depends on, Python values by themselves."""
    if isinstance(tree, torch.Tensor):
        # Subclasses and non-strided layouts are told apart by type and layout.
        strides = tree.stride() if tree.layout is torch.strided else tree.layout
        return type(tree), tree.dtype, tree.shape, strides, tree.device, tree.requires_grad, tree.is_leaf
    if isinstance(tree, tuple | list):
        return type(tree), tuple(structure_key(item) for item in tree)
    if isinstance(tree, dict):
        return type(tree), tuple((name, structure_key(item)) for name, item in tree.items())
    if isinstance(tree, float):
        return float, tree.hex()  # -0.0 and NaN are told apart
    if isinstance(tree, ATOMS):
        return type(tree), tree
    if hasattr(tree, "__dict__") and not isinstance(tree, type) and not callable(tree):
        return type(tree), tuple((name, structure_key(item)) for name, item in vars(tree).items())
    return type(tree), id(tree)


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
