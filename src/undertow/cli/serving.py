"""`undertow train --parallel server`: a cluster of Ray, and a run whose workers push to a parameter server on it.

In: the options. Out: the result. What a worker does first, in its own process, is here as well: it loads model and data
by the names that the options have, as any run does.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from undertow.cli.loading import running
from undertow.cli.training import train
from undertow.cli.workloads import load_user_code, load_workload
from undertow.errors import CallError
from undertow.server.cluster import running_cluster
from undertow.train.computing import BatchComputing, Numbering
from undertow.train.config import SERVER, TrainConfig
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.initial_weights import freeze, load_initial
from undertow.train.job import Job
from undertow.train.optimizing import make_optimizer
from undertow.train.replaying import Replayed, replay
from undertow.train.result import TrainResult
from undertow.train.run import make_objective
from undertow.train.served import ServedRun, numbering_of

STORE_BYTES = 1 << 30  # for what is on its way between processes


def train_served(settings: TrainConfig, is_resumed: bool) -> TrainResult:
    """Train to the end, or until a signal."""
    with running_cluster(settings.cluster, STORE_BYTES) as ray, _ended(ray) as make_run:
        return train(replace(settings, device="cpu"), is_resumed, Job(), make_run)


def replay_run(path: Path) -> Replayed:
    """Do the updates of a run again, in this process."""
    folder = RunFolder(path)
    config = folder.read_config()
    if config.parallel != SERVER:
        raise CallError(f"{path} is no run with a parameter server, and has no log of pushes to replay")
    checkpoint = folder.read_checkpoint()
    with running(f"replaying {path}"):
        workload = load_workload(config)
        if config.init is not None:
            load_initial(workload.model, Path(config.init))
        numbering = numbering_of(config, len(Feed(workload.train_loader, config.seed)))
        computing = make_computing(config, numbering)
        freeze(workload.model, config.freeze or ())
        optimizer = make_optimizer(config, workload.model)
        return replay(config, computing, workload.model, optimizer, checkpoint, path)


@contextmanager
def _ended(ray: Any) -> Any:
    """A run on this cluster; its processes end with the block."""
    made: list[ServedRun] = []

    def make_run(config: TrainConfig, *args: Any) -> ServedRun:
        run = ServedRun(config, *args)
        run.serve_by(ray, lambda numbering: partial(make_computing, config, numbering))
        made.append(run)
        return run

    try:
        yield make_run
    finally:
        for run in made:
            run.stop()


def make_computing(config: TrainConfig, numbering: Numbering) -> BatchComputing:
    """What a worker computes with, in its process."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.threads or max(1, num_cores // config.workers))
    code = load_user_code(config)
    workload = load_workload(config)
    freeze(workload.model, config.freeze or ())
    device = torch.device("cpu")
    objective = make_objective(config, workload.is_sequence, workload.class_weights, device, code.loss)
    if numbering.is_synchronous:
        # Each batch counts by its share of the update, which is a sum then: as the shards of a batch do.
        objective = replace(objective, accumulate=numbering.round_size)
    return BatchComputing(config, workload, objective, numbering)
