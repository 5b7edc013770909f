"""The weights of a unit as a picture.

In: a layer and a unit. Out: a `data:` address and a line that says what the picture shows.

The weights of a first layer belong to pixels, so they are the picture that the unit looks for. A deeper filter has a
slice for each unit of the layer before it, and up to 512 slices are no picture: the slices with the largest weights are
shown. A linear layer that reads images or maps is shown like a convolution over the whole map. Any other has one weight
for each unit before it, and they are shown in their order.
"""

from __future__ import annotations

import math

import torch

from undertow.look.layers import RECURRENT, UnitLayer
from undertow.look.pictures import draw_colours, draw_signed, mosaic

MAX_SLICES = 9


def filter_of(layer: UnitLayer, unit: int) -> torch.Tensor | None:
    """The weights of a unit as (channel, height, width); None for a transposed order that has no picture."""
    module = layer.module
    if isinstance(module, RECURRENT):
        return _recurrent_weights(module, unit)
    weight: torch.Tensor = module.weight.detach().float().cpu()[unit]  # type: ignore[operator]
    if layer.input_shape is not None and math.prod(layer.input_shape) == weight.numel():
        return weight.reshape(-1, *_as_map(layer.input_shape)[1:])
    if weight.dim() == 1:
        return _near_square(weight)[None]
    return weight[:, None] if weight.dim() == 2 else weight


def draw_filter(layer: UnitLayer, unit: int, shape: tuple[int, int, int] | None) -> tuple[str, str]:
    """The picture and what it shows; `shape` is that of the images, for a linear layer on flat ones."""
    weights = filter_of(layer, unit)
    if weights is None:
        return "", ""
    if layer.reads_input and shape is not None and weights.numel() == math.prod(shape):
        weights = weights.reshape(shape)
    channels, height, width = weights.shape
    if layer.reads_input and channels == 3:
        return draw_colours(weights), "its filter, in the colours of the image"
    if channels == 1:
        return draw_signed(weights[0]), "its filter" if layer.reads_input else f"its {_num_weights(layer):,} weights"
    if height * width == 1:
        return draw_signed(_near_square(weights.flatten())), f"its {channels:,} weights"
    energy = weights.square().sum((1, 2))
    largest = energy.sort(dim=0, descending=True, stable=True).indices[:MAX_SLICES]
    share = float(energy[largest].sum() / energy.sum().clamp_min(1e-30))
    picture = draw_signed(mosaic(weights[largest]))
    if len(largest) == channels:
        return picture, f"its {channels} slices, the largest first"
    return picture, f"{len(largest)} of its {channels:,} slices, with {share:.0%} of its weight"


def _num_weights(layer: UnitLayer) -> int:
    """Of each unit, without biases."""
    if isinstance(layer.module, RECURRENT):
        names = (f"{name}_l{layer.module.num_layers - 1}" for name in ("weight_ih", "weight_hh"))
        return sum(int(getattr(layer.module, name).numel()) for name in names) // layer.module.hidden_size
    return int(layer.module.weight[0].numel())  # type: ignore[index]


def _recurrent_weights(module: torch.nn.RNNBase, unit: int) -> torch.Tensor | None:
    """A row for each gate: the weights from the inputs of the last layer, then those from its own states before."""
    last = f"l{module.num_layers - 1}"
    if module.bidirectional or module.proj_size:
        return None
    parts = [getattr(module, f"{name}_{last}").detach().float().cpu() for name in ("weight_ih", "weight_hh")]
    size = module.hidden_size
    gates = [torch.cat([part[gate + unit] for part in parts]) for gate in range(0, len(parts[0]), size)]
    return mosaic(torch.stack([_near_square(gate) for gate in gates]))[None]


def _as_map(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if len(shape) == 3 else (1, *shape)[-3:]


def _near_square(row: torch.Tensor) -> torch.Tensor:
    """A row of numbers as a picture that is about as high as wide, in their order."""
    width = math.ceil(row.numel() ** 0.5)
    height = math.ceil(row.numel() / width)
    return torch.cat([row, row.new_zeros(width * height - row.numel())]).reshape(height, width)
