"""How much a change of each tensor changes the network's outputs: the price of a squared error.

In: a model in `eval()`, a batch, and a change of one tensor at a time. Out: per tensor the mean squared change of the
outputs, in parts of their variance, divided by the squared change of the tensor. Near a trained network this is the
curvature that the tensor's weights have on average (as in optimal brain damage, LeCun, Denker & Solla 1990), measured
and not derived, so it holds for any output and any layer. Two weights of a layer count alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from undertow.ir.structure import tensors_in

# A tensor without influence is not free: what was measured came from one batch.
_LEAST_SHARE = 1e-3


@torch.no_grad()
def measure_prices(
    run: Callable[[], Any], parameters: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """The price of each parameter; `run` gives the outputs, `change(parameter)` the parameter as it would be."""
    outputs = _numbers(run())
    variance = max(float(outputs.var(unbiased=False)), 1e-12)
    prices: dict[str, float] = {}
    for name, parameter in parameters.items():
        before = parameter.detach().clone()
        after = change(before)
        squared = float((after.double() - before.double()).square().sum())
        if not squared:
            continue
        parameter.copy_(after)
        try:
            found = float((_numbers(run()) - outputs).square().mean())
        finally:
            parameter.copy_(before)
        prices[name] = found / variance / squared
    known = sorted(price for price in prices.values() if price > 0)
    middle = known[len(known) // 2] if known else 1.0
    return {name: max(prices.get(name, middle), middle * _LEAST_SHARE) for name in parameters}


def _numbers(outputs: Any) -> Tensor:
    """All floating-point outputs of a network, as one vector."""
    found = [tensor.double().reshape(-1) for _, tensor in tensors_in(outputs) if tensor.is_floating_point()]
    return torch.cat(found) if found else torch.zeros(1, dtype=torch.float64)


def without_smallest(share: float) -> Callable[[Tensor], Tensor]:
    """The change that sets this share of the weights that are not 0 to 0, the smallest first."""

    def change(weights: Tensor) -> Tensor:
        magnitudes = weights.abs()
        present = magnitudes[magnitudes > 0]
        num = max(int(share * present.numel()), 1)
        if not present.numel():
            return weights
        return torch.where(magnitudes <= present.kthvalue(num).values, torch.zeros_like(weights), weights)

    return change


def on_grid(num_steps: int) -> Callable[[Tensor], Tensor]:
    """The change that rounds to a grid of so many steps between 0 and the largest weight."""

    def change(weights: Tensor) -> Tensor:
        if not weights.numel():
            return weights
        step = weights.abs().max() / num_steps
        return torch.where(step > 0, (weights / step).round() * step, weights)

    return change
