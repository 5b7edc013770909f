"""The data that needs no files: 1,797 handwritten digits of 8 x 8 pixels, part of scikit-learn (Alpaydin & Kaynak,
"Optical recognition of handwritten digits", UCI, 1998). They are resized to the model's input and split 80 to 20.
"""

from __future__ import annotations

import torch

from undertow.data.examples import Arrays, Source, split_fixed
from undertow.data.preparation import Wanted, shape_images

SCALE = 16.0  # the largest value of a pixel


def open_digits(wanted: Wanted | None) -> Source:
    """The digits with their labels."""
    from sklearn.datasets import load_digits  # this import takes a second

    data = load_digits()
    images = torch.from_numpy(data.images.astype("uint8")).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype("int64"))
    train, test = split_fixed(len(images))
    preparation = shape_images("digits", images.shape[1:], SCALE, wanted)
    return Source(
        Arrays(images[train], labels[train], preparation),
        Arrays(images[test], labels[test], preparation),
        preparation,
        tuple("0123456789"),
    )
