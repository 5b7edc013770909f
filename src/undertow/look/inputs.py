"""The inputs of some examples, one of which is shown.

In: a batch as a loader gives it. Out: Inputs, which can be cut into fewer examples and with which the model is called,
with the shown input replaced if that is wanted. Tensors with a part for each example are cut; all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from undertow.errors import CallError
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.train.batches import Batch


@dataclass(frozen=True, eq=False)
class Inputs:
    """`tensors` are all of the call's, in the order of its arguments; `call` is the call that they are part of."""

    call: tuple[tuple[Any, ...], dict[str, Any]]
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    shown: int
    is_cut: tuple[bool, ...]

    @staticmethod
    def of(*args: Any, **kwargs: Any) -> Inputs:
        """The inputs of this call; raises CallError if there is none that can be shown."""
        items = [*((f"input {number}", item) for number, item in enumerate(args, start=1)), *kwargs.items()]
        found = [(f"{name}{path}", tensor) for name, item in items for path, tensor in tensors_in(item)]
        names, tensors = tuple(name for name, _ in found), tuple(tensor for _, tensor in found)
        shown = _choose(tensors)
        if shown is None:
            given = ", ".join(f"{name}: {item.dtype} {list(item.shape)}" for name, item in found)
            raise CallError(
                f"nothing can be shown: inputs are {given or 'no tensors'}, and images, signals, vectors and "
                f"characters can be looked at"
            )
        num_examples = len(tensors[shown])
        is_cut = tuple(bool(item.dim()) and len(item) == num_examples for item in tensors)
        without = replace_tensors((args, kwargs), lambda tensor: torch.empty(0))
        return Inputs(without, tensors, names, shown, is_cut)

    @staticmethod
    def of_batch(batch: Batch) -> Inputs:
        """The inputs of a batch."""
        return Inputs.of(*batch.args, **batch.kwargs)

    @property
    def picture(self) -> torch.Tensor:
        """The input that is shown."""
        return self.tensors[self.shown]

    @property
    def name(self) -> str:
        """The name of the input that is shown, and empty if there is no other."""
        return self.names[self.shown] if len(self.tensors) > 1 else ""

    def __len__(self) -> int:
        return len(self.picture)

    def __getitem__(self, examples: Any) -> Inputs:
        """Some of the examples: a slice, or numbers."""
        return replace(
            self,
            tensors=tuple(
                item[examples] if is_cut else item for item, is_cut in zip(self.tensors, self.is_cut, strict=True)
            ),
        )

    def to(self, device: torch.device) -> Inputs:
        """On a device."""
        return replace(self, tensors=tuple(item.to(device) for item in self.tensors))

    def run(self, model: nn.Module, picture: torch.Tensor | None = None) -> Any:
        """Call the model, with `picture` instead of the input that is shown."""
        tensors = list(self.tensors)
        if picture is not None:
            tensors[self.shown] = picture
        rest = iter(tensors)
        args, kwargs = replace_tensors(self.call, lambda _: next(rest))
        return model(*args, **kwargs)


def join(parts: Sequence[Inputs]) -> Inputs:
    """The examples of all parts, one after the other; what is not cut is that of the first."""
    first = parts[0]
    tensors = zip(*(part.tensors for part in parts), strict=True)
    joined = [torch.cat(items) if is_cut else items[0] for items, is_cut in zip(tensors, first.is_cut, strict=True)]
    return replace(first, tensors=tuple(joined))


def _choose(tensors: Sequence[torch.Tensor]) -> int | None:
    """Which tensor is shown: the first batch of images, or else the first that can be shown at all."""
    fitting = [index for index, item in enumerate(tensors) if _can_be_shown(item)]
    images = [index for index in fitting if tensors[index].dim() == 4]
    return next(iter(images or fitting), None)


def _can_be_shown(item: torch.Tensor) -> bool:
    if item.is_floating_point():
        return 2 <= item.dim() <= 4 and item.numel() > 0
    return item.dim() == 2 and item.dtype in (torch.int64, torch.int32)
