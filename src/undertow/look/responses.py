"""The examples to which each unit responds most.

In: layers and batches of test data. Out: for each unit the strongest examples, where in them the response was, and the
mean and deviation of its response. The batches stream by: only these numbers are kept, not the examples.

The response to an example is the largest over its positions (Zeiler and Fergus, "Visualizing and understanding
convolutional networks", 2014, show for each feature map the strongest activations over a validation set).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from undertow.look.inputs import Inputs
from undertow.look.layers import UnitLayer, hooked


@dataclass
class Strongest:
    """For each unit (rows) its strongest examples, best first, and sums over all examples."""

    responses: torch.Tensor
    examples: torch.Tensor
    positions: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor
    num_examples: int

    @staticmethod
    def none(num_units: int) -> Strongest:
        """Before the first batch."""
        empty, zeros = torch.empty(num_units, 0), torch.zeros(num_units, dtype=torch.float64)
        return Strongest(empty, empty.long(), empty.long(), zeros, zeros.clone(), 0)

    def add(self, found: torch.Tensor, first: int, num_kept: int) -> None:
        """Look at a batch's responses (example, unit, position); `first` is the number of its first example."""
        best, places = (item.cpu() for item in found.detach().float().max(-1))
        self.sums += best.double().sum(0)
        self.squares += best.double().square().sum(0)
        self.num_examples += len(best)
        numbers = torch.arange(first, first + len(best)).expand(best.shape[1], -1)
        responses = torch.cat((self.responses, best.t()), 1)
        # Stable: of equal responses the earlier example stays.
        order = responses.sort(dim=1, descending=True, stable=True).indices[:, :num_kept]
        self.responses = responses.gather(1, order)
        self.examples = torch.cat((self.examples, numbers), 1).gather(1, order)
        self.positions = torch.cat((self.positions, places.t()), 1).gather(1, order)

    def choose(self, num_units: int) -> list[int]:
        """The units whose strongest response stands out most from their others, in deviations; in their own order.

        Units that never respond above 0 come last: after a ReLU they say nothing.
        """
        mean = self.sums / self.num_examples
        deviation = (self.squares / self.num_examples - mean.square()).clamp_min(0).sqrt()
        peak = self.responses[:, 0].double() - mean
        score = torch.where(deviation > 0, peak / deviation, torch.full_like(peak, -1.0)).tolist()
        is_positive = (self.responses[:, 0] > 0).tolist()
        order = sorted(range(len(score)), key=lambda unit: (is_positive[unit], score[unit]), reverse=True)
        return sorted(order[:num_units])


def find_strongest(
    model: nn.Module, layers: Sequence[UnitLayer], batches: Iterable[Inputs], num_kept: int
) -> dict[UnitLayer, Strongest]:
    """The strongest examples of every unit; `model` is in eval() already. A layer's first call counts."""
    found = {layer: Strongest.none(layer.num_units) for layer in layers}
    num_seen = 0
    for inputs in batches:
        pending = set(layers)

        def read(layer: UnitLayer, output: Any, pending: set[UnitLayer] = pending, first: int = num_seen) -> None:
            if layer in pending:
                pending.remove(layer)
                found[layer].add(layer.responses(output), first, num_kept)

        with ExitStack() as stack, torch.no_grad():
            for layer in layers:
                assert layer.reader is not None
                stack.enter_context(hooked(layer.reader, lambda _, __, output, layer=layer: read(layer, output)))
            inputs.run(model)
        num_seen += len(inputs)
    return found
