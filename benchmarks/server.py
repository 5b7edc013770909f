#!/usr/bin/env python3
"""The parameter server: recovery, rates beside plain servers, a slow worker, many kills, loss against delay.

Out: benchmarks/results/server.json.

    recovery     a primary is killed under load: until its backup has the part, and until batches go on
    rates        pushes a second beside one actor as in Ray's example, and beside torch.distributed.rpc, in turns
    straggler    one worker at a quarter of a core (a quota of cgroups, which needs root)
    soak         kills of workers, primaries and backups, and what is left
    convergence  `undertow train` with several delays and seeds

Usage: scripts/bench server [--only NAME ...] [--rounds N] [--kills N] [--batches N] [--data FOLDER] [--model NAME]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from server_jobs import WIDTH, EagerComputing, PlainServer, PlainWorker, make_model, run_rpc

from undertow.server.cluster import running_cluster
from undertow.server.job import JobDescription
from undertow.server.parts import cut, divide_parameters
from undertow.server.rules import Rules
from undertow.server.service import Service, Size, new_namespace
from undertow.server.state import State
from undertow.server.tensors import PARAMETER, OptimizerSettings

RESULTS = Path(__file__).resolve().parent / "results" / "server.json"
RATE = 0.01


@contextmanager
def job(ray: Any, size: Size, max_delay: float, pause_s: float = 0.0) -> Iterator[Service]:
    """A server with its workers."""
    model = make_model()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(parameters.values(), lr=RATE, momentum=0.9)
    names = {id(parameter): name for name, parameter in parameters.items()}
    parts = divide_parameters(parameters, size.servers)
    rules = Rules(("controller-0", "controller-1", "controller-2"), max_delay, size.workers)
    described = JobDescription(new_namespace(), rules, parts, OptimizerSettings.of(optimizer, names))
    service = Service(ray, described, size, partial(EagerComputing, WIDTH, pause_s), lambda line: None, 20.0)
    try:
        service.start([{PARAMETER: cut(parameters, part).numpy()} for part in parts], [State()] * len(parts))
        service.wait_for_workers()
        yield service
    finally:
        service.stop()


def train(service: Service, numbers: range, note: Callable[[dict[str, Any]], None] = lambda result: None) -> float:
    """Seconds for these batches."""

    def go_on(result: dict[str, Any]) -> bool:
        note(result)
        return True

    start = time.monotonic()
    service.train(numbers, lambda number: (RATE,), go_on)
    return time.monotonic() - start


def spread(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def measure_recovery(ray: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """From the kill of a primary until its backup has the part, and the longest gap between two batches."""
    taken, gaps = [], []
    for _ in range(arguments.rounds):
        with job(ray, Size(2, 2, 2), 8) as service:
            killed: list[float] = []
            times: list[float] = []

            def note(
                result: dict[str, Any], service: Service = service, killed: Any = killed, times: Any = times
            ) -> None:
                times.append(time.monotonic())
                if len(times) == arguments.batches // 2:
                    killed.append(time.monotonic())
                    os.kill(service.pids["server-0"], signal.SIGKILL)

            train(service, range(arguments.batches), note)
            _, epochs = ray.get(service.servers["server-1"].counts.remote())
            taken.append(
                min(when for part, when, known in epochs if part == 0 and known.primary == "server-1") - killed[0]
            )
            gaps.append(
                max(after - before for before, after in zip(times, times[1:], strict=False) if after > killed[0])
            )
    return {"taken_over_s": spread(taken), "longest_gap_s": spread(gaps)}


def measure_rates(ray: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Batches a second of two workers, in turns."""
    found: dict[str, list[float]] = {}
    count = arguments.batches
    for _ in range(arguments.rounds):
        for name, replicas in (("two servers, two copies", 2), ("two servers, one copy", 1)):
            with job(ray, Size(2, 2, replicas), math.inf) as service:
                train(service, range(20))
                found.setdefault(name, []).append(count / train(service, range(20, 20 + count)))
        server = ray.remote(num_cpus=0)(PlainServer).remote(WIDTH)
        workers = [ray.remote(num_cpus=0)(PlainWorker).remote(server, WIDTH) for _ in range(2)]
        ray.get([worker.run.remote(0, 10) for worker in workers])
        start = time.monotonic()
        ray.get([worker.run.remote(1000 * place, count // 2) for place, worker in enumerate(workers)])
        found.setdefault("one actor, no copy", []).append(count / (time.monotonic() - start))
        for actor in (*workers, server):
            ray.kill(actor)
        found.setdefault("torch.distributed.rpc, no copy", []).append(_rate_of_rpc(2, count // 2))
    return {name: spread(values) for name, values in found.items()}


def _rate_of_rpc(num_workers: int, num_batches: int) -> float:
    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seconds = context.Array("d", num_workers)
    rest = (port, num_workers, num_batches, seconds)
    processes = [context.Process(target=run_rpc, args=(rank, *rest)) for rank in range(num_workers + 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return num_workers * num_batches / max(seconds)


@contextmanager
def quota(pid: int, share: float) -> Iterator[None]:
    """A process at a share of one core."""
    folder = Path("/sys/fs/cgroup") / ("" if Path("/sys/fs/cgroup/cgroup.procs").exists() else "cpu") / f"slow{pid}"
    folder.mkdir()
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text(f"{int(share * 100_000)} 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(int(share * 100_000)))
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (folder.parent / "cgroup.procs").write_text(str(pid))
        folder.rmdir()


def measure_straggler(ray: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Batches a second of two workers, and with one of them at a quarter of a core, for several delays."""
    found = {}
    for delay in (0, 8, math.inf):
        with job(ray, Size(2, 2, 1), delay) as service:
            train(service, range(20))
            even = arguments.batches / train(service, range(20, 20 + arguments.batches))
            first = 20 + arguments.batches
            with quota(next(iter(service.workers.values())).pid, 0.25):
                slow = arguments.batches / train(service, range(first, first + arguments.batches))
        found[str(delay)] = {
            "even_per_s": round(even, 1),
            "one_slow_per_s": round(slow, 1),
            "ratio": round(slow / even, 3),
        }
    return found


def measure_soak(ray: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Kills of anybody, one after the other, each when all copies are there again."""
    draw = random.Random(0)
    kills: dict[str, int] = {"worker": 0, "primary": 0, "backup": 0}
    with job(ray, Size(2, 3, 2), 8, 0.002) as service:
        first, losses = 0, []
        while sum(kills.values()) < arguments.kills:
            train(service, range(first, first + 40), lambda result: losses.append(result["loss"]))
            first += 40
            memberships = [service.courier.look(part).result() for part in range(len(service.job.parts))]
            if any(len(item.members) < 2 for item in memberships):
                continue
            kind = draw.choice(list(kills))
            membership = draw.choice(memberships)
            if kind == "worker":
                pid = draw.choice(list(service.workers.values())).pid
            else:
                name = membership.members[kind == "backup"]
                pid = ray.get(service.servers[name].pid.remote())
            if pid:
                os.kill(pid, signal.SIGKILL)
                kills[kind] += 1
        train(service, range(first, first + 40))
        first += 40
        numbers = [
            sorted(push.number for _, pushes in service.read_log(part, 0) for push in pushes)
            for part in range(len(service.job.parts))
        ]
        hashes: dict[int, set[str]] = {}
        for copies in ray.get([server.hashes.remote() for server in service.servers.values()]):
            for part, (_, sha256) in copies.items():
                hashes.setdefault(part, set()).add(sha256)
    return {
        "kills": kills,
        "batches": first,
        "every_batch_once_in_every_part": all(found == list(range(first)) for found in numbers),
        "copies_are_equal": all(len(found) == 1 for found in hashes.values()),
        "loss_of_the_last_40": round(statistics.mean(losses[-40:]), 4),
    }


def measure_convergence(ray: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Test loss and accuracy after the same epochs."""
    found: dict[str, Any] = {}
    for delay in ("0", "2", "8", "free"):
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                words = ["train", arguments.model, "--data", arguments.data, "--epochs", str(arguments.epochs)]
                words += ["--parallel", "server", "--workers", "2", "--max-delay", delay, "--seed", str(seed), "--json"]
                command = [sys.executable, "-m", "undertow", *words, "--out", f"{folder}/run"]
                done = subprocess.run(command, capture_output=True, text=True)
                result = json.loads(done.stdout) if not done.returncode else {"error": done.stderr[-300:]}
                found.setdefault(delay, []).append(result)
    return found


MEASURES = {
    "recovery": measure_recovery,
    "rates": measure_rates,
    "straggler": measure_straggler,
    "soak": measure_soak,
    "convergence": measure_convergence,
}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--model", default="vgg_small")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # Ray's processes import what they are given
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = describe_machine()
    for name in arguments.only:
        if name == "convergence":
            results[name] = measure_convergence(None, arguments)
        else:
            with running_cluster(None, 1 << 28, 4) as ray:
                results[name] = MEASURES[name](ray, arguments)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
