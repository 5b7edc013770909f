"""What of a model, besides its arguments, decides which operations run.

In: the model, at every call. Out: a key, equal for calls that may share a capture: submodules, Python attributes,
hooks, the types of tensors, grad mode, autocast and PyTorch's own settings. Most calls find everything as the last one
did, so attributes are compared by identity first and their keys are built anew only for modules where one was replaced;
containers and settings objects, which can change in place, are looked into every time.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from undertow.ir.structure import ATOMS, Same, structure_key
from undertow.ops.modes import autocast_state

_INTERNAL = frozenset(torch.nn.Module().__dict__) - {"training"}
_MAX_CONTAINER = 64  # longer ones are taken as they were
_ATOMS = frozenset(ATOMS)


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


class _Watched:
    """The attributes of one module as they were last seen."""

    __slots__ = ("atoms", "attributes", "others", "values")

    def __init__(self, module: torch.nn.Module) -> None:
        self.attributes = module.__dict__
        self.values = tuple(self.attributes.values())
        shown = [(name, item) for name, item in self.attributes.items() if name not in _INTERNAL]
        self.atoms = tuple((name, item if _is_fixed(item) else None) for name, item in shown)
        self.others = [name for name, item in shown if not _is_fixed(item)]

    def is_same(self) -> bool:
        """Whether every attribute is still the same object."""
        return len(self.attributes) == len(self.values) and all(map(is_, self.attributes.values(), self.values))


class ModelState:
    """Watches one model. `assigned` are attributes that forward itself assigns, by the id of their owner's dict."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.assigned: set[tuple[int, str]] = set()
        self._tensors = _Frozen(())
        self._find_modules()

    def _find_modules(self) -> None:
        self.modules = dict(self._model.named_modules())
        self._children = _Frozen(self._list_children())
        self._watch([_Watched(module) for module in self.modules.values()])

    def _watch(self, watched: list[_Watched]) -> None:
        self._watched = watched
        self._atoms = _Frozen(tuple(item.atoms for item in watched))
        # Parameters that are replaced are found anew in these at every call; the dicts themselves hardly ever change.
        self.modules = dict(self.modules)
        modules = self.modules.values()
        self._tensor_groups = [group for module in modules for group in (module._parameters, module._buffers)]
        self._hook_groups = [
            group for module in modules for group in (module._forward_pre_hooks, module._forward_hooks)
        ]

    def _list_children(self) -> Any:
        return tuple(tuple(module._modules.values()) for module in self.modules.values())

    def key(self) -> Any:
        """Equal for calls that may share a capture, hashable."""
        if self._list_children() != self._children.value:  # a submodule was replaced
            self._find_modules()
        changed = [not item.is_same() for item in self._watched]
        if any(changed):
            pairs = zip(self._watched, self.modules.values(), changed, strict=True)
            self._watch([_Watched(module) if is_changed else item for item, module, is_changed in pairs])
        seen: set[int] = set()
        others = tuple(
            _attribute_key(item.attributes[name], (id(item.attributes), name) in self.assigned, seen)
            for item in self._watched
            for name in item.others
        )
        tensors = tuple(
            None if tensor is None else (tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device)
            for group in self._tensor_groups
            for tensor in group.values()
        )
        if tensors != self._tensors.value:
            self._tensors = _Frozen(tensors)
        hooks = tuple((place, *group.values()) for place, group in enumerate(self._hook_groups) if group)
        return (self._children, self._atoms, others, self._tensors, hooks, *_settings())


def _settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_state(),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def _attribute_key(item: Any, is_assigned: bool, seen: set[int]) -> Any:
    """Tensors by type, containers and settings by what they hold, others by identity. `seen` are objects done with."""
    if isinstance(item, torch.Tensor):
        return item.requires_grad, item.dtype, item.shape, item.device
    if is_assigned:
        return structure_key(item)
    if type(item) in (tuple, list, set) and len(item) <= _MAX_CONTAINER:
        return tuple(part if type(part) in _ATOMS else Same(part) for part in item)
    if type(item) is dict and len(item) <= _MAX_CONTAINER:
        return tuple((name, part if type(part) in _ATOMS else Same(part)) for name, part in item.items())
    if id(item) in seen or callable(item) or not hasattr(item, "__dict__"):
        return Same(item)
    seen.add(id(item))
    settings = tuple((name, part) for name, part in vars(item).items() if type(part) in _ATOMS)
    return Same(item), settings
