"""The words of options about data. In: their text. Out: sizes, names, numbers; CallError says what an option takes.

This module imports nothing heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from undertow.errors import CallError

RESIZED_CROP, CROP, FLIP, JITTER = AUGMENTATIONS = ("resized-crop", "crop", "flip", "jitter")
BALANCED = "balanced"
MAX_SIDE = 1 << 14  # pixels


def parse_image_size(text: str) -> tuple[int, int]:
    """Height and width from `224` or `224x160`."""
    found = re.fullmatch(r"(\d{1,6})(?:x(\d{1,6}))?", text)
    size = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not all(1 <= side <= MAX_SIDE for side in size):
        raise CallError(f"--image-size {text}: give one number of pixels, or height x width such as 224x160")
    return size


def check_augment(names: Sequence[str]) -> None:
    """Raise CallError unless these are names of changes, each once."""
    text = ",".join(names)
    if wrong := [name for name in names if name not in AUGMENTATIONS]:
        raise CallError(f"--augment {text}: there is no {wrong[0]!r}; it takes {', '.join(AUGMENTATIONS)}")
    if len(set(names)) < len(names):
        raise CallError(f"--augment {text}: a name is given twice")


def parse_validation(text: str) -> float | str:
    """A share of the training examples, or the name of data."""
    try:
        share = float(text)
    except ValueError:
        return text
    if not 0 < share < 1:
        raise CallError(f"--validation {text}: a share is between 0 and 1, such as 0.1; 0 and 1 leave one part empty")
    return share


def parse_class_weights(text: str) -> tuple[float, ...] | None:
    """One weight per class from `1,2.5,1`; None for `balanced`."""
    if text == BALANCED:
        return None
    weights = _parse_numbers(text)
    if weights is None or not all(weight >= 0 for weight in weights) or not any(weights):
        raise CallError(
            f"--class-weights {text}: give balanced, or one number of at least 0 per class, such as 1,2.5,1"
        )
    return weights


def parse_normalise(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel from `0.5,0.5,0.5/0.2,0.2,0.2`."""
    mean, _, std = text.partition("/")
    means, deviations = _parse_numbers(mean), _parse_numbers(std)
    if means is None or deviations is None or len(means) != len(deviations) or not all(x > 0 for x in deviations):
        raise CallError(
            f"--normalise {text}: give means, a slash, and as many deviations of more than 0, such as "
            f"0.485,0.456,0.406/0.229,0.224,0.225"
        )
    return means, deviations


def check_columns(names: Sequence[str]) -> None:
    """Raise CallError unless these are a column of inputs and one of targets, or one of text."""
    text = ",".join(names)
    if not all(names) or len(names) > 2 or len(set(names)) < len(names):
        raise CallError(f"--columns {text}: give the column of inputs and that of targets, such as image,label")


def _parse_numbers(text: str) -> tuple[float, ...] | None:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None
