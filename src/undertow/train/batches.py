"""A batch as a loader gives it, read as a call of the model and the targets of its loss.

    a pair (inputs, targets)            loss(model(inputs), targets)
    inputs a tuple, or a dict           loss(model(*inputs), targets), or loss(model(**inputs), targets)
    targets a tuple                     loss(model(inputs), *targets)
    a dict with named targets           those go to the loss, the others to the model by name
    a dict, or anything with the        everything goes to the model, which returns its own loss
    model's own loss

A batch without targets has the model's own loss; nothing else says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.errors import DataError
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.train.config import OWN_LOSS


@dataclass(frozen=True)
class Batch:
    """One call of the model: its arguments, and what the loss compares its outputs with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]

    @property
    def call(self) -> tuple[Any, ...]:
        """The positional arguments of a training step."""
        return (*self.args, *self.targets)

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the batch."""
        return [tensor for _, tensor in tensors_in((self.args, self.kwargs, self.targets))]

    @property
    def num_examples(self) -> int:
        """The first size of the first tensor that has one; of the targets, if there are any."""
        found = (tensor for _, tensor in tensors_in((self.targets, self.args, self.kwargs)) if tensor.dim())
        return next((len(tensor) for tensor in found), 1)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with `change(tensor)` for every tensor."""
        return Batch(*(replace_tensors(part, change) for part in (self.args, self.kwargs, self.targets)))

    def describe(self) -> dict[str, Any]:
        """Nesting, shapes and types as plain data, from which `make_empty` makes a batch of zeros again."""
        return {"args": _describe(self.args), "kwargs": _describe(self.kwargs), "targets": _describe(self.targets)}


def read_batch(raw: Any, loss: str | None = None, target_names: Sequence[str] = ()) -> Batch:
    """The batch of a loader; raises DataError that says what form it must have."""
    if isinstance(raw, Mapping) and target_names and loss != OWN_LOSS:
        missing = [name for name in target_names if name not in raw]
        if missing:
            raise DataError(f"--targets names {missing[0]!r}, but a batch has {', '.join(map(str, raw)) or 'nothing'}")
        inputs = {str(name): item for name, item in raw.items() if name not in target_names}
        batch = Batch((), inputs, tuple(raw[name] for name in target_names))
    elif loss == OWN_LOSS or (isinstance(raw, Mapping) and loss is None):
        batch = Batch(*_as_arguments(raw), ())
    elif isinstance(raw, tuple | list) and len(raw) == 2:
        targets = tuple(raw[1]) if isinstance(raw[1], tuple | list) else (raw[1],)
        batch = Batch(*_as_arguments(raw[0]), targets)
    else:
        raise DataError(
            f"a batch must be a pair, inputs and targets; the loader gave {_name_form(raw)}. If the model takes all of "
            f"it and returns its own loss, give --loss {OWN_LOSS}; of a dict, --targets names the targets"
        )
    if not any(tensor.dim() for tensor in batch.tensors()):
        raise DataError(f"a batch must hold tensors with examples; the loader gave {_name_form(raw)}")
    if loss != OWN_LOSS and batch.targets and not any(True for _ in tensors_in(batch.targets)):
        raise DataError(f"the targets of a batch must hold tensors; the loader gave {_name_form(raw)}")
    return batch


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), {str(name): item for name, item in inputs.items()}
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def _name_form(raw: Any) -> str:
    if isinstance(raw, Mapping):
        return f"a {type(raw).__name__} of {', '.join(map(str, raw)) or 'nothing'}"
    parts = raw if isinstance(raw, tuple | list) else [raw]
    return ", ".join(type(part).__name__ for part in parts) or "nothing"


def _describe(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return {"shape": list(tree.shape), "dtype": str(tree.dtype).removeprefix("torch.")}
    if isinstance(tree, tuple | list):
        return {"items": [_describe(item) for item in tree], "is_tuple": isinstance(tree, tuple)}
    if isinstance(tree, dict):
        return {"names": list(tree), "items": [_describe(item) for item in tree.values()]}
    return {"value": tree if isinstance(tree, int | float | bool | str | type(None)) else None}


def make_empty(described: dict[str, Any], device: torch.device) -> Batch:
    """A batch of zeros from what `describe` gave; raises ValueError if that makes no sense."""
    return Batch(*(_make_empty(described[part], device) for part in ("args", "kwargs", "targets")))


def _make_empty(described: dict[str, Any], device: torch.device) -> Any:
    if "shape" in described:
        dtype = getattr(torch, described["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{described['dtype']} is no type of elements")
        return torch.zeros(described["shape"], dtype=dtype, device=device)
    if "items" not in described:
        return described["value"]
    items = [_make_empty(item, device) for item in described["items"]]
    if "names" in described:
        return dict(zip(described["names"], items, strict=True))
    return tuple(items) if described["is_tuple"] else items
