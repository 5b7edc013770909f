"""Every convolution algorithm on the layers of a network, pass by pass, beside PyTorch's own in both layouts.

Times are of the convolution with bias alone: no ReLU and no mask on either side. All take turns, round by round;
minimum and median are reported. PyTorch allocates its results, so malloc's thresholds are raised for the whole process:
its memory is then mapped already, as ours is. The machine's best product, measured in the same run, is in the file too.
With --one-thread the time is processor time of one thread, which other jobs on the machine hardly change.

Usage: scripts/bench convolution_layers [--network vgg16|resnet50|unet] [--batch N] [--rounds N] [--all]
       [--one-thread] [--out F]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from undertow.kernels.convolution import ALGORITHMS, Algorithm, ConvolutionShape, Pass

MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**28),
}  # fmt: skip
# In channels, out channels, size, and how often the network has the layer; all 3 x 3 with padding 1.
LAYERS = {
    "vgg16": [
        (3, 64, 224, 1), (64, 64, 224, 1), (64, 128, 112, 1), (128, 128, 112, 1), (128, 256, 56, 1), (256, 256, 56, 2),
        (256, 512, 28, 1), (512, 512, 28, 2), (512, 512, 14, 3),
    ],
    "resnet50": [(64, 64, 56, 3), (128, 128, 28, 3), (256, 256, 14, 5), (512, 512, 7, 2)],
    "unet": [
        (1, 32, 256, 1), (32, 32, 256, 2), (32, 64, 128, 1), (64, 64, 128, 2), (64, 128, 64, 1), (128, 128, 64, 2),
        (128, 256, 32, 1), (256, 256, 32, 1), (256, 128, 64, 1), (128, 64, 128, 1), (64, 32, 256, 1),
    ],
}  # fmt: skip
# The slowest two are measured in one round only: they take minutes on a large layer.
SLOW = {"plain loops", "fft"}
MAX_WORKSPACE_BYTES = 4 * 2**30


def make_calls(shape: ConvolutionShape, algorithms: list[Algorithm]) -> dict[tuple[str, str], Callable[[], Any]]:
    """One call per algorithm and pass; PyTorch's calls have the names of the two layouts."""
    weight, bias = torch.randn(shape.weight_shape), torch.randn(shape.out_channels)
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    geometry = shape.stride, shape.padding, shape.dilation
    for name, layout in (("oneDNN NHWC", torch.channels_last), ("oneDNN NCHW", torch.contiguous_format)):
        x = torch.randn(shape.x_shape).contiguous(memory_format=layout)
        ct = torch.randn(shape.out_shape).contiguous(memory_format=layout)

        def backward(wanted: list[bool], x: torch.Tensor = x, ct: torch.Tensor = ct) -> Any:
            return torch.ops.aten.convolution_backward(
                ct, x, weight, [shape.out_channels], *geometry, False, (0, 0), shape.groups, wanted
            )

        calls[name, "forward"] = lambda x=x: torch.nn.functional.conv2d(x, weight, bias, *geometry, shape.groups)
        calls[name, "backward data"] = lambda backward=backward: backward([True, False, False])
        calls[name, "backward weight"] = lambda backward=backward: backward([False, True, True])
    x = torch.randn(shape.x_shape).contiguous(memory_format=torch.channels_last)
    out, ct = (torch.randn(shape.out_shape).contiguous(memory_format=torch.channels_last) for _ in range(2))
    ct_x, ct_weight, ct_bias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    for algorithm in algorithms:
        # All three passes share one workspace.
        num_bytes = max(algorithm.workspace_bytes(shape, step) for step in Pass)
        if algorithm.refusal(shape) is not None or num_bytes > MAX_WORKSPACE_BYTES:
            continue
        space = torch.empty(num_bytes, dtype=torch.uint8)
        calls[algorithm.name, "forward"] = lambda a=algorithm, s=space: a.forward(shape, x, weight, out, s, bias=bias)
        calls[algorithm.name, "backward data"] = lambda a=algorithm, s=space: a.backward_data(
            shape, ct, weight, ct_x, s
        )
        calls[algorithm.name, "backward weight"] = lambda a=algorithm, s=space: a.backward_weight(
            shape, ct, x, ct_weight, s, ct_bias=ct_bias
        )
    return calls


def measure_layer(
    shape: ConvolutionShape, algorithms: list[Algorithm], num_rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Minimum and median of every call, in milliseconds."""
    calls = make_calls(shape, algorithms)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for index in range(num_rounds + 1):
        for key, call in calls.items():
            if key[0] in SLOW and index > 1:
                continue
            start = clock()
            call()
            # The first round compiles and maps memory.
            if index > 0:
                times[key].append(1e3 * (clock() - start))
    found: dict[str, Any] = {}
    for (name, step), values in times.items():
        found.setdefault(name, {})[step] = {
            "min_ms": round(min(values), 3),
            "median_ms": round(statistics.median(values), 3),
        }
    for algorithm in algorithms:
        if algorithm.name in found:
            found[algorithm.name]["workspace_bytes"] = {
                step.value: algorithm.workspace_bytes(shape, step) for step in Pass
            }
        else:
            reason = algorithm.refusal(shape) or "its workspace exceeds 4 GiB"
            found[algorithm.name] = {"refusal": reason}
    return found


def measure_peak(clock: Callable[[], float]) -> float:
    """GFLOP/s of the best of a few products: what the machine reaches at this moment."""
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = 0.0
    for _ in range(10):
        start = clock()
        torch.nn.functional.linear(a, b)
        best = max(best, 2 * 2048**3 / (clock() - start) / 1e9)
    return best


def print_layer(title: str, found: dict[str, Any]) -> None:
    """Print a line per algorithm: minimum and median of each pass, and the speedup over the better of PyTorch's two."""
    print(title)
    peers = [found[name] for name in ("oneDNN NHWC", "oneDNN NCHW")]
    for name, entry in found.items():
        if "refusal" in entry:
            print(f"    {name:22} refused: {entry['refusal']}")
            continue
        cells = []
        for step in (step.value for step in Pass):
            best = min(peer[step]["min_ms"] for peer in peers)
            mine = entry[step]
            cells.append(f"{step} {mine['min_ms']:8.2f} ({mine['median_ms']:8.2f}) ms {best / mine['min_ms']:5.2f}x")
        print(f"    {name:22} " + "   ".join(cells), flush=True)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums over all layers, each as often as it occurs: PyTorch's two, and the best algorithm per layer and pass.

    The first layer's input needs no cotangent.
    """
    totals: dict[str, Any] = {}
    for statistic in ("min_ms", "median_ms"):
        sums = {"oneDNN NHWC": 0.0, "oneDNN NCHW": 0.0, "best per layer and pass": 0.0}
        for index, row in enumerate(rows):
            entries = {name: entry for name, entry in row["found"].items() if "refusal" not in entry}
            for step in (step.value for step in Pass):
                if index == 0 and step == "backward data":
                    continue
                for name in ("oneDNN NHWC", "oneDNN NCHW"):
                    sums[name] += row["count"] * entries[name][step][statistic]
                sums["best per layer and pass"] += row["count"] * min(
                    entry[step][statistic] for entry in entries.values()
                )
        best_peer = min(sums["oneDNN NHWC"], sums["oneDNN NCHW"])
        totals[statistic] = {name: round(value, 1) for name, value in sums.items()} | {
            "speedup": round(best_peer / sums["best per layer and pass"], 2)
        }
    return totals


def main() -> None:
    """Measure the layers, print the table, write it as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=sorted(LAYERS), default="vgg16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--all", action="store_true", help="also the plain loops and the FFT, in one round")
    parser.add_argument("--one-thread", action="store_true", help="processor time of one thread")
    parser.add_argument("--out")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):
        # glibc reads them when the process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    clock = time.process_time if options.one_thread else time.perf_counter
    if options.one_thread:
        torch.set_num_threads(1)
    algorithms = [algorithm for algorithm in ALGORITHMS if options.all or algorithm.name not in SLOW]
    machine, rows = describe_machine(), []
    machine["peak_gflops"] = round(measure_peak(clock), 1)
    for num_in, num_out, size, count in LAYERS[options.network]:
        shape = ConvolutionShape(options.batch, num_in, num_out, (size, size), (3, 3), padding=(1, 1))
        found = measure_layer(shape, algorithms, options.rounds, clock)
        title = f"{num_in} -> {num_out} at {size} x {size}, batch {options.batch}, {shape.flops / 1e9:.1f} GFLOP"
        print_layer(title, found)
        rows.append({"layer": title, "count": count, "gflop": shape.flops / 1e9, "found": found})
    totals = summarize(rows)
    print(json.dumps(totals, indent=1))
    machine["load_at_end"] = os.getloadavg()[0]
    suffix = "_one_thread" if options.one_thread else ""
    name = f"convolution_layers_{options.network}_batch{options.batch}{suffix}.json"
    out = Path(options.out or Path("benchmarks/results") / name)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"machine": machine, "totals": totals, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
