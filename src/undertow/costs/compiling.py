"""The planner's loops, compiled in another process: LLVM keeps a hundred MiB of the process in which it has compiled.

In: nothing. Out: nothing; the loops are in Numba's cache, from which this process loads them. It takes as long as
compiling them here. A file in Numba's folder says for which version of the loops this was done.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from undertow.costs.apart import child_environment, is_child
from undertow.kernels.compiler import HAS_NUMBA, numba

ROOMS = ("planner", "memory", "kernels")  # of the loops that every plan with a budget uses


@cache
def compile_apart() -> None:
    """Compile the loops in another process, unless these were compiled before or Numba stores nothing here."""
    package = Path(__file__).parents[1]
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or package / ROOMS[0] / "__pycache__")
    if not HAS_NUMBA or is_child() or not os.access(folder, os.W_OK):
        return
    sources = [path for room in ROOMS for path in sorted((package / room).glob("*.py"))]
    about = [numba.__version__, sys.version, *(f"{path.name} {path.stat().st_mtime_ns}" for path in sources)]
    mark = folder / f"undertow-{hashlib.sha256('|'.join(about).encode()).hexdigest()[:16]}.compiled"
    if not mark.exists():
        command = [sys.executable, "-m", "undertow.measuring_process", "compile"]
        done = subprocess.run(command, env=child_environment(), capture_output=True)
        if done.returncode == 0:
            mark.touch()
