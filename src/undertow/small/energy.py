"""What an inference costs: multiplications, traffic with memory, and an estimate of the energy of both.

In: a model, an example, and its coded tensors if it has some. Out: a row per linear and convolutional layer, for one
example of the batch, and sums. The energies are those of a 45 nm process at 0.9 V (Horowitz, "Computing's energy
problem", ISSCC 2014), as Han, Pool, Tran & Dally (NeurIPS 2015) use them: 640 pJ for 32 bits from DRAM. Horowitz gives
caches for 64 bits: half of that is taken for 32. Each weight is read once per inference, as it is stored: a coded one
as a code of a fixed number of bits, with a gap where weights were pruned. Weights lie in the smallest memory that holds
all of them together, a layer's inputs and outputs in the smallest that holds those.

It is an estimate for comparing networks, not a measurement of a machine: it knows no other operations than these
layers, no reuse in caches, and no instructions. XOR and population count have no published figure; 32 of them are
counted as two additions of integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undertow.coding.table import shared_size
from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError
from undertow.small.binary_layers import BinaryConv2d, BinaryLinear

# Picojoules; of memories for 32 bits, by the bytes they hold.
MULTIPLY_PJ = {"float32": 3.7, "int32": 3.1, "int8": 0.2}
ADD_PJ = {"float32": 0.9, "int32": 0.1, "int8": 0.03}
CACHE_PJ = {8 << 10: 5.0, 32 << 10: 10.0, 1 << 20: 50.0}
DRAM_PJ = 640.0
_WORD_BYTES = 4
_PRODUCTS_PER_WORD = 32
_Weighted = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def access_pj(held_bytes: float) -> float:
    """What 32 bits cost that are among so many bytes."""
    return next((pj for size, pj in CACHE_PJ.items() if held_bytes <= size), DRAM_PJ)


@dataclass(frozen=True)
class LayerEnergy:
    """One layer, per example. `kind` says what a product is: of floats, a sign with a float, or two signs."""

    name: str
    kind: str  # "float", "signs" or "bits"
    num_products: float
    weight_bytes: float
    activation_bytes: float  # inputs and outputs

    @property
    def arithmetic_pj(self) -> float:
        """The energy of its products and sums."""
        if self.kind == "bits":
            return self.num_products / _PRODUCTS_PER_WORD * 2 * ADD_PJ["int32"]
        multiply_pj = 0.0 if self.kind == "signs" else MULTIPLY_PJ["float32"]
        return self.num_products * (multiply_pj + ADD_PJ["float32"])

    @property
    def activation_pj(self) -> float:
        """The energy of reading its inputs and writing its outputs."""
        return self.activation_bytes / _WORD_BYTES * access_pj(self.activation_bytes)


@dataclass(frozen=True)
class EnergyEstimate:
    """All layers."""

    layers: tuple[LayerEnergy, ...]

    @property
    def weight_bytes(self) -> float:
        """The bytes of all weights, as they are stored."""
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def weight_access_pj(self) -> float:
        """What 32 bits of a weight cost."""
        return access_pj(self.weight_bytes)

    @property
    def weight_pj(self) -> float:
        """The energy of reading every weight once."""
        return self.weight_bytes / _WORD_BYTES * self.weight_access_pj

    @property
    def arithmetic_pj(self) -> float:
        """The energy of all products and sums."""
        return sum(layer.arithmetic_pj for layer in self.layers)

    @property
    def activation_pj(self) -> float:
        """The energy of all layers' inputs and outputs."""
        return sum(layer.activation_pj for layer in self.layers)

    @property
    def total_pj(self) -> float:
        """The energy of one inference."""
        return self.weight_pj + self.arithmetic_pj + self.activation_pj

    def watts(self, rate: float) -> float:
        """The power at so many inferences a second."""
        return rate * self.total_pj * 1e-12

    def weight_watts(self, rate: float) -> float:
        """The power of reading the weights alone, at so many inferences a second."""
        return rate * self.weight_pj * 1e-12


def estimate_energy(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    tensors: Mapping[str, Tensor | CodedTensor] | None = None,
) -> EnergyEstimate:
    """An estimate for one example of the batch in `args`. With `tensors`, coded weights count as they are coded.

    The model is evaluated once. A layer that is called several times computes each time, and reads its weight once.
    Bias and other parameters are left out.
    """
    batch = _batch_of(args, kwargs or {})
    layers = []
    for name, module, calls in _watch(model, args, kwargs or {}):
        coded = (tensors or {}).get(f"{name}.weight" if name else "weight")
        num_bytes, num_products, kind = module.weight.nbytes, module.weight.numel(), "float"
        if isinstance(coded, CodedTensor):
            num_bytes, num_products = shared_size(coded).num_bytes, coded.num_kept
            if isinstance(module, BinaryLinear | BinaryConv2d):
                kind = "bits" if module.binary_inputs else "signs"
        num_uses = sum(call.outputs_per_filter for call in calls) / batch
        layers.append(
            LayerEnergy(name, kind, num_products * num_uses, num_bytes, sum(call.num_bytes for call in calls) / batch)
        )
    return EnergyEstimate(tuple(layers))


class _Call(NamedTuple):
    outputs_per_filter: float
    num_bytes: int  # of its input and its output


def _watch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, _Weighted, list[_Call]]]:
    """The layers that an evaluation calls, in the order of their first calls."""
    found: dict[_Weighted, list[_Call]] = {}
    names = {module: name for name, module in model.named_modules() if isinstance(module, _Weighted)}

    def record(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        assert isinstance(module, _Weighted)
        outputs_per_filter = output.numel() / (len(module.weight) or 1)
        found.setdefault(module, []).append(_Call(outputs_per_filter, inputs[0].nbytes + output.nbytes))

    hooks = [module.register_forward_hook(record) for module in names]
    was_training = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            model.eval()(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for owner, training in was_training.items():
            owner.training = training
    return [(names[module], module, calls) for module, calls in found.items()]


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensors = [item for item in (*args, *kwargs.values()) if isinstance(item, Tensor) and item.ndim and len(item)]
    if not tensors:
        raise CallError("estimate_energy: the example holds no tensor whose first dimension is the batch")
    return len(tensors[0])
