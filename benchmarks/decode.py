"""How fast `.utz` files are read and written, and how small they are, beside general compressors.

Layers of random weights, pruned by magnitude and shared; then all of VGG-16's 138 million weights at the published
densities. Speeds are in MB of the resulting float32 a second of processor time, on one thread: from the bytes of the
file to dense tensors. Each is the median of several runs, with the least and the most.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import lzma
import statistics
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from compressed_networks import VGG16, make_pruned
from machine import describe_machine

from undertow.coding.small_file import SmallFile, pack_small_file
from undertow.coding.tensors import CodedTensor

CASES = [((2048, 2048), density, bits) for density in (0.04, 0.075, 0.15, 0.3) for bits in (5, 8)]
CASES += [((512, 512, 3, 3), density, 8) for density in (0.075, 0.3)]


def speeds(run: Callable[[], Any], num_bytes: int, runs: int) -> dict[str, float]:
    """MB a second of processor time."""
    seconds = []
    for _ in range(runs):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    median = statistics.median(seconds)
    return {
        "mb_per_s": round(num_bytes / median / 1e6, 1),
        "least": round(num_bytes / max(seconds) / 1e6, 1),
        "most": round(num_bytes / min(seconds) / 1e6, 1),
    }


def read_dense(data: bytes) -> list[torch.Tensor]:
    """All tensors of a file, dense."""
    file = SmallFile(data, "net.utz")
    tensors = (file.read(name) for name in file)
    return [tensor.dense() if isinstance(tensor, CodedTensor) else tensor for tensor in tensors]


def main() -> None:
    """Print tables, and write benchmarks/results/decode.json with --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm = pack_small_file({"w": make_pruned((64, 64), 0.3, 5, 0), "b": torch.ones(3)}, {})
    read_dense(warm)
    result: dict[str, Any] = {"layers": [], "machine": describe_machine()}
    for index, (shape, density, bits) in enumerate(CASES):
        tensor = make_pruned(shape, density, bits, index)
        dense = tensor.dense()
        num_bytes = 4 * dense.numel()
        row: dict[str, Any] = {"shape": shape, "density": density, "code_bits": bits, "coders": {}}
        for coder in ("mixed", "huffman"):
            data = pack_small_file({"w": tensor}, {}, coder)
            assert torch.equal(read_dense(data)[0], dense)
            row["coders"][coder] = {
                "ratio": round(num_bytes / len(data), 2),
                "read": speeds(lambda data=data: read_dense(data), num_bytes, arguments.runs),
                "write": speeds(
                    lambda coder=coder, tensor=tensor: pack_small_file({"w": tensor}, {}, coder), num_bytes, 2
                ),
            }
        if bits == 5 or len(shape) > 2:
            row["coders"] |= general(dense, num_bytes, arguments.runs)
        result["layers"].append(row)
        print(f"{shape}, {100 * density} % kept, {bits} bits")
        for name, found in row["coders"].items():
            read = found["read"]
            spread = f"{read['least']} to {read['most']}"
            print(f"  {name:<10} {found['ratio']:>7} times   {read['mb_per_s']:>8} MB/s ({spread})")
    network = {f"{i}.weight": make_pruned(*layer, seed=i) for i, layer in enumerate(VGG16)}
    start = time.process_time()
    data = pack_small_file(network, {})
    write_s = time.process_time() - start
    num_bytes = 4 * sum(tensor.mask.numel() for tensor in network.values())
    del network
    read = speeds(lambda: read_dense(data), num_bytes, 3)
    result["vgg16"] = {
        "file_bytes": len(data),
        "ratio": num_bytes / len(data),
        "write_s": round(write_s, 2),
        "read": read,
    }
    print(f"VGG-16, all layers: {json.dumps(result['vgg16'])}")
    if arguments.save:
        path = Path(__file__).parent / "results" / "decode.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


def general(dense: torch.Tensor, num_bytes: int, runs: int) -> dict[str, Any]:
    """The dense weights by general compressors, and uncompressed."""
    raw = dense.numpy().tobytes()
    buffer = io.BytesIO()
    numpy.save(buffer, dense.numpy())
    found = {"np.load": (len(buffer.getvalue()), lambda: numpy.load(io.BytesIO(buffer.getvalue())))}
    packed = zlib.compress(raw, 9)
    found["zlib 9"] = (len(packed), lambda: zlib.decompress(packed))
    small = lzma.compress(raw, preset=6)
    found["lzma 6"] = (len(small), lambda: lzma.decompress(small))
    if importlib.util.find_spec("zstandard"):
        import zstandard

        standard = zstandard.compress(raw, 19)
        found["zstd 19"] = (len(standard), lambda: zstandard.decompress(standard))
    return {
        name: {"ratio": round(num_bytes / size, 2), "read": speeds(run, num_bytes, runs)}
        for name, (size, run) in found.items()
    }


if __name__ == "__main__":
    main()
