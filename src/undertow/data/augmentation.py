"""Augmentation: a training image is changed in another way in every epoch. In: names. Out: changed images.

Each image has a seed of its own, which follows from the run's seed, the epoch and the image's place in it. So neither
the number of workers nor a resume changes a draw.

`jitter` and the box of `resized-crop` are torchvision's (v2). `crop` and `flip` are draws in the order of torchvision's
RandomCrop and RandomHorizontalFlip, then two copies for a whole batch: the same numbers, without a call per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from undertow.data.examples import Batch, Examples
from undertow.data.options import CROP, FLIP, JITTER, RESIZED_CROP
from undertow.data.preparation import Change, Preparation
from undertow.errors import CallError, DataError

CROP_PADDING = 8  # a side is padded by an eighth of it: 4 of 32 pixels (He et al., CVPR 2016, section 4.2)
MOST_JITTER = 0.4  # the most that brightness, contrast and saturation change by (the Torch ImageNet recipe of 2016)
# A box has such a share of the image, and its sides such a ratio (Szegedy et al., "Going deeper with convolutions").
BOX_SHARE, BOX_RATIO = [0.08, 1.0], [3 / 4, 4 / 3]
BOX_SALT = 0x9E3779B9  # its draws are other ones than those after resizing; PyTorch reads 32 bits of a seed
BATCHED = {CROP, FLIP}


class Draw(NamedTuple):
    """A training example and the seed of its changes."""

    example: int
    seed: int


class Augmentation:
    """The named changes: `resized-crop` before an image is resized, the others after, one after the other."""

    def __init__(self, names: Sequence[str], preparation: Preparation) -> None:
        v2 = None if BATCHED.issuperset(names) else import_transforms()
        if not preparation.is_image:
            raise DataError(f"--augment {','.join(names)}: the data has no images, its inputs are {preparation.shape}")
        channels, height, width = preparation.shape
        if JITTER in names and (preparation.scale == 1.0 or channels not in (1, 3)):
            raise DataError(
                "--augment jitter: it changes colours that are stored as bytes, in 1 or 3 channels; this data has "
                f"{channels} channels" + (" of floating-point numbers" if preparation.scale == 1.0 else "")
            )
        self.find_box = None if v2 is None or RESIZED_CROP not in names else v2.RandomResizedCrop.get_params
        self.padding = height // CROP_PADDING, width // CROP_PADDING
        self.names = [name for name in names if name != RESIZED_CROP]
        self.jitter = None if v2 is None else v2.ColorJitter(MOST_JITTER, MOST_JITTER, MOST_JITTER)

    def bind(self, seeds: Sequence[int]) -> Change:
        """The changes of a batch whose images have these seeds."""
        return _Bound(self, seeds)

    def cut(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        """A random box of an image that has its own size still."""
        assert self.find_box is not None
        with _drawing():
            torch.default_generator.manual_seed(seed ^ BOX_SALT)
            top, left, height, width = self.find_box(image, BOX_SHARE, BOX_RATIO)
        return image[..., top : top + height, left : left + width]

    def apply(self, images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        """Each of the resized images changed by its own draws; the generator of the process stays as it was."""
        if BATCHED.issuperset(self.names):
            return self._apply_batched(images, seeds)
        with _drawing():
            return torch.cat([self._change(image[None], seed) for image, seed in zip(images, seeds, strict=True)])

    def _change(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        # torch.manual_seed would seed the GPU's generators too, from which the model draws.
        torch.default_generator.manual_seed(seed)
        for name in self.names:
            if name == JITTER:
                assert self.jitter is not None
                image = self.jitter(image)
            else:
                image = self._move(image, name, [self._draw(name, torch.default_generator)])
        return image

    def _apply_batched(self, images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator()
        draws: dict[str, list[Any]] = {name: [] for name in self.names}
        for seed in seeds:
            generator.manual_seed(seed)
            for name, drawn in draws.items():
                drawn.append(self._draw(name, generator))
        for name, drawn in draws.items():
            images = self._move(images, name, drawn)
        return images

    def _draw(self, name: str, generator: torch.Generator) -> Any:
        """Where a crop begins, in rows and columns of the padded image; or whether the image is mirrored."""
        if name == FLIP:
            return float(torch.rand(1, generator=generator)) < 0.5
        return tuple(int(torch.randint(0, 2 * pad + 1, (), generator=generator)) if pad else 0 for pad in self.padding)

    def _move(self, images: torch.Tensor, name: str, draws: list[Any]) -> torch.Tensor:
        """All images mirrored or cropped at once."""
        if name == FLIP:
            return torch.where(torch.tensor(draws).view(-1, 1, 1, 1), images.flip(-1), images)
        rows, columns = self.padding
        height, width = images.shape[-2:]
        # Every place at which a crop may begin, as a view; indexing copies one of them for each image.
        windows = functional.pad(images, (columns, columns, rows, rows)).unfold(2, height, 1).unfold(3, width, 1)
        tops, lefts = torch.tensor(draws).T
        return windows[torch.arange(len(images)), :, tops, lefts]


class _Bound:
    """The changes of one batch."""

    def __init__(self, augmentation: Augmentation, seeds: Sequence[int]) -> None:
        self._augmentation, self._seeds = augmentation, seeds
        self.is_cutting = augmentation.find_box is not None

    def cut(self, place: int, image: torch.Tensor) -> torch.Tensor:
        """A part of the image at this place of the batch, before it is resized."""
        return self._augmentation.cut(image, self._seeds[place]) if self.is_cutting else image

    def apply(self, images: torch.Tensor) -> torch.Tensor:
        """The resized images changed."""
        return self._augmentation.apply(images, self._seeds)


@contextmanager
def _drawing() -> Any:
    """The generator of the process may be seeded inside; it is put back."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class Augmented(Examples):
    """Training examples that are changed when they are fetched; it is asked for draws instead of indices."""

    def __init__(self, examples: Examples, augmentation: Augmentation) -> None:
        self.examples, self.augmentation = examples, augmentation
        self.targets = examples.targets

    def __len__(self) -> int:
        return len(self.examples)

    def fetch(self, indices: Sequence[Any], change: Change | None = None) -> Batch:
        examples, seeds = zip(*indices, strict=True)
        return self.examples.fetch(list(examples), self.augmentation.bind(seeds))

    def fingerprint(self) -> str:
        return self.examples.fingerprint()

    def prepare_as(self, preparation: Preparation) -> None:
        self.examples.prepare_as(preparation)


def import_transforms() -> Any:
    """torchvision's transforms; raises CallError that says how to install them."""
    what = f"--augment {JITTER} and {RESIZED_CROP} need torchvision"
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise CallError(
            f"{what}, which is not installed: pip install torchvision, in the release for PyTorch {torch.__version__}"
        ) from None
    except (RuntimeError, OSError) as error:
        raise CallError(
            f"{what}, and the one installed is not for PyTorch {torch.__version__}: install the release that goes with "
            f"it ({str(error).splitlines()[0]})"
        ) from None
    return v2
