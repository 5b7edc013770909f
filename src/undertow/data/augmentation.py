"""Augmentation: a training image is changed in another way in every epoch. In: names. Out: changed images.

The transforms are torchvision's (v2). Each image has a seed of its own, which follows from the run's seed, the epoch
and the image's place in it. So neither the number of workers nor a resume changes a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from undertow.data.examples import Batch, Examples
from undertow.data.preparation import Change, Preparation
from undertow.errors import CallError, DataError

CROP_PADDING = 8  # a side is padded by an eighth of it: 4 of 32 pixels (He et al., CVPR 2016, section 4.2)
JITTER = 0.4  # the most that brightness, contrast and saturation change by (the Torch ImageNet recipe of 2016)


class Draw(NamedTuple):
    """A training example and the seed of its changes."""

    example: int
    seed: int


class Augmentation:
    """The named changes, one after the other."""

    def __init__(self, names: Sequence[str], preparation: Preparation) -> None:
        v2 = import_transforms()
        if not preparation.is_image:
            raise DataError(f"--augment {','.join(names)}: the data has no images, its inputs are {preparation.shape}")
        channels, height, width = preparation.shape
        if "jitter" in names and (preparation.scale == 1.0 or channels not in (1, 3)):
            raise DataError(
                "--augment jitter: it changes colours that are stored as bytes, in 1 or 3 channels; this data has "
                f"{channels} channels" + (" of floating-point numbers" if preparation.scale == 1.0 else "")
            )
        padding = [width // CROP_PADDING, height // CROP_PADDING]
        makers = {
            "crop": lambda: v2.RandomCrop((height, width), padding=padding),
            "flip": v2.RandomHorizontalFlip,
            "jitter": lambda: v2.ColorJitter(JITTER, JITTER, JITTER),
        }
        self.transforms: list[Change] = [makers[name]() for name in names]

    def __call__(self, images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
        """Each image changed by its own draws; the generator of the process stays as it was."""
        state = torch.get_rng_state()
        try:
            return torch.stack([self._change(image, seed) for image, seed in zip(images, seeds, strict=True)])
        finally:
            torch.set_rng_state(state)

    def _change(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        # torch.manual_seed would seed the GPU's generators too, from which the model draws.
        torch.default_generator.manual_seed(seed)
        for transform in self.transforms:
            image = transform(image)
        return image


class Augmented(Examples):
    """Training examples that are changed when they are fetched; it is asked for draws instead of indices."""

    def __init__(self, examples: Examples, augmentation: Any) -> None:
        self.examples, self.augmentation = examples, augmentation
        self.targets = examples.targets

    def __len__(self) -> int:
        return len(self.examples)

    def fetch(self, indices: Sequence[Any], change: Change | None = None) -> Batch:
        draws = [Draw(*item) for item in indices]
        seeds = [draw.seed for draw in draws]
        return self.examples.fetch([draw.example for draw in draws], lambda images: self.augmentation(images, seeds))

    def fingerprint(self) -> str:
        return self.examples.fingerprint()

    def prepare_as(self, preparation: Preparation) -> None:
        self.examples.prepare_as(preparation)


def import_transforms() -> Any:
    """torchvision's transforms; raises CallError that says how to install them."""
    try:
        from torchvision.transforms import v2
    except ImportError:
        raise CallError(
            "--augment needs torchvision, which is not installed: pip install torchvision, in the release for "
            f"PyTorch {torch.__version__}"
        ) from None
    except (RuntimeError, OSError) as error:
        raise CallError(
            f"--augment needs torchvision, and the one installed is not for PyTorch {torch.__version__}: install the "
            f"release that goes with it ({str(error).splitlines()[0]})"
        ) from None
    return v2
