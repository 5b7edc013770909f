"""How much memory a process may still take: of the machine, of each container around it, or of a GPU.

In: nothing, or a device. Out: bytes, and what limits them. Linux counts a container's file cache as its memory; the
part that it would give up first is counted as free. Elsewhere the system's own figure is taken, if it has one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # asked before PyTorch is imported, too: there may be no room for it
    import torch

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # containers without a limit give a number beyond this


@dataclass(frozen=True)
class FreeMemory:
    """`limit_bytes` is what there is in all."""

    free_bytes: int
    limit_bytes: int
    where: str  # "the machine", "the container", the name of a GPU


def find_free_memory(device: torch.device | None = None) -> FreeMemory:
    """What is free on the device, or for this process where none is given or it is the CPU."""
    if device is not None and device.type == "cuda":
        import torch

        free_bytes, limit_bytes = torch.cuda.mem_get_info(device)
        return FreeMemory(free_bytes, limit_bytes, torch.cuda.get_device_name(device))
    return min([_machine(), *_containers()], key=lambda found: found.free_bytes)


def _machine() -> FreeMemory:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    limit_bytes = page_bytes * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_bytes = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        names = os.sysconf_names
        free_bytes = page_bytes * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in names else limit_bytes
    return FreeMemory(free_bytes, limit_bytes, "the machine")


def _containers() -> list[FreeMemory]:
    """The limit of each control group that this process is in, of version 2 or 1, the outer ones included."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        elif not controllers:
            root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        # Inside a container the path may be one of the host's; its own group is then the root.
        folders = [folder, *folder.parents[: len(folder.parts) - len(root.parts)]] if folder.is_dir() else [root]
        found += [limit for folder in folders if (limit := _read_limit(folder, *names)) is not None]
    return found


def _read_limit(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> FreeMemory | None:
    try:
        limit, usage = ((folder / name).read_text().strip() for name in (limit_name, usage_name))
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:  # the root of version 2 has no such files
        return None
    if limit == "max" or int(limit) >= UNLIMITED:
        return None
    reclaimable = next((int(line.split()[1]) for line in lines if line.split()[0] == reclaimable_name), 0)
    return FreeMemory(max(0, int(limit) - int(usage) + reclaimable), int(limit), "the container")
