"""Where in its image a unit looked.

In: the derivatives of a layer's responses by their images. Out: for each image the window to show. A response depends
on its receptive field alone, so its derivative is zero elsewhere: the window is as large as the largest box that holds
all of a derivative of that layer, and at least large enough to recognise something.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MIN_SIDE = 14  # pixels: a field of 3x3 alone says nothing about where it is
MAX_SHARE = 0.7  # a window larger than this part of the image becomes the whole image


@dataclass(frozen=True)
class Window:
    """A part of an image, and in it the box that the response depends on."""

    top: int
    left: int
    height: int
    width: int
    box: tuple[int, int, int, int]  # top, left, height, width, in the image

    def cut(self, image: torch.Tensor) -> torch.Tensor:
        """That part of (..., height, width)."""
        return image[..., self.top : self.top + self.height, self.left : self.left + self.width]


def find_windows(gradients: torch.Tensor) -> list[Window]:
    """The window of each image, all of one size, from derivatives (example, channel, height, width)."""
    used = (gradients != 0).any(1)
    boxes = [_box(mask) for mask in used]
    sides = []
    for axis, whole in ((2, used.shape[1]), (3, used.shape[2])):
        side = max(max(box[axis] for box in boxes), min(MIN_SIDE, whole))
        sides.append(side if side <= MAX_SHARE * whole else whole)
    height, width = sides
    return [
        Window(
            _start(box[0], box[2], height, used.shape[1]), _start(box[1], box[3], width, used.shape[2]),
            height, width, box,
        )
        for box in boxes
    ]  # fmt: skip


def _box(mask: torch.Tensor) -> tuple[int, int, int, int]:
    if not mask.any():
        return 0, 0, 0, 0
    rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
    top, left = int(rows[0]), int(columns[0])
    return top, left, int(rows[-1]) - top + 1, int(columns[-1]) - left + 1


def _start(first: int, size: int, side: int, whole: int) -> int:
    """Where a window of `side` begins so that what is `size` from `first` on lies in its middle."""
    return min(max(first + size // 2 - side // 2, 0), whole - side)
