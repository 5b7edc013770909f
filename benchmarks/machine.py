"""What a result depends on apart from the code: machine, versions, commit, load."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, versions, commit and the load when the run began."""
    processor = platform.processor()
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = [line for line in information.read_text().splitlines() if line.startswith("model name")]
        processor = lines[0].partition(":")[2].strip() if lines else processor
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "processor": processor,
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
        "load_at_start": os.getloadavg()[0],
    }
