"""Measured costs on disk, one file per machine and version, under the user's cache folder.

A cache is a convenience: one that cannot be read is measured anew, one that cannot be written is reported and left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import warnings
from pathlib import Path

import torch

from undertow.ir.cost import Cost

MAX_FILE_BYTES = 64 << 20  # a file from elsewhere is not read without end
MAX_COSTS = 1 << 16  # inputs that change shape at every step would fill the disk
# An hour in nanoseconds, 4 TiB: more was not measured here. The planner adds up such numbers in 64 bits.
MAX_AMOUNT = 1 << 42
# Raised where a kernel of our own comes to take another time or workspace: older measurements are left aside.
KERNELS = 3


def cache_path(device: torch.device) -> Path:
    """The file for this machine, device, number of threads, version of PyTorch and our kernels."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    identity = f"{name}|{torch.get_num_threads()}|{torch.__version__}|{KERNELS}"
    return Path(root) / "undertow" / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("model name")).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_costs(path: Path) -> dict[str, Cost]:
    """The costs in a file; none if there is no such file, or anything in it that was not written here."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return {}
        data = json.loads(path.read_text())
        if not all(_is_amount(amount) for pair in data.values() for amount in pair):
            return {}
        return {key: Cost(duration, workspace) for key, (duration, workspace) in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _is_amount(amount: object) -> bool:
    return type(amount) is int and 0 <= amount <= MAX_AMOUNT


def save_costs(path: Path, costs: dict[str, Cost]) -> None:
    """Write a new file and rename it, so that a reader never sees half of one; the latest costs come last."""
    kept = list(costs.items())[-MAX_COSTS:]
    text = json.dumps({key: (cost.duration_ns, cost.workspace_bytes) for key, cost in kept})
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text)
        os.replace(fresh, path)
    except OSError as error:
        warnings.warn(f"measured costs could not be kept in {path}: {error}; planning goes on", stacklevel=2)
        with contextlib.suppress(OSError):
            fresh.unlink()
