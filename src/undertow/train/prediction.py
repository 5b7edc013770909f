"""What a trained model says of new inputs: an image, a folder of images, an array file, or the start of a text.

Class probabilities where the run's loss is of classes, the outputs as numbers otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.data.images import decode_image, list_images
from undertow.data.npz import as_examples, read_npz
from undertow.data.preparation import Preparation
from undertow.data.text import encode, read_text
from undertow.errors import DataError


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one input, best first, with their probabilities."""

    input: str
    classes: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = [{"class": name, "probability": probability} for name, probability in self.classes]
        return {"input": self.input, "classes": found}

    def __str__(self) -> str:
        # The next character of a text may be a space or a line break.
        names = [repr(name) if name.isspace() or not name.isprintable() else name for name, _ in self.classes]
        shares = [f"{name} {share:.2%}" for name, (_, share) in zip(names, self.classes, strict=True)]
        return f"{self.input}: " + ", ".join(shares)


@dataclass(frozen=True)
class Numbers:
    """The outputs for one input."""

    input: str
    outputs: Any  # a number, or nested lists

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"input": self.input, "outputs": self.outputs}

    def __str__(self) -> str:
        return f"{self.input}: {json.dumps(self.outputs)}"


def predict_numbers(run_model: Callable[[torch.Tensor], Any], preparation: Preparation, path: Path) -> list[Numbers]:
    """The outputs of every input at `path`."""
    found = []
    for name, inputs in read_inputs(preparation, path):
        outputs = run_model(inputs)
        if not isinstance(outputs, torch.Tensor):
            raise DataError(f"the model gives {type(outputs).__name__}, which cannot be shown as numbers")
        found.append(Numbers(name, outputs[0].float().tolist()))
    return found


def predict(
    run_model: Callable[[torch.Tensor], torch.Tensor],
    preparation: Preparation,
    classes: Sequence[str] | None,
    path: Path,
    top: int,
) -> list[Prediction]:
    """The `top` likeliest classes of every input at `path`; of a text, the likeliest next characters."""
    found = []
    for name, inputs in read_inputs(preparation, path):
        outputs = run_model(inputs)
        logits = outputs[:, -1] if preparation.vocabulary is not None else outputs
        if logits.dim() != 2:
            raise DataError(f"the model gives outputs of shape {list(outputs.shape)}, which are not classes")
        best = logits[0].double().softmax(0).topk(min(top, logits.shape[1]))
        # A user's model may have more outputs than the data has classes.
        known = classes or ()
        names = [known[index] if index < len(known) else str(index) for index in best.indices.tolist()]
        found.append(Prediction(name, tuple(zip(names, best.values.tolist(), strict=True))))
    return found


def read_inputs(preparation: Preparation, path: Path) -> list[tuple[str, torch.Tensor]]:
    """Every input at `path`, each as a batch of one."""
    if not path.exists():
        raise DataError(f"there is no input {path}")
    if preparation.vocabulary is not None:
        if path.is_dir():
            raise DataError(f"{path} is a folder; a language model takes one text file")
        # Editors end a file with a line break, which is hardly meant as part of the text.
        tokens = encode(read_text(path).removesuffix("\n"), preparation.vocabulary, str(path))
        if not len(tokens):
            raise DataError(f"{path} has no text to continue")
        return [(str(path), tokens[-preparation.shape[0] :][None])]
    if path.suffix == ".npz":
        arrays = read_npz(path)
        name = next((name for name in ("x", "x_test") if name in arrays), None)
        if name is None:
            raise DataError(f"{path} has the arrays {', '.join(arrays) or '(none)'}; it must have x")
        return [(f"{path}[{index}]", preparation(item[None])) for index, item in enumerate(as_examples(arrays[name]))]
    paths = list_images(path) if path.is_dir() else [path]
    if not paths:
        raise DataError(f"{path} holds no images")
    return [(str(item), _prepare_image(preparation, item)) for item in paths]


def _prepare_image(preparation: Preparation, path: Path) -> torch.Tensor:
    pixels = decode_image(path)
    # Pixels of image files go to 255, but the run's data may have another largest value: digits go to 16.
    return preparation(pixels[None].float() * (preparation.scale / 255.0))
