"""Curves on disk: found again without a search, never believed, bounded in number."""

import random
import time

import numpy as np
import pytest
from planner_instances import tiny
from safetensors.numpy import load_file, save_file

from undertow.planner import curve, stored_curves
from undertow.planner.curve import find_curve


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(curve, "LEAST_STORED_S", -1.0)
    monkeypatch.setattr(curve, "_KNOWN", type(curve._KNOWN)())
    return tmp_path / "undertow" / "curves"


def make(seed):
    return tiny(seed)


def points_of(found):
    return [(point.schedule.tolist(), point.time, point.peak_bytes) for point in found.points]


def test_the_second_process_does_not_search(folder, monkeypatch):
    instances = [make(seed) for seed in range(5)]
    first = [find_curve(instance) for instance in instances]
    curve._KNOWN.clear()  # as in another process

    def search(*args):
        raise AssertionError("searched again")

    monkeypatch.setattr(curve, "_find_points", search)
    second = [find_curve(instance) for instance in instances]
    assert list(map(points_of, first)) == list(map(points_of, second))
    assert [item.lower_bound_peak_bytes for item in first] == [item.lower_bound_peak_bytes for item in second]
    assert all(item.is_complete for item in second)


@pytest.mark.parametrize("damage", ["empty", "cut", "noise", "other kinds", "out of order", "other type", "a folder"])
def test_a_damaged_file_is_searched_again(folder, damage):
    instance = make(3)
    expected = points_of(find_curve(instance))
    (path,) = folder.iterdir()
    content, schedules = path.read_bytes(), load_file(path)
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(content[:-3])
    elif damage == "noise":
        path.write_bytes(random.Random(0).randbytes(len(content)))
    elif damage == "other kinds":
        save_file({key: item + instance.num_kinds for key, item in schedules.items()}, path)
    elif damage == "out of order":
        save_file({key: item[::-1].copy() for key, item in schedules.items()}, path)
    elif damage == "other type":
        save_file({key: item.astype(np.float32) for key, item in schedules.items()}, path)
    else:
        path.unlink()
        path.mkdir()
    curve._KNOWN.clear()
    if damage == "a folder":
        with pytest.warns(UserWarning, match="could not be kept"):
            assert points_of(find_curve(instance)) == expected
    else:
        assert points_of(find_curve(instance)) == expected


def test_a_search_that_was_ended_early_is_not_stored(folder):
    assert not find_curve(make(0), time_limit_s=0).is_complete
    assert not folder.exists()


def test_the_latest_used_stay(folder, monkeypatch):
    monkeypatch.setattr(stored_curves, "MAX_FILES", 2)
    for seed in (0, 1, 0, 2):
        curve._KNOWN.clear()
        find_curve(make(seed))
        time.sleep(0.05)  # a file's time is a tick of the kernel's clock
    assert {path.name for path in folder.iterdir()} == {stored_curves._path(make(seed)).name for seed in (0, 2)}
