"""Memory of divided parameters beside FSDP2's `fully_shard`, on gloo: a row of layers, AdamW, one shard per rank.

Each contender trains the same model on the same batches, in the same processes, in turns. Peaks are counted by the
allocator: what is there before a step, and the most that it takes in addition. FSDP2 divides each layer by itself and
frees it after the forward pass. Undertow gets FSDP2's peak as its budget, and smaller ones. Weights after the steps are
compared with those of one process that runs the shards one after the other. Times count on a quiet machine with a core
for each rank. Usage: scripts/bench divided [--ranks N] [--layers N] [--width N] [--batch N] [--rounds N]
[--shares 1.0 0.9 ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import undertow as ut
from undertow.hashing import hash_tensors
from undertow.runtime.measure import measure_call

Batch = tuple[torch.Tensor, torch.Tensor]


def make_model(options: argparse.Namespace) -> nn.Sequential:
    """A row of layers, with the same weights each time."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(options.layers)]
    return nn.Sequential(*layers, nn.Linear(options.width, 10))


def make_batch(options: argparse.Namespace) -> Batch:
    """Inputs and labels."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(options.batch, options.width, generator=draw)
    return x, torch.randint(10, (options.batch,), generator=draw)


def make_fsdp(options: argparse.Namespace, rank: int) -> tuple[Callable[[], Any], Callable[[], list[torch.Tensor]]]:
    """A step of FSDP2, and what stays between steps."""
    model = make_model(options)
    mesh = distributed.init_device_mesh("cpu", (options.ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = (item.chunk(options.ranks)[rank] for item in make_batch(options))

    def step() -> None:
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def held() -> list[torch.Tensor]:
        state = [item for entry in optimizer.state.values() for item in entry.values()]
        return [getattr(item, "_local_tensor", item) for item in (*model.parameters(), *state)]

    return step, held


def make_undertow(options: argparse.Namespace, mesh: ut.Mesh | None, **more: Any) -> tuple[Callable[[], Any], Any]:
    """A step of Undertow, and the object."""
    model = make_model(options)
    x, y = make_batch(options)
    settings: dict[str, Any] = {"targets": (y,), "loss": functional.cross_entropy, "shards": options.ranks, **more}
    optimizer = torch.optim.AdamW(model.parameters())
    step = ut.train_step(model, (x,), optimizer=optimizer, parallel=mesh, **settings)
    return lambda: step(x, y), step


def run_rank(rank: int, options: argparse.Namespace, port: int, results: Any) -> None:
    """One rank, with all contenders."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    distributed.init_process_group("gloo")
    mesh, x = ut.Mesh(data=options.ranks), make_batch(options)[0]
    fsdp, held = make_fsdp(options, rank)
    for _ in range(2):
        fsdp()
    batch_bytes = torch.tensor([x.nbytes // options.ranks])
    peaks: dict[str, int] = {"FSDP2": measure_call(fsdp, held()).peak_bytes + int(batch_bytes)}
    whole_bytes = sum(item.nbytes for item in make_model(options).parameters())
    contenders: dict[str, Callable[[], Any]] = {"FSDP2": fsdp}
    steps: dict[str, Any] = {}
    found = torch.tensor([peaks["FSDP2"]])
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    kinds: dict[str, dict[str, Any]] = {"all held": {}, "state divided": {"shard_state": True}}
    for share in options.shares:
        budget = int(int(found) * share)
        kinds[f"{share:g} of FSDP2's peak"] = {"shard_state": True, "budget": budget}
    for name, more in kinds.items():
        contenders[name], step = make_undertow(options, mesh, **more)
        for _ in range(2):
            contenders[name]()
        step.divide_parameters()
        peaks[name] = measure_call(contenders[name], step.persistent_tensors(), make_batch(options)).peak_bytes
        steps[name] = step
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, call in contenders.items():
            distributed.barrier()
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    num_steps = 3 + options.rounds
    hashes = {}
    for name, step in steps.items():
        step.settle()
        hashes[name] = hash_tensors(dict(step.model.named_parameters()))
    plans = {name: list(step.plan.notes) for name, step in steps.items()}
    results.put((rank, {"peaks": peaks, "times": times, "hashes": hashes, "whole_bytes": whole_bytes, "plans": plans}))
    distributed.barrier()
    if rank == 0:
        alone, step = make_undertow(copy.copy(options), None)
        for _ in range(num_steps):
            alone()
        results.put((-1, hash_tensors(dict(step.model.named_parameters()))))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Start the ranks, and print what they found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.9])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=run_rank, args=(rank, options, port, results)) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=3600) for _ in range(options.ranks + 1))
    for process in processes:
        process.join()
    alone, first = found.pop(-1), found[0]
    print(f"all parameters: {first['whole_bytes'] / 2**20:.1f} MiB; {options.ranks} ranks")
    rows = []
    for name in first["peaks"]:
        peak = max(item["peaks"][name] for item in found.values())
        ratios = [own / fsdp for own, fsdp in zip(first["times"][name], first["times"]["FSDP2"], strict=True)]
        bits = "" if name == "FSDP2" else str(all(item["hashes"][name] == alone for item in found.values()))
        rows.append({"name": name, "peak_bytes": peak, "time_ratios": ratios, "has_bits_of_one_process": bits})
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:<26} peak {peak / 2**20:8.2f} MiB   time beside FSDP2 {spread}   bits of one process: {bits}")
        for line in first["plans"].get(name, ()):
            print(f"    {line}")
    if options.out is not None:
        report = {"machine": describe_machine(), "options": {**vars(options), "out": None}, "rows": rows}
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
