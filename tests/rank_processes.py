"""Processes that are the ranks of a job, for tests: each runs a function, and says what it returned or raised."""

import atexit
import multiprocessing
import os
import socket

import torch

import undertow as ut
from undertow.passes import reduction

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "undertow", "undertow.models", "undertow.api.sharding"])


def run_rank(function, rank, size, port, results, arguments):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        results.put((rank, function(ut.Mesh(data=size), *arguments)))
    except Exception as error:  # also what is no UndertowError: the test then shows it
        results.put((rank, f"{type(error).__name__}: {error}"))
    atexit._run_exitfuncs()  # as a process of its own does; before Python 3.14 one of multiprocessing does not


def start_ranks(function, size, *arguments):
    """Processes that run `function(mesh, *arguments)`, and the queue of their results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=run_rank, args=(function, rank, size, port, results, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes, results


def run_ranks(function, size, *arguments):
    """What `function` returns or raises on each rank."""
    processes, results = start_ranks(function, size, *arguments)
    found = dict(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [found[rank] for rank in range(size)]


def divide_into_buckets_of(num_bytes):
    """For a rank: buckets of at least so many bytes, whatever was measured, so that there are several."""

    def choose(gradients, sent_share, speed, least_bytes):
        sizes, waiting, kind = [], [], None
        for item in gradients:
            if waiting and (item.kind != kind or sum(waiting) >= num_bytes):
                sizes.append(len(waiting))
                waiting = []
            waiting.append(item.num_bytes)
            kind = item.kind
        return [*sizes, len(waiting)]

    reduction.choose_sizes = choose
