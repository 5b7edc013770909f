"""The kind of processor that a rank computes on. In: /proc/cpuinfo. Out: its name."""

from __future__ import annotations

import platform
from pathlib import Path


def describe_processor() -> str:
    """The kind of processor of this machine: kernels of another may round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
