"""The authors' own Deep-Compressed SqueezeNet v1.0, coded again: the same weights bit for bit, in how many bytes.

`compressed_SqueezeNet.net` of songhan/SqueezeNet-Deep-Compression has 675,763 bytes. Beside it: each coder, what its
parts take, the entropy of mask and codes, and general compressors. `deep_cabac.py` codes the same integers by nncodec.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import zlib
from pathlib import Path

import numpy
import torch
from compressed_networks import read_squeezenet
from machine import describe_machine

from undertow.coding.entries import Kind
from undertow.coding.payloads import encode_tensor
from undertow.coding.small_file import SmallFile, pack_small_file
from undertow.coding.tensors import CodedTensor

PUBLISHED_BYTES = 675_763
ENTROPY_BYTES = 539_141


def entropy_bytes(symbols: numpy.ndarray) -> float:
    """Bytes of so many symbols at their entropy, without any table."""
    counts = numpy.bincount(symbols)
    counts = counts[counts > 0]
    return float(-(counts * numpy.log2(counts / counts.sum())).sum() / 8)


def save_integers(tensors: list[CodedTensor], path: Path) -> None:
    """Every weight as a number for `deep_cabac.py`: zero is 0, values are numbered in both directions."""
    arrays = []
    for tensor in tensors:
        dense = tensor.dense().numpy()
        values, ranks = numpy.unique(dense, return_inverse=True)
        arrays.append((ranks.reshape(dense.shape) - numpy.searchsorted(values, 0)).astype(numpy.int32))
    numpy.savez(path, *arrays)


def main() -> None:
    """Print a table, and write benchmarks/results/squeezenet.json with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--integers", type=Path, help="also write mask and codes as integers, for deep_cabac.py")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    tensors = read_squeezenet(arguments.path)
    coded = [tensor for tensor in tensors.values() if isinstance(tensor, CodedTensor)]
    if arguments.integers:
        save_integers(coded, arguments.integers)
    floats = sum(4 * 256 + 4 * tensor.shape[0] for tensor in coded)
    masks = sum(entropy_bytes(tensor.mask.reshape(-1).numpy().astype(int)) for tensor in coded)
    codes = sum(entropy_bytes(tensor.codes.numpy()) for tensor in coded)
    rows: dict[str, int] = {"as published": PUBLISHED_BYTES, "entropy of mask and codes": round(masks + codes) + floats}
    parts: dict[str, dict[str, int]] = {}
    for coder in ("huffman", "mixed"):
        data = pack_small_file(tensors, {}, coder)
        file = SmallFile(data, "net.utz")
        for name, tensor in tensors.items():
            read = file.read(name)
            dense = [t.dense() if isinstance(t, CodedTensor) else t for t in (tensor, read)]
            if not torch.equal(dense[0].view(torch.int32), dense[1].view(torch.int32)):
                raise SystemExit(f"{name} was not read as it was written")
        rows[f".utz, {coder}"] = len(data)
        sizes = [entry for entry in file.entries.values() if entry.kind is not Kind.DENSE]
        parts[coder] = {
            "mask or gaps": sum(entry.sizes[0] for entry in sizes),
            "codes": sum(entry.sizes[1] for entry in sizes),
            "codebooks": sum(entry.sizes[2] for entry in sizes),
            "biases": sum(entry.payload_bytes for entry in file.entries.values() if entry.kind is Kind.DENSE),
        }
        parts[coder]["header and sums"] = len(data) - sum(parts[coder].values())
    dense_bytes = b"".join(
        (tensor.dense() if isinstance(tensor, CodedTensor) else tensor).numpy().tobytes() for tensor in tensors.values()
    )
    rows["dense float32, zlib 9"] = len(zlib.compress(dense_bytes, 9))
    rows["dense float32, lzma 9"] = len(lzma.compress(dense_bytes, preset=9 | lzma.PRESET_EXTREME))
    ours = sum(sum(encode_tensor("w", tensor, "mixed")[0].sizes[:2]) for tensor in coded)
    rows["mask and codes alone, mixed"] = ours
    for name, size in rows.items():
        print(f"{name:<34}{size:>12,}{100 * size / PUBLISHED_BYTES:>8.1f} %")
    print(json.dumps(parts, indent=1))
    if arguments.save:
        result = {"bytes": rows, "parts": parts, "machine": describe_machine()}
        path = Path(__file__).parent / "results" / "squeezenet.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(
        not (rows[".utz, mixed"] < ENTROPY_BYTES and math.isclose(masks + codes + floats, ENTROPY_BYTES, abs_tol=1))
    )


if __name__ == "__main__":
    main()
