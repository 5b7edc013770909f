"""The time to write and to read a checkpoint of several ranks, beside `torch.distributed.checkpoint`, in turns.

In: a network and its optimizer, the same on all ranks, each pinned to a core. Out: seconds of each way in each round:
ours, in parts; `torch.distributed.checkpoint`, told to sync its files; and `torch.save` by rank 0, synced. All write
into one folder on one disk, and a round ends when all ranks have. Ours also hashes what it writes and reads.

Usage: scripts/bench rank_checkpoints [--ranks N] [--rounds N] [--folder DIR] [--out F]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from torch import distributed
from torch.distributed import checkpoint as dcp
from turns import compare, show

import undertow as ut
from undertow.models import ZOO
from undertow.ranks.ranks import join
from undertow.train.checkpoint import Checkpoint, Progress, collect_tensors, load_checkpoint, save_in_parts
from undertow.train.job import Job

CPU = torch.device("cpu")
WORKLOADS = ("resnet50", "vgg_small")


def make_state(workload: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A network with an optimizer that has made a step."""
    torch.manual_seed(0)
    model = ZOO[workload].build()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def make_ways(workload: str, folder: Path, job: Job) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """For each way: writes, and reads."""
    model, optimizer = make_state(workload)
    tensors = collect_tensors(model, optimizer, {}, CPU)
    state = dict(tensors)
    about = {"environment": {"num_threads": 1}}
    for name in ("ours", "dcp", "torch"):
        (folder / name).mkdir(exist_ok=True)
    own, plain = folder / "ours" / "checkpoint.safetensors", folder / "torch" / "state.pt"

    def write_by_torch() -> None:
        if job.is_first:
            with open(plain, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

    def write_by_dcp() -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True, overwrite=True))

    return {
        "torch.distributed.checkpoint": (
            write_by_dcp,
            lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(folder / "dcp")),
        ),
        "ours": (
            lambda: save_in_parts(own, Checkpoint(tensors, Progress(), about), job),
            lambda: load_checkpoint(own),
        ),
        "torch.save by rank 0": (write_by_torch, lambda: torch.load(plain, weights_only=True)),
    }


def serve(workload: str, folder: Path, num_rounds: int) -> None:
    """One rank: all ways in turns. Rank 0 prints the milliseconds."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    job = Job(join(ut.Mesh(data=distributed.get_world_size())))
    ways = make_ways(workload, folder, job)
    times: dict[str, dict[str, list[float]]] = {
        "write": {name: [] for name in ways},
        "read": {name: [] for name in ways},
    }
    for number in range(num_rounds + 1):
        for place, what in enumerate(times):
            for name, acts in ways.items():
                distributed.barrier()
                start = time.perf_counter()
                acts[place]()
                distributed.barrier()
                if number:
                    times[what][name].append(1e3 * (time.perf_counter() - start))
    if rank == 0:
        print(json.dumps(times))


def measure(workload: str, num_ranks: int, num_rounds: int, folder: Path) -> dict[str, Any]:
    """Start the ranks, and compare what rank 0 has found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, __file__, "--serve", workload, "--rounds", str(num_rounds), "--folder", str(folder)]
    ranks = [
        subprocess.Popen(
            words,
            env=os.environ | where | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    found = {}
    for what, times in json.loads(outputs[0]).items():
        found[what] = compare(times, "torch.distributed.checkpoint")
        show(f"{workload}, {num_ranks} ranks: {what}", found[what])
    return found


def main() -> None:
    """Compare for some networks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is written to")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rank_checkpoints.json"))
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.rounds)
        return
    results: dict[str, Any] = {"machine": describe_machine(), "ranks": options.ranks, "cases": {}}
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results["cases"][workload] = measure(workload, options.ranks, options.rounds, Path(folder))
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
