"""A network whose weights are looked up: its parameters are the shared values.

In: a model and its coded tensors. Out: a module that computes what the model does with these weights, and whose
codebooks can be trained by any planned step; a value's gradient is the sum of its weights' (`ops/looking_up.py`). Codes
stay as they are, so a removed weight stays removed. The model itself is not changed until `write_back`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from undertow.coding.tensors import CodedTensor
from undertow.ops.looking_up import LOOK_UP
from undertow.shrink.sharing import CODEBOOK_BITS, dense_codes, round_codebook

_FLAT = ("_flat_weights", "_flat_weight_refs")  # what a recurrent layer knows of its weights


class SharedNetwork(nn.Module):
    """`model` with the weights that `coded` describes, by the parameters' first names."""

    def __init__(self, model: nn.Module, coded: Mapping[str, CodedTensor]) -> None:
        super().__init__()
        self.model = model
        # A codebook of nothing, or without a weight, cannot be trained.
        self.names = [name for name, tensor in coded.items() if tensor.num_kept]
        self.codebooks = nn.ParameterList([nn.Parameter(coded[name].codebook.clone()) for name in self.names])
        self._coded = dict(coded)
        for place, name in enumerate(self.names):
            self.register_buffer(f"codes{place}", dense_codes(coded[name]), persistent=False)
            if coded[name].scales is not None:
                self.register_buffer(f"scales{place}", coded[name].scales, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        weights = {name: self._weight(place) for place, name in enumerate(self.names)}
        with using(self.model, weights):
            return self.model(*args, **kwargs)

    def _weight(self, place: int) -> torch.Tensor:
        weight = LOOK_UP(self.codebooks[place], getattr(self, f"codes{place}"))
        scales = getattr(self, f"scales{place}", None)
        return weight if scales is None else weight * scales.reshape(-1, *[1] * (weight.dim() - 1))

    def coded(self, num_bits: int = CODEBOOK_BITS) -> dict[str, CodedTensor]:
        """The tensors with their codebooks as they are now, rounded to few bits."""
        places = {name: place for place, name in enumerate(self.names)}
        return {
            name: replace(tensor, codebook=round_codebook(self.codebooks[places[name]].detach().cpu(), num_bits))
            if name in places
            else tensor
            for name, tensor in self._coded.items()
        }


@contextmanager
def using(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The model with these weights for its parameters, by their first names.

    `torch.func.functional_call` sets attributes, and recurrent layers then keep new references at every call, which no
    recording can repeat. This puts the tensors where the modules look for them, and the same objects back.
    """
    given = {id(parameter): weights[name] for name, parameter in model.named_parameters() if name in weights}
    swapped: list[tuple[Any, str, Any]] = []
    flat: list[tuple[nn.RNNBase, dict[str, Any]]] = []
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if id(parameter) in given:
                    swapped.append((module._parameters, name, parameter))
        for owner, name, parameter in swapped:
            owner[name] = given[id(parameter)]
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                # It compares its weights with those that it knows, and would note the change itself, for good.
                flat.append((module, {name: getattr(module, name) for name in _FLAT}))
                found: list[Any] = [getattr(module, name) for name in module._flat_weights_names]
                known = [None if weight is None else weakref.ref(weight) for weight in found]
                vars(module).update(zip(_FLAT, (found, known), strict=True))
        yield
    finally:
        for owner, name, parameter in swapped:
            owner[name] = parameter
        for module, before in flat:
            vars(module).update(before)


@torch.no_grad()
def write_back(model: nn.Module, coded: Mapping[str, CodedTensor]) -> None:
    """Give the model's parameters the values of their coded tensors."""
    parameters = dict(model.named_parameters())
    for name, tensor in coded.items():
        parameters[name].copy_(tensor.dense())
