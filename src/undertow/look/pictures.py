"""Numbers as pictures: images, weights and derivatives as PNGs inside the page.

In: tensors. Out: `data:` addresses. A picture has a pixel for each number; the page enlarges it without smoothing.
Signed numbers are orange where positive and blue where negative, the more opaque the larger, so that zero is the page
itself, light or dark; numbers of three colour channels are colours around grey.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import torch
from PIL import Image
from torch.nn import functional

POSITIVE, NEGATIVE = (224, 108, 24), (34, 112, 190)
MAX_SIDE = 112  # pixels of one picture; a larger one is made smaller


@dataclass(frozen=True)
class PictureForm:
    """How an example is a picture: its shape (channels, height, width), and how it was normalised."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def shaped(self, examples: torch.Tensor) -> torch.Tensor:
        """Examples, or their derivatives, as (example, channel, height, width)."""
        return examples.detach().float().reshape(len(examples), *self.shape)

    def visible(self, examples: torch.Tensor) -> torch.Tensor:
        """Examples with values between 0 and 1."""
        mean, std = (torch.tensor(numbers).view(1, -1, 1, 1) for numbers in (self.mean, self.std))
        return (self.shaped(examples) * std + mean).clamp(0, 1)


def is_grey(images: torch.Tensor) -> bool:
    """Whether all channels say the same, as in grey images for a model that takes three channels."""
    return images.shape[1] != 3 or bool((images - images[:, :1]).abs().max() < 1e-3)


def draw_image(image: torch.Tensor) -> str:
    """An image of values between 0 and 1, (channel, height, width); channels other than three are averaged."""
    if image.shape[0] != 3:
        image = image.mean(0, keepdim=True).expand(3, -1, -1)
    return _encode((_shrink(image).clamp(0, 1) * 255).round())


def draw_colours(signed: torch.Tensor) -> str:
    """Signed numbers of three channels as colours around grey; the largest is full."""
    signed = _shrink(signed)
    largest = signed.abs().max().clamp_min(1e-30)
    return _encode(((signed / largest + 1) * 127.5).round())


def draw_signed(signed: torch.Tensor, largest: float | None = None) -> str:
    """Signed numbers (height, width) in orange and blue; `largest` is the one that is opaque."""
    signed = _shrink(signed[None])[0]
    top = float(signed.abs().max()) if largest is None else largest
    # A square root, or a few large numbers would leave all others invisible.
    opacity = (signed.abs() / max(top, 1e-30)).clamp(0, 1).sqrt() * 255
    is_positive = signed > 0
    colours = [torch.where(is_positive, float(a), float(b)) for a, b in zip(POSITIVE, NEGATIVE, strict=True)]
    return _encode(torch.stack([*colours, opacity.round()]))


def mosaic(tiles: torch.Tensor) -> torch.Tensor:
    """Pictures (count, height, width) in rows of one picture (height, width), a blank line between them."""
    count, height, width = tiles.shape
    num_columns = math.ceil(count**0.5)
    rows = []
    for start in range(0, count, num_columns):
        row = torch.zeros(height, num_columns * (width + 1) - 1)
        for column, tile in enumerate(tiles[start : start + num_columns]):
            row[:, column * (width + 1) : column * (width + 1) + width] = tile
        rows += [row, torch.zeros(1, row.shape[1])]
    return torch.cat(rows[:-1])


def _shrink(image: torch.Tensor) -> torch.Tensor:
    image = image.detach().float().nan_to_num()
    scale = MAX_SIDE / max(image.shape[-2:])
    if scale >= 1:
        return image
    size = [max(round(side * scale), 1) for side in image.shape[-2:]]
    return functional.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0]


def _encode(planes: torch.Tensor) -> str:
    """A PNG of planes of 0 to 255: red, green, blue and, as a fourth, opacity."""
    file = io.BytesIO()
    pixels = planes.to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
