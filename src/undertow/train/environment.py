"""What the bits of a run depend on besides its config: PyTorch, machine, threads, the kind of device."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from undertow.train.checkpoint import Checkpoint
from undertow.train.config import TrainConfig
from undertow.train.devices import choose_device


def describe_device(device: torch.device) -> str:
    """`cpu`, or a GPU by its name: its kernels decide on bits."""
    return "cpu" if device.type == "cpu" else f"{device.type}: {torch.cuda.get_device_name(device)}"


def describe_environment(device: torch.device) -> dict[str, Any]:
    """The environment of this process, as plain data."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "num_threads": torch.get_num_threads(),
        "device": describe_device(device),
    }


def use_threads(config: TrainConfig) -> None:
    """Run on as many threads as a new run asks for. Shards share the cores, however many ranks compute them, and so do
    workers that share parameters.
    """
    num_sharing = max(config.shards or 1, config.mesh.hogwild)
    if config.threads is not None or num_sharing > 1 or config.shards is not None:
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.threads or max(1, num_cores // num_sharing))


def use_same_threads(checkpoint: Checkpoint) -> None:
    """Run on as many threads as the run began with: sums round differently on another number of threads."""
    torch.set_num_threads(checkpoint.about["environment"]["num_threads"])


def find_kind(checkpoint: Checkpoint) -> str:
    """The kind of device that a run was begun on; runs before there was a choice were on the CPU."""
    return str(checkpoint.about["environment"].get("device", "cpu")).partition(":")[0]


def find_same_device(checkpoint: Checkpoint, chosen: torch.device) -> torch.device:
    """The device on which a run goes on: of the kind that it was begun on, since others round differently."""
    kind = find_kind(checkpoint)
    return chosen if kind == chosen.type else choose_device(kind)
