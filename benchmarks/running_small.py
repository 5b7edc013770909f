"""Layers of VGG-16 that evaluate from small weights, beside the dense ones: sparse, integers of 8 and 4 bits, signs.

fc6 has 25,088 x 4,096 weights, of which the published network keeps 4 %. Beside integers run PyTorch's own kernels for
packed integers, which torchao calls on a CPU where its weights are laid out for them, and torchao itself where it can
be imported (0.18.0 was, from a folder in PYTHONPATH). Contenders take turns; ratios are of times in the same round.
Usage: scripts/bench running_small [--threads 1]
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import nn
from turns import compare, show, take_turns

from undertow.coding.tensors import CodedTensor
from undertow.fast.onednn import PRODUCT_PREPARED, REORDER_PRODUCT
from undertow.small.layers import Layer, SmallLayer
from undertow.small.packed_layers import PackedLayer
from undertow.small.quantising import code_integers, code_signs
from undertow.small.sparse_layers import SparseLayer

BATCHES = (1, 4, 16, 64)
DENSITIES = (0.04, 0.1, 0.25, 0.4)
# The sizes of conv1_2, conv2_2, conv3_3, conv4_3 and conv5_3: channels and pixels.
CONVOLUTIONS = ((64, 224), (128, 112), (256, 56), (512, 28), (512, 14))
_MOST_FOR_RIVALS = 4  # PyTorch's product with float32 takes 100 ms a row
Run = Callable[[], Any]


def prune(weight: torch.Tensor, share: float, num_codes: int = 32) -> CodedTensor:
    """A share of the weights, with shared values; which ones does not matter to the time."""
    mask = torch.rand(weight.shape) < share
    codes = torch.randint(num_codes, (int(mask.sum()),), dtype=torch.int32)
    return CodedTensor(tuple(weight.shape), mask, codes, torch.randn(num_codes))


def forms_of(layer: Layer, densities: tuple[float, ...]) -> dict[str, SmallLayer]:
    """The layer in every form."""
    found: dict[str, SmallLayer] = {
        f"sparse, {density:.0%} kept": SparseLayer(layer, prune(layer.weight, density)) for density in densities
    }
    for num_bits in (8, 4):
        found[f"int{num_bits}"] = PackedLayer(layer, code_integers(layer.weight, num_bits), num_bits)
    found["signs"] = PackedLayer(layer, code_signs(layer.weight), 1)
    return found


def rivals_of(layer: nn.Linear, x: torch.Tensor) -> dict[str, Run]:
    """Others' products with integers, in the types that they take."""
    coded = code_integers(layer.weight, 8)
    assert coded.scales is not None
    integers = coded.codebook.to(torch.int8)[coded.codes].reshape(coded.shape)
    scales, half, half_scales = coded.scales, x.bfloat16(), coded.scales.bfloat16()
    found: dict[str, Run] = {
        "PyTorch int8, float32": lambda: torch._weight_int8pack_mm(x, integers, scales),
        "PyTorch int8, bfloat16": lambda: torch._weight_int8pack_mm(half, integers, half_scales),
    }
    nibbles = torch.randint(0, 16, layer.weight.shape, dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack_for_cpu(nibbles, 1)
    groups = torch.rand(layer.in_features // 128, layer.out_features, 2, dtype=torch.bfloat16)
    found["PyTorch int4, bfloat16"] = lambda: torch._weight_int4pack_mm_for_cpu(half, packed, 128, groups)
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        print(f"without torchao: {error}")
        return found
    other = nn.Sequential(copy.deepcopy(layer))
    quantize_(other, Int8WeightOnlyConfig())
    found["torchao int8, eager"] = lambda: other(x)
    return found


def prepared(layer: nn.Linear, x: torch.Tensor) -> Run:
    """The dense layer by oneDNN, with its weight laid out before."""
    weight = REORDER_PRODUCT(layer.weight.t(), len(x))
    return lambda: PRODUCT_PREPARED(x, weight, layer.bias, "none")


def main() -> None:
    """Print every comparison, and write them with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": describe_machine(), "fc6": {}, "convolutions": {}}
    with torch.no_grad():
        layer = nn.Linear(25088, 4096)
        forms = forms_of(layer, (0.04, 0.1))
        for batch in BATCHES:
            x = torch.randn(batch, 25088)
            contenders: dict[str, Run] = {"dense": lambda x=x: layer(x), "dense, oneDNN": prepared(layer, x)}
            contenders |= {name: lambda form=form, x=x: form(x) for name, form in forms.items()}
            if batch <= _MOST_FOR_RIVALS:
                contenders |= rivals_of(layer, x)
            found = compare(take_turns(contenders, options.rounds if batch < 64 else 5), "dense")
            show(f"fc6, batch {batch}", found)
            results["fc6"][batch] = found
        results["fc6_bytes"] = {name: form.weight_bytes for name, form in forms.items()}
        results["fc6_bytes"]["dense"] = layer.weight.nbytes
        for channels, pixels in CONVOLUTIONS:
            convolution = nn.Conv2d(channels, channels, 3, padding=1)
            x = torch.randn(1, channels, pixels, pixels)
            contenders = {"dense": lambda x=x, layer=convolution: layer(x)}
            contenders |= {
                name: lambda form=form, x=x: form(x) for name, form in forms_of(convolution, DENSITIES).items()
            }
            found = compare(take_turns(contenders, options.rounds), "dense")
            show(f"3x3, {channels} channels, {pixels} x {pixels} pixels, batch 1", found)
            results["convolutions"][f"{channels} x {pixels} x {pixels}"] = found
    if options.save:
        Path("benchmarks/results/running_small.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
