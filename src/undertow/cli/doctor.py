"""`examine`: what Undertow finds on this machine. In: nothing. Out: versions, processor, memory, cache, what is fast.

Nothing is measured: each line says what is there and what follows from it. The cache folder is tried with a file that
is removed again, if the folder exists already.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import tempfile
import textwrap
import warnings
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

import undertow
from undertow.cache import cache_folder
from undertow.costs.cache import processor_name
from undertow.ir import format_bytes
from undertow.runtime.allocator import keep_memory_mapped
from undertow.torch_internals import NEWEST, TESTED, release_of

LIBRARIES = ("torch", "numpy", "numba", "scipy", "safetensors")
MAX_COLUMNS = 80


@dataclass(frozen=True)
class Ability:
    """Something that is fast on this machine, or is not, and why."""

    name: str
    is_fast: bool
    reason: str


@dataclass(frozen=True)
class Cache:
    """The folder of what was measured, compiled and planned before."""

    folder: str
    num_bytes: int
    is_writable: bool
    problem: str


@dataclass(frozen=True)
class Diagnosis:
    """What was found."""

    versions: dict[str, str]
    is_torch_tested: bool
    processor: str
    num_processors: int
    num_threads: int
    devices: tuple[str, ...]
    c_library: str
    keeps_memory_mapped: bool
    cache: Cache
    abilities: tuple[Ability, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it by name."""
        return asdict(self)

    def __str__(self) -> str:
        tested = f"tested with {TESTED}" if self.is_torch_tested else f"newer than tested ({TESTED})"
        shown = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        state = "writable" if self.cache.is_writable else f"cannot be written: {self.cache.problem}"
        mapped = "stays mapped between steps" if self.keeps_memory_mapped else "is given back to the system"
        rows = [
            ("versions", shown),
            ("torch", tested),
            ("processor", f"{self.processor}, {_count(self.num_processors, 'processor')} for this process"),
            ("threads", f"{self.num_threads} (OMP_NUM_THREADS or torch.set_num_threads change it)"),
            ("devices", ", ".join(self.devices)),
            ("allocator", f"{self.c_library or 'not glibc'}; freed memory {mapped}"),
            ("cache", f"{self.cache.folder}: {format_bytes(self.cache.num_bytes)}, {state}"),
        ]
        lines = [_wrap(f"{name:<11}", text) for name, text in rows]
        for title, is_fast in (("fast here", True), ("not fast here", False)):
            found = [_wrap("  ", f"{item.name}: {item.reason}") for item in self.abilities if item.is_fast == is_fast]
            lines += ["", title, *(found or ["  nothing"])]
        return "\n".join(lines)


def _wrap(head: str, text: str) -> str:
    indent = " " * max(len(head), 4)
    return textwrap.fill(head + text, MAX_COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def examine() -> Diagnosis:
    """Look at this machine."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Diagnosis(
        versions=_find_versions(),
        is_torch_tested=release_of(torch.__version__) <= NEWEST,
        processor=processor_name().partition(":")[2].strip() or processor_name(),
        num_processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        devices=("cpu", *(f"cuda:{index} ({name})" for index, name in enumerate(names))),
        c_library=" ".join(platform.libc_ver()).strip(),
        keeps_memory_mapped=keep_memory_mapped(),
        cache=_examine_cache(cache_folder()),
        abilities=(_compiled_kernels(), _vectors(), _bfloat16(), _gpu()),
    )


def _find_versions() -> dict[str, str]:
    versions = {"undertow": undertow.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version_of(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


def _examine_cache(folder: Path) -> Cache:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    problem = ""
    try:
        if existing == folder:
            tempfile.TemporaryFile(dir=folder).close()
        elif not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            problem = f"{existing} is not a folder in which one can be made"
    except OSError as error:
        problem = error.strerror or str(error)
    return Cache(str(folder), sum(sizes), not problem, problem)


def _compiled_kernels() -> Ability:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason says the same
        from undertow.kernels.compiler import HAS_NUMBA

    if HAS_NUMBA:
        return Ability("kernels and search for plans", True, "compiled by Numba at first use, then from the cache")
    return Ability(
        "kernels and search for plans", False, "Numba cannot be imported: PyTorch's kernels only; pip install numba"
    )


def _vectors() -> Ability:
    found = torch.backends.cpu.get_cpu_capability()
    missing = "" if "AVX512" in found else "; AVX-512 is not there"
    return Ability("float32 on the CPU", found != "DEFAULT", f"PyTorch's kernels are those for {found}{missing}")


def _bfloat16() -> Ability:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Ability('numerics="bf16" on the CPU', True, "oneDNN has kernels for bfloat16 on this processor")
    return Ability(
        'numerics="bf16" on the CPU',
        False,
        "oneDNN has no kernels for bfloat16 on this processor, which needs AVX-512; PyTorch's own run instead, and "
        "eager itself cannot run an LSTM",
    )


def _gpu() -> Ability:
    if not torch.cuda.is_available():
        return Ability("GPU", False, "no CUDA device: steps run on the CPU")
    if importlib.util.find_spec("triton") is None:
        return Ability("GPU", False, 'Triton cannot be imported: numerics="fast" cannot join operations into kernels')
    return Ability("GPU", True, 'CUDA graphs, and with numerics="fast" groups of operations compiled by Triton')
