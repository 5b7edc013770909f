"""The one global setting that planning makes, and what prevents it."""

import subprocess
import sys

import pytest

COUNT_FAULTS = """
import resource, torch
from undertow.runtime.allocator import keep_memory_mapped
kept = keep_memory_mapped()
def fill():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.empty(2**24).fill_(1) for _ in range(4)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(kept, min(fill() for _ in range(6)) > 1000)  # in the first rounds the heap grows to what is needed
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the setting is glibc's")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "True False"),
        ({"UNDERTOW_MALLOC": "off"}, "False True"),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "False True"),
    ],
)
def test_memory_stays_mapped_unless_told_otherwise(environment, expected, monkeypatch):
    for name in ("UNDERTOW_MALLOC", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = subprocess.run([sys.executable, "-c", COUNT_FAULTS], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected
