"""Products and convolutions of single bits beside float32 ones, on as many threads.

A product is given float32 and gives float32: its time includes packing the signs of the inputs, and scaling the sums.
That of the bits alone, with inputs packed before, stands beside it. Results are compared with the float product of the
signs, bit for bit, before anything is timed. Contenders take turns. Usage: scripts/bench bit_products [--threads 1]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch.nn import functional
from turns import compare, show, take_turns

from undertow.kernels.bit_product import convolve_packed, convolve_signs, pack_filters, pack_images
from undertow.small.binary_layers import row_means, window_means

SIZES = (256, 512, 1024, 2048)
# Channels, pixels, stride and batch: layers of VGG and ResNet, and of a small network.
CONVOLUTIONS = (
    (64, 56, 1, 1), (128, 28, 1, 1), (256, 14, 1, 1), (512, 7, 1, 1), (256, 56, 1, 1), (256, 28, 2, 1),
    (128, 32, 1, 32), (256, 16, 1, 32), (512, 8, 1, 32), (20, 12, 1, 100),
)  # fmt: skip
Run = Callable[[], Any]


def signs(x: torch.Tensor) -> torch.Tensor:
    """Ones and minus ones."""
    return torch.where(x >= 0, 1.0, -1.0)


def products(size: int) -> dict[str, Run]:
    """x w^T of square matrices."""
    x, weight = torch.randn(size, size), torch.randn(size, size)
    filters, scales, bias = pack_filters(weight >= 0), torch.rand(size), torch.randn(size)
    image = x.t()[None, :, None, :]
    ones = torch.ones(size, 1)

    def run_layer() -> torch.Tensor:
        return convolve_signs(image, filters, row_means(x), scales, bias, (1, 1), (0, 0))[0, :, 0].t()

    expected = functional.linear(signs(x), signs(weight)) * row_means(x) * scales + bias
    assert torch.equal(run_layer(), expected)
    packed = pack_images(image, (0, 0))
    return {
        "torch.mm": lambda: torch.mm(x, weight.t()),
        "bits, a layer's product": run_layer,
        "bits, packing and product": lambda: convolve_signs(image, filters, ones, scales, bias, (1, 1), (0, 0)),
        "bits, product alone": lambda: convolve_packed(packed, filters, ones, scales, bias, (1, 1), (0, 0)),
    }


def convolutions(channels: int, pixels: int, stride: int, batch: int) -> dict[str, Run]:
    """3x3 with as many filters as channels, over images whose channels are innermost, as both want them."""
    layout = torch.channels_last
    x = torch.randn(batch, channels, pixels, pixels).contiguous(memory_format=layout)
    weight = torch.randn(channels, channels, 3, 3).contiguous(memory_format=layout)
    filters, scales, bias = pack_filters(weight >= 0), torch.rand(channels), torch.randn(channels)
    steps, pad = (stride, stride), (1, 1)
    means = window_means(x, (3, 3), steps, pad)

    def run_layer() -> torch.Tensor:
        return convolve_signs(x, filters, window_means(x, (3, 3), steps, pad), scales, bias, steps, pad)

    expected = functional.conv2d(signs(x), signs(weight), None, steps, pad) * means * scales[:, None, None]
    assert torch.equal(run_layer(), expected + bias[:, None, None])
    packed = pack_images(x, pad)
    return {
        "conv2d": lambda: functional.conv2d(x, weight, None, steps, pad),
        "bits, a layer": run_layer,
        "bits, packing and product": lambda: convolve_signs(x, filters, means, scales, bias, steps, pad),
        "bits, product alone": lambda: convolve_packed(packed, filters, means, scales, bias, steps, pad),
    }


def main() -> None:
    """Print every comparison, and write them with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results: dict[str, Any] = {"machine": describe_machine(), "products": {}, "convolutions": {}}
    for size in SIZES:
        found = compare(take_turns(products(size), options.rounds), "torch.mm")
        show(f"{size} x {size} x {size}", found)
        results["products"][size] = found
    for channels, pixels, stride, batch in CONVOLUTIONS:
        found = compare(take_turns(convolutions(channels, pixels, stride, batch), options.rounds), "conv2d")
        name = f"{batch} x {channels} x {pixels} x {pixels}, stride {stride}"
        show(f"3x3 on {name}", found)
        results["convolutions"][name] = found
    if options.save:
        path = Path(f"benchmarks/results/bit_products_{options.threads}.json")
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
