"""Look at what a trained network has learned.

In: a model, and test data that can be read twice. Out: a Look, data from which the page is drawn.

The test data is read once for the strongest examples of all units, and once to fetch those that are shown. Of a long
test set the first examples are read, and of a deep network layers at equal distances are shown, so that time and
memory stay bounded: 4,096 examples, and 24 layers with a few units and a few examples each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from undertow.data.preparation import Preparation
from undertow.errors import CallError, DataError
from undertow.look.inputs import Inputs, join
from undertow.look.layers import CONVOLUTIONS, UnitLayer, find_layers
from undertow.look.pictures import PictureForm
from undertow.look.pixels import character_gradients, pixel_gradients
from undertow.look.responses import Strongest, find_strongest
from undertow.train.batches import Batch
from undertow.train.evaluation import evaluating

MAX_EXAMPLES = 4096
MAX_LAYERS = 24
MIN_SQUARE = 64  # a vector of at least so many numbers, a square number of them, is taken for a square image


@dataclass(frozen=True, eq=False)
class Sample:
    """An example that triggers a unit, and the derivative of the response by it."""

    example: int
    response: float
    position: int
    inputs: torch.Tensor
    gradient: torch.Tensor | None
    target: int | None


@dataclass(frozen=True)
class UnitView:
    """A unit and the examples that trigger it most, best first."""

    unit: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class LayerView:
    """A layer and the units of it that were chosen; an embedding has none."""

    layer: UnitLayer
    units: tuple[UnitView, ...]


@dataclass(frozen=True)
class Look:
    """What is on the page. `form` is None for text."""

    title: str
    views: tuple[LayerView, ...]
    num_layers: int
    num_examples: int
    num_parameters: int
    input_name: str  # of the one that is shown; empty if there is no other
    form: PictureForm | None
    vocabulary: str | None
    classes: tuple[str, ...] | None

    def label(self, view: LayerView, unit: int) -> str:
        """What a unit is called; those of a last layer are classes, or characters."""
        name = f"{'filter' if isinstance(view.layer.module, CONVOLUTIONS) else 'unit'} {unit}"
        is_last = view is self.views[-1] and isinstance(view.layer.module, nn.Linear)
        if is_last and self.classes is not None and len(self.classes) == view.layer.num_units:
            label = self.classes[unit]
            return f"{name}: {label!r}" if self.vocabulary is not None else f"{name}: {label}"
        return name

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without pictures."""
        return {
            "layers_in_model": self.num_layers,
            "examples": self.num_examples,
            "input": self.input_name,
            "layers": [
                {
                    "path": view.layer.path,
                    "kind": view.layer.kind,
                    "units": view.layer.num_units,
                    "shown": [
                        {
                            "unit": item.unit,
                            "strongest": [
                                {"example": found.example, "response": found.response, "position": found.position}
                                for found in item.samples
                            ],
                        }
                        for item in view.units
                    ],
                }
                for view in self.views
            ],
        }


class _TestData:
    """The first examples of the test data: the same ones at every reading, even if the loader draws their order."""

    def __init__(self, loader: Iterable[Any], read: Callable[[Any], Batch], device: torch.device, seed: int) -> None:
        self._loader, self._make_batch, self._device, self._seed = loader, read, device, seed

    def batches(self) -> Iterator[tuple[Inputs, torch.Tensor | None]]:
        """Inputs on the device, and labels where each example has one."""
        num_left = MAX_EXAMPLES
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            batches = iter(self._loader)
        while num_left > 0:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._seed + num_left)
                raw = next(batches, None)
            if raw is None:
                return
            inputs, labels = self._inputs_of(self._make_batch(raw))
            yield inputs[:num_left].to(self._device), None if labels is None else labels[:num_left]
            num_left -= len(inputs)

    def _inputs_of(self, batch: Batch) -> tuple[Inputs, torch.Tensor | None]:
        targets = batch.targets[0] if len(batch.targets) == 1 else batch.kwargs.get("labels")
        has_labels = isinstance(targets, torch.Tensor) and targets.dim() == 1 and not targets.is_floating_point()
        return Inputs.of_batch(batch), targets if has_labels else None

    def fetch(self, wanted: set[int]) -> dict[int, tuple[Inputs, int | None]]:
        """The wanted examples with their labels, by number."""
        found: dict[int, tuple[Inputs, int | None]] = {}
        first = 0
        for inputs, labels in self.batches():
            for number in wanted.intersection(range(first, first + len(inputs))):
                label = None if labels is None else int(labels[number - first])
                found[number] = inputs[[number - first]].to(torch.device("cpu")), label
            first += len(inputs)
            if len(found) == len(wanted):
                return found
        raise DataError("the test data had fewer examples when it was read again")


def look_at(
    model: nn.Module,
    loader: Iterable[Any],
    read: Callable[[Any], Batch],
    device: torch.device,
    *,
    title: str,
    preparation: Preparation | None,
    classes: tuple[str, ...] | None,
    num_units: int,
    num_samples: int,
    seed: int,
) -> Look:
    """Find what `num_units` units of each layer respond to, with `num_samples` examples each.

    `read` makes a batch of what the loader gives; the model lies on `device`.
    """
    data = _TestData(loader, read, device, seed)
    with evaluating(model):
        first = next((inputs for inputs, _ in data.batches()), None)
        if first is None:
            raise DataError("there is no test data to look at")
        form = _find_form(first.picture, loader, preparation)
        layers = find_layers(model, first)
        if not layers:
            raise CallError(
                "nothing can be shown: the model calls no convolution, linear, recurrent or embedding layer whose "
                "weights or units could be looked at"
            )
        shown = _at_equal_distances(layers)
        with_units = [layer for layer in shown if layer.reader is not None]
        found = find_strongest(model, with_units, (inputs for inputs, _ in data.batches()), num_samples)
        chosen = {layer: strongest.choose(num_units) for layer, strongest in found.items()}
        wanted = {
            int(number) for layer, strongest in found.items() for number in strongest.examples[chosen[layer]].flatten()
        }
        examples = data.fetch(wanted)
        embedding = next((layer.module for layer in layers if layer.is_embedding and layer.reads_input), None)
        views = tuple(
            LayerView(layer, _look_at_units(model, layer, found[layer], chosen[layer], examples, embedding, device))
            if layer in found
            else LayerView(layer, ())
            for layer in shown
        )
    return Look(
        title=title,
        views=views,
        num_layers=len(layers),
        num_examples=max((item.num_examples for item in found.values()), default=0),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        input_name=first.name,
        form=form,
        vocabulary=None if preparation is None else preparation.vocabulary,
        classes=classes,
    )


def _find_form(inputs: torch.Tensor, loader: Any, preparation: Preparation | None) -> PictureForm | None:
    """How examples are pictures; None for text."""
    if not inputs.is_floating_point() and inputs.dim() == 2:
        return None
    shape = tuple(inputs.shape[1:])
    stored = getattr(getattr(loader, "dataset", None), "inputs", None)
    if len(shape) == 1:
        if isinstance(stored, torch.Tensor) and stored.dim() == 4 and stored[0].numel() == shape[0]:
            shape = tuple(stored.shape[1:])
        elif shape[0] >= MIN_SQUARE and math.isqrt(shape[0]) ** 2 == shape[0]:
            shape = (1, math.isqrt(shape[0]), math.isqrt(shape[0]))
    shape = (1,) * (3 - len(shape)) + shape
    if preparation is not None and len(preparation.mean) in (1, shape[0]):
        return PictureForm(shape, preparation.mean, preparation.std)  # type: ignore[arg-type]
    low, high = float(inputs.min()), float(inputs.max())
    return PictureForm(shape, (-low / max(high - low, 1e-30),), (1 / max(high - low, 1e-30),))  # type: ignore[arg-type]


def _at_equal_distances(layers: Sequence[UnitLayer]) -> list[UnitLayer]:
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    return [layers[round(index * (len(layers) - 1) / (MAX_LAYERS - 1))] for index in range(MAX_LAYERS)]


def _look_at_units(
    model: nn.Module,
    layer: UnitLayer,
    strongest: Strongest,
    units: list[int],
    examples: dict[int, tuple[Inputs, int | None]],
    embedding: nn.Module | None,
    device: torch.device,
) -> tuple[UnitView, ...]:
    numbers, responses = strongest.examples[units], strongest.responses[units]
    places = strongest.positions[units]
    inputs = join([examples[number][0] for number in numbers.flatten().tolist()]).to(device)
    rows = torch.tensor(units).repeat_interleave(numbers.shape[1])
    gradients = None
    if inputs.picture.is_floating_point():
        gradients = pixel_gradients(model, layer, inputs, rows, places.flatten(), responses.flatten())
    elif embedding is not None:
        gradients = character_gradients(model, layer, embedding, inputs, rows, places.flatten(), responses.flatten())
    found = []
    for row, unit in enumerate(units):
        samples = []
        for column in range(numbers.shape[1]):
            index = row * numbers.shape[1] + column
            number = int(numbers[row, column])
            samples.append(
                Sample(
                    number,
                    float(responses[row, column]),
                    int(places[row, column]),
                    examples[number][0].picture[0],
                    None if gradients is None else gradients[index],
                    examples[number][1],
                )
            )
        found.append(UnitView(unit, tuple(samples)))
    return tuple(found)
