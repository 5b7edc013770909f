"""Memory that the processes of one machine share: no name anywhere, and gone with the last of them.

In: how many bytes, and the ranks. Out: the same pages in every process. Rank 0 makes a memory file (memfd), which has
no path, and the others open it through /proc. So nothing is left over, however a process ends. A memory file can be
sealed: whoever opens it checks its size and that nobody can change that, so reading it can never fail.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from undertow.errors import CallError
from undertow.ranks.ranks import Ranks

ALIGNED_TO = 64  # a line of the cache: no two tensors share one
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedMemory:
    """Bytes that all ranks of a job see, with locks. All ranks make it together."""

    def __init__(self, ranks: Ranks, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        if ranks.rank == 0:
            handle = _make(num_bytes)
            ranks.send_bytes(json.dumps([os.getpid(), handle]).encode())
        else:
            handle = _open(ranks.send_bytes(None), num_bytes)
        # Closed with the object. A lock of a process that ends is released by the kernel, however it ends.
        self._file = os.fdopen(handle, "r+b", buffering=0)
        self._map = mmap.mmap(handle, num_bytes)
        self.words = memoryview(self._map).cast("q")
        ranks.gather_texts("here")  # rank 0 may close its own only when all have opened it

    def tensor(self, like: torch.Tensor, first_byte: int) -> torch.Tensor:
        """A tensor in this memory, with the type and the strides of another."""
        if not like.numel():
            return torch.empty_like(like)
        flat = torch.frombuffer(self._map, dtype=like.dtype, count=like.numel(), offset=first_byte)
        return flat.as_strided(like.shape, like.stride())

    @contextmanager
    def lock(self, number: int) -> Iterator[None]:
        """Inside, no other process holds the lock of this number."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)


def _make(num_bytes: int) -> int:
    handle = os.memfd_create("undertow", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(handle, 0, num_bytes)  # a page that cannot be had would kill whoever first writes to it
    except OSError as error:
        raise CallError(f"{num_bytes:,} bytes of shared memory cannot be had: {error.strerror}") from None
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, SEALS)
    return handle


def _open(message: bytes, num_bytes: int) -> int:
    try:
        process, number = map(int, json.loads(message))
        handle = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except (OSError, ValueError, TypeError) as error:
        raise CallError(
            f"the shared memory of rank 0 cannot be opened ({error}); the workers of hogwild are processes of one user "
            f"on one machine"
        ) from None
    try:
        is_sealed = fcntl.fcntl(handle, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        is_sealed = False
    if not is_sealed or os.fstat(handle).st_size != num_bytes:
        os.close(handle)
        raise CallError(f"what rank 0 shares is not a sealed memory file of {num_bytes:,} bytes")
    return handle
