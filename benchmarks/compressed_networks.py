"""Networks to code: the authors' own compressed SqueezeNet, and layers like those of published ones."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from undertow.coding.tensors import CodedTensor

# Input, squeeze and expand channels of fire2 to fire9.
FIRES = (
    (96, 16, 64),
    (128, 16, 64),
    (128, 32, 128),
    (256, 32, 128),
    (256, 48, 192),
    (384, 48, 192),
    (384, 64, 256),
    (512, 64, 256),
)
# Shape, weights kept, bits of a code: VGG-16 as Deep Compression publishes it.
VGG16 = (
    ((64, 3, 3, 3), 0.58, 8),
    ((64, 64, 3, 3), 0.22, 8),
    ((128, 64, 3, 3), 0.34, 8),
    ((128, 128, 3, 3), 0.36, 8),
    ((256, 128, 3, 3), 0.53, 8),
    ((256, 256, 3, 3), 0.24, 8),
    ((256, 256, 3, 3), 0.42, 8),
    ((512, 256, 3, 3), 0.32, 8),
    ((512, 512, 3, 3), 0.27, 8),
    ((512, 512, 3, 3), 0.34, 8),
    ((512, 512, 3, 3), 0.35, 8),
    ((512, 512, 3, 3), 0.29, 8),
    ((512, 512, 3, 3), 0.36, 8),
    ((4096, 25088), 0.04, 5),
    ((4096, 4096), 0.04, 5),
    ((1000, 4096), 0.23, 5),
)


def squeezenet_layers() -> list[tuple[str, tuple[int, int, int, int]]]:
    """Names and shapes, in the order of the file."""
    layers = [("conv1", (96, 3, 7, 7))]
    for number, (inputs, squeeze, expand) in enumerate(FIRES, start=2):
        layers.append((f"fire{number}.squeeze1x1", (squeeze, inputs, 1, 1)))
        layers.append((f"fire{number}.expand1x1", (expand, squeeze, 1, 1)))
        layers.append((f"fire{number}.expand3x3", (expand, squeeze, 3, 3)))
    return [*layers, ("conv10", (1000, 512, 1, 1))]


def read_squeezenet(path: Path) -> dict[str, torch.Tensor | CodedTensor]:
    """The weights and biases of the published file, to its last byte."""
    data = path.read_bytes()
    layers = squeezenet_layers()
    counts = numpy.frombuffer(data, "<u4", len(layers)).tolist()
    at = 4 * len(layers)
    tensors: dict[str, torch.Tensor | CodedTensor] = {}

    def take(dtype: str, num: int) -> numpy.ndarray:
        nonlocal at
        array = numpy.frombuffer(data, dtype, num, at)
        at += array.nbytes
        return array

    for (name, shape), num in zip(layers, counts, strict=True):
        codebook = take("<f4", 256)
        bias = take("<f4", shape[0])
        codes = take("u1", num)
        halves = take("u1", (num + 1) // 2)
        gaps = numpy.stack([halves & 15, halves >> 4], 1).reshape(-1)[:num].astype(numpy.int64)
        dense = numpy.zeros(int(numpy.prod(shape)), numpy.uint8)
        dense[numpy.cumsum(gaps + 1) - 1] = codes
        dense = dense.reshape(shape)
        mask = dense != 0
        tensors[f"{name}.weight"] = CodedTensor(
            shape,
            torch.from_numpy(mask),
            torch.from_numpy(dense[mask].astype(numpy.int32)),
            torch.from_numpy(codebook.copy()),
        )
        tensors[f"{name}.bias"] = torch.from_numpy(bias.copy())
    if at != len(data):
        raise SystemExit(f"{path}: {len(data) - at} bytes are left after the last layer")
    return tensors


def make_pruned(shape: tuple[int, ...], density: float, code_bits: int, seed: int) -> CodedTensor:
    """Random weights, normal, of rows and columns of different scale, pruned by magnitude, shared linearly."""
    generator = numpy.random.default_rng(seed)
    rows = generator.lognormal(0, 0.3, shape[0]).astype(numpy.float32)
    columns = generator.lognormal(0, 0.3, shape[1]).astype(numpy.float32)
    weights = generator.standard_normal(shape, numpy.float32)
    ones = (1,) * (len(shape) - 2)
    weights *= rows.reshape(-1, 1, *ones) * columns.reshape(-1, *ones)
    sample = numpy.abs(weights.reshape(-1)[:: max(1, weights.size // 1_000_000)])
    mask = numpy.abs(weights) > numpy.quantile(sample, 1 - density)
    kept = weights[mask]
    codebook = numpy.linspace(kept.min(), kept.max(), 1 << code_bits, dtype=numpy.float32)
    step = codebook[1] - codebook[0]
    codes = numpy.clip(numpy.rint((kept - codebook[0]) / step), 0, len(codebook) - 1).astype(numpy.int32)
    return CodedTensor(shape, torch.from_numpy(mask), torch.from_numpy(codes), torch.from_numpy(codebook))
