"""Measured costs on disk, one file per machine and version, under the user's cache folder.

A cost in the file is never changed: a process that measures it a second time uses the cost in the file. So plans of
other processes and later days are made from the same numbers, and state the same least memory. Processes that share
the file take turns, with a lock file beside it. A process also remembers what it measured itself.

Nothing depends on the cache. If it cannot be read, costs are measured again. If it cannot be written, there is a
warning, and planning goes on.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from undertow.cache import cache_folder, warn_of_no_cache, write_whole
from undertow.ir.cost import Cost, read_cost

MAX_FILE_BYTES = 64 << 20  # a larger file was not written here, and is not read
MAX_COSTS = 1 << 16  # otherwise inputs that change shape at every step would fill the disk
LOCK_TIMEOUT_S = 10.0  # reading and writing the largest file takes a second
# Raised when one of our kernels changes its time or its workspace: older measurements are then ignored.
KERNELS = 3


def cache_path(device: torch.device) -> Path:
    """The file for this machine, device, number of threads, version of PyTorch and our kernels."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    identity = f"{name}|{torch.get_num_threads()}|{torch.__version__}|{KERNELS}"
    return cache_folder() / f"costs-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


def processor_name() -> str:
    """The line of the processor's name in /proc/cpuinfo, or what the system calls it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line for line in lines if line.startswith("model name")).strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


_REMEMBERED: dict[Path, dict[str, Cost]] = {}


def load_costs(path: Path) -> dict[str, Cost]:
    """The costs in a file, and those that this process kept or tried to keep there."""
    return _REMEMBERED.get(path, {}) | _read(path)


def keep_costs(path: Path, measured: dict[str, Cost]) -> dict[str, Cost]:
    """Add what was measured to a file. Returns, for the same operations, the costs to use from now on."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
            costs = _add_new(load_costs(path), measured)
            _write(path, costs)
    except (OSError, Timeout, NotImplementedError) as error:
        warn_of_no_cache(path.parent, getattr(error, "strerror", None) or str(error))
        costs = _add_new(load_costs(path), measured)
    found = {key: costs[key] for key in measured}
    _REMEMBERED.setdefault(path, {}).update(found)
    return found


def _add_new(known: dict[str, Cost], measured: dict[str, Cost]) -> dict[str, Cost]:
    return known | {key: cost for key, cost in measured.items() if key not in known}


def _read(path: Path) -> dict[str, Cost]:
    """The costs in a file; none if there is no such file, or if it holds anything that was not written here."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return {}
        data = json.loads(path.read_text())
        return {key: read_cost(pair) for key, pair in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _write(path: Path, costs: dict[str, Cost]) -> None:
    """Write the costs, the latest last."""
    kept = list(costs.items())[-MAX_COSTS:]
    text = json.dumps({key: (cost.duration_ns, cost.workspace_bytes) for key, cost in kept})
    write_whole(path, text.encode())
