"""The pixels or characters that trigger a unit, by the backward pass that Undertow derives.

In: a layer, examples, and for each example a unit and a position. Out: the derivative of each response by the pixels of
its example; for text, the length of the derivative by each character's embedding. It is the plain derivative (Simonyan,
Vedaldi and Zisserman, "Deep inside convolutional networks", 2014; for text Li, Chen, Hovy and Jurafsky, "Visualizing
and understanding neural models in NLP", 2016), from the rules that training uses.

Guided backpropagation (Springenberg, Dosovitskiy, Brox and Riedmiller, 2015) and the deconvolution of Zeiler and Fergus
also cut negative cotangents at each ReLU. Their pictures are sharper, but they stay nearly the same when the weights of
later layers are replaced by random ones (Adebayo et al., "Sanity checks for saliency maps", 2018): they show the image
more than what the network has learned.

The examples of a batch must not depend on each other, as with batch normalisation in eval(). The model is recorded once
for each call, and only up to the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from undertow.api.functional import value_and_grad
from undertow.errors import DataError
from undertow.look.inputs import Inputs
from undertow.look.layers import UnitLayer, hooked

ELEMENTS_AT_A_TIME = 1 << 20  # of the examples that are differentiated together: 6 images of 224x224


class _Reached(Exception):
    """Ends the forward pass when it has reached the layer."""


def pixel_gradients(
    model: nn.Module, layer: UnitLayer, inputs: Inputs, units: torch.Tensor, positions: torch.Tensor,
    expected: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The derivative of each example's response by its pixels, in the shape of the input that is shown."""

    def differentiate(x: Inputs, unit: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return value_and_grad(lambda image: _response(model, layer, x, image, unit, position))(x.picture)

    return _in_parts(inputs, units, positions, expected, differentiate)


def character_gradients(
    model: nn.Module, layer: UnitLayer, embedding: nn.Module, inputs: Inputs, units: torch.Tensor,
    positions: torch.Tensor, expected: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """For each token of each example the length of the derivative by its embedding: (example, token)."""

    def differentiate(x: Inputs, unit: torch.Tensor, position: torch.Tensor) -> tuple[torch.Tensor, Any]:
        with torch.no_grad():
            vectors = embedding(x.picture)

        def response(vectors: torch.Tensor) -> torch.Tensor:
            with hooked(embedding, lambda module, args, output: vectors):
                return _response(model, layer, x, None, unit, position)

        value, gradient = value_and_grad(response)(vectors)
        return value, gradient.float().norm(dim=-1)

    return _in_parts(inputs, units, positions, expected, differentiate)


def _response(
    model: nn.Module, layer: UnitLayer, inputs: Inputs, picture: torch.Tensor | None, units: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The sum of the chosen responses, one of each example; so its derivative by an example is that response's own."""

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise _Reached(output)

    assert layer.reader is not None
    output = None
    with hooked(layer.reader, stop):
        try:
            inputs.run(model, picture)
        except _Reached as reached:
            output = reached.args[0]
    return layer.responses(output)[torch.arange(len(units), device=units.device), units, positions].sum()


def _in_parts(
    inputs: Inputs, units: torch.Tensor, positions: torch.Tensor, expected: torch.Tensor, differentiate: Any
) -> torch.Tensor:
    size = max(ELEMENTS_AT_A_TIME // inputs.picture[0].numel(), 1)
    device = inputs.picture.device
    found = []
    for start in range(0, len(inputs), size):
        part = slice(start, start + size)
        value, gradient = differentiate(inputs[part], units[part].to(device), positions[part].to(device))
        wanted = expected[part].double()
        # Batches of other sizes round differently; half the digits have to agree.
        drift = torch.finfo(value.dtype).eps ** 0.5
        if abs(float(value) - float(wanted.sum())) > drift * (float(wanted.abs().sum()) + 1):
            raise DataError(
                f"the test data gave other examples when it was read again: a response is {float(value):g} where it "
                f"was {float(wanted.sum()):g}; seed its order by torch.manual_seed, or turn its augmentation off"
            )
        found.append(gradient.detach().cpu())
    return torch.cat(found)
