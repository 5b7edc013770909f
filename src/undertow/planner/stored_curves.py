"""Curves on disk, so that the second start of the same training plans without a search.

In: an Instance. Out: the schedules that were found for it. A curve is a function of the instance alone, which has
every size and every time. So the instance's digest names the file, which never changes. Processes that find the same
curve write the same file, each whole.

Nothing in a file is believed: the reference replays each schedule, which gives its time and its peak. Where a file
cannot be read, the search runs again. Where it cannot be written, a warning says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from undertow.cache import cache_folder, warn_of_no_cache, write_whole
from undertow.kernels.compiler import HAS_NUMBA
from undertow.planner.instance import Instance, replay
from undertow.planner.search import Solution

SEARCH = 1  # raise it when the search finds other schedules: older files are then ignored
MAX_FILE_BYTES = 64 << 20  # 30 schedules of half a million runs
MAX_FILES = 256  # inputs that change shape at every step would fill the disk


def load_points(instance: Instance) -> list[Solution] | None:
    """The points of the curve that was stored for an instance; None where there is none."""
    path = _path(instance)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        schedules = load(path.read_bytes())
        points = [_replayed(instance, schedules[str(index)]) for index in range(len(schedules))]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    with contextlib.suppress(OSError):
        path.touch()  # the latest used stay
    return points


def store_points(instance: Instance, points: Sequence[Solution]) -> None:
    """Write the points of a curve for the next process, and delete the files that were not used for longest."""
    path = _path(instance)
    content = save({str(index): point.schedule.astype(np.int32) for index, point in enumerate(points)})
    if len(content) > MAX_FILE_BYTES:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        _delete_oldest(path.parent)
    except OSError as error:
        warn_of_no_cache(cache_folder(), error.strerror or str(error))


def _path(instance: Instance) -> Path:
    speed = "compiled" if HAS_NUMBA else "plain"  # without Numba the search makes fewer moves
    return cache_folder() / "curves" / f"{instance.digest().hex()[:32]}-{SEARCH}-{speed}.safetensors"


def _replayed(instance: Instance, schedule: np.ndarray) -> Solution:
    if schedule.dtype != np.int32 or schedule.ndim != 1:
        raise ValueError("a schedule is a row of numbers")
    found = replay(instance, schedule)
    return Solution(schedule.astype(np.int64), found.time, found.peak_bytes, 0)


def _delete_oldest(folder: Path) -> None:
    ages = {}
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete it now
            ages[path] = path.stat().st_mtime_ns
    for path in sorted(ages, key=ages.__getitem__)[:-MAX_FILES]:
        path.unlink(missing_ok=True)
