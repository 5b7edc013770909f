"""From stored values to a model's inputs: normalised numbers, in the model's number of channels and size.

In: a batch as it is stored. Out: (x / scale - mean) / std, resized, computed in float32 and cast to the model's type.
A preparation is plain data, stored with a run, so that a new input can be prepared in the same way years later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn import functional

from undertow.errors import DataError

SAMPLE_SIZE = 1024  # examples that give mean and deviation
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# The shape that a model takes: None for as many channels as there are.
Wanted = Sequence[int | None]
LUMA = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


class Change(Protocol):
    """How the images of one batch are augmented: before they are resized, if `is_cutting`, and afterwards."""

    is_cutting: bool

    def cut(self, place: int, image: torch.Tensor) -> torch.Tensor:
        """A part of the image (channels, height, width) at this place of the batch."""
        ...

    def apply(self, images: torch.Tensor) -> torch.Tensor:
        """The resized images changed."""
        ...


@dataclass(frozen=True)
class Preparation:
    """`shape` and `dtype` describe a prepared example. Text has a `vocabulary`; its inputs are indices into it."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    vocabulary: str | None = None
    dtype: str = "float32"

    @property
    def is_image(self) -> bool:
        """Whether inputs are images: channels, height, width."""
        return len(self.shape) == 3

    def __call__(self, stored: torch.Tensor, change: Change | None = None) -> torch.Tensor:
        """Prepare a batch. `change` augments it."""
        if self.vocabulary is not None:
            return stored.long()
        if change is not None and change.is_cutting:
            return self.prepare_each(stored, change)
        return self._finish(self.resize(stored.float() / self.scale), change)

    def prepare_each(self, images: Iterable[torch.Tensor], change: Change | None = None) -> torch.Tensor:
        """Prepare a batch of images of any sizes."""
        parts = images if change is None else (change.cut(place, image) for place, image in enumerate(images))
        return self._finish(torch.cat([self.resize(part[None].float() / self.scale) for part in parts]), change)

    def _finish(self, resized: torch.Tensor, change: Change | None) -> torch.Tensor:
        return self.cast(self._normalise(resized if change is None else change.apply(resized)))

    def cast(self, numbers: torch.Tensor) -> torch.Tensor:
        """Floating-point numbers in the model's type; labels unchanged."""
        return numbers.to(DTYPES[self.dtype]) if numbers.is_floating_point() else numbers

    def resize(self, examples: torch.Tensor) -> torch.Tensor:
        """Images in the wanted channels and size; anything else in the wanted shape."""
        if len(self.shape) != 3 or examples.dim() != 4:
            if examples[0].numel() != math.prod(self.shape):
                raise DataError(
                    f"the model takes inputs of shape {list(self.shape)}, but this one has {list(examples.shape[1:])}"
                )
            return examples.reshape(len(examples), *self.shape)
        channels, height, width = self.shape
        if channels == 1 and examples.shape[1] == 3:
            weights = torch.tensor(LUMA).view(1, 3, 1, 1)
            examples = (examples * weights).sum(1, keepdim=True)
        elif examples.shape[1] == 1:
            examples = examples.expand(-1, channels, -1, -1)
        elif examples.shape[1] != channels:
            raise DataError(f"the model takes images of {channels} channels, but this one has {examples.shape[1]}")
        if examples.shape[-2:] == (height, width):
            return examples
        return functional.interpolate(examples, (height, width), mode="bilinear", align_corners=False, antialias=True)

    def _normalise(self, examples: torch.Tensor) -> torch.Tensor:
        shape = (1, -1, *(1,) * (examples.dim() - 2))
        return (examples - torch.tensor(self.mean).view(shape)) / torch.tensor(self.std).view(shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "shape": list(self.shape), "mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Preparation:
        """The inverse of `to_dict`."""
        lists = {name: tuple(data[name]) for name in ("shape", "mean", "std")}
        preparation = Preparation(**{**data, **lists})
        if preparation.dtype not in DTYPES:
            raise ValueError(f"models do not take {preparation.dtype!r}")
        return preparation


def shape_images(what: str, stored: Sequence[int], scale: float, wanted: Wanted | None) -> Preparation:
    """How images of the shape `stored` (channels, height, width) get the shape `wanted`; nothing is normalised yet."""
    channels, *size = stored
    if not math.prod(stored):
        raise DataError(f"{what}: images of shape {[channels, *size]} have no pixels")
    given = tuple(wanted) if wanted is not None else (channels, *size)
    shape = tuple(channels if length is None else length for length in given)
    is_flat = len(shape) == 1 and shape[0] == math.prod(stored)
    if not is_flat and (len(shape) != 3 or shape[0] not in (1, channels) and channels != 1):
        raise DataError(
            f"{what}: the model takes inputs of shape {list(shape)}, and images of shape {[channels, *size]} "
            f"cannot be converted to it"
        )
    return Preparation(shape, scale)


def measure_statistics(preparation: Preparation, sample: torch.Tensor) -> Preparation:
    """With mean and deviation of each channel of a sample; of all numbers together where images become vectors."""
    numbers = sample.double()
    dims = (0, 2, 3) if preparation.is_image else (0, 1)
    mean, std = numbers.mean(dims).reshape(-1), numbers.std(dims).reshape(-1)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return replace(preparation, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def choose_sample(num_examples: int) -> list[int]:
    """The indices of the examples that give mean and deviation, at equal distances."""
    return list(range(0, num_examples, max(num_examples // SAMPLE_SIZE, 1)))[:SAMPLE_SIZE]
