"""Bernoulli draws from PyTorch's generator on the CPU, with PyTorch's bits, ten times as fast.

In: a dense float32 tensor to fill with 0 and 1, the probability of 1, and a generator. Out: the filled tensor; the
generator's state changes as under `Tensor.bernoulli_`. PyTorch draws one element after the other. Here a whole state of
the Mersenne twister (Matsumoto and Nishimura, 1998) is made and used in vector loops.

A draw takes two words, r1 and r2, of the generator: the 53 lowest bits of r1 2^32 + r2, over 2^53, are compared with
the probability in float64, which is exact. On Intel's processors PyTorch calls MKL instead and draws other numbers:
`has_pytorch_bits` compares once per process.

Not done: a lock. PyTorch takes one while it draws. Here, two threads that draw from one generator at the same time may
get equal numbers.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy
import torch
from torch import Generator, Tensor

from undertow.kernels.compiler import HAS_NUMBA, cached_njit, numba
from undertow.torch_internals import is_mapped

# With fewer elements, reading the state and writing it back costs more than it saves: 9 to 23 microseconds, depending
# on the caches, in which PyTorch draws about as many numbers (AMD EPYC, one thread).
MIN_ELEMENTS = 1024

_NUM_WORDS = 624
_SHIFT = 397
# c10's CPUGeneratorImplState: seed (8 bytes), words left (4), is seeded (4), next word (8), the words, 8 bytes each.
_STATE_BYTES = 5056
_LEFT, _NEXT, _WORDS = 8, 16, slice(24, 24 + 8 * _NUM_WORDS)


@numba.njit(error_model="numpy", inline="always")
def _twist(word: Any, following: Any, far: Any) -> Any:
    mixed = (word & numpy.uint32(0x80000000)) | (following & numpy.uint32(0x7FFFFFFF))
    odd = numpy.uint32(0) - (following & numpy.uint32(1))
    return far ^ (mixed >> numpy.uint32(1)) ^ (odd & numpy.uint32(0x9908B0DF))


@cached_njit(error_model="numpy")
def _make_words(words: Any, tempered: Any) -> None:
    """Make the next state, and the numbers that the generator draws from it."""
    for index in range(_NUM_WORDS - _SHIFT):
        words[index] = _twist(words[index], words[index + 1], words[index + _SHIFT])
    for index in range(_NUM_WORDS - _SHIFT, _NUM_WORDS - 1):
        words[index] = _twist(words[index], words[index + 1], words[index + _SHIFT - _NUM_WORDS])
    words[_NUM_WORDS - 1] = _twist(words[_NUM_WORDS - 1], words[0], words[_SHIFT - 1])
    _temper(words, tempered)


@cached_njit(error_model="numpy")
def _temper(words: Any, tempered: Any) -> None:
    for index in range(_NUM_WORDS):
        word = words[index]
        word ^= word >> numpy.uint32(11)
        word ^= (word << numpy.uint32(7)) & numpy.uint32(0x9D2C5680)
        word ^= (word << numpy.uint32(15)) & numpy.uint32(0xEFC60000)
        tempered[index] = word ^ (word >> numpy.uint32(18))


@cached_njit(error_model="numpy")
def _compare(tempered: Any, threshold: Any, out: Any) -> None:
    for index in range(out.size):
        high = numpy.uint64(tempered[2 * index] & numpy.uint32(0x1FFFFF))
        low = numpy.uint64(tempered[2 * index + 1])
        out[index] = numpy.float32((high << numpy.uint64(32)) | low < threshold)


@cached_njit(error_model="numpy")
def _draw(words: Any, position: int, threshold: Any, out: Any) -> int:
    """Fill `out`. `position` words of the state have been used; returns how many are used afterwards."""
    tempered = numpy.empty(_NUM_WORDS, numpy.uint32)
    pair = numpy.empty(2, numpy.uint32)
    _temper(words, tempered)
    start = 0
    while start < out.size:
        num_draws = min((_NUM_WORDS - position) // 2, out.size - start)
        _compare(tempered[position:], threshold, out[start : start + num_draws])
        start += num_draws
        position += 2 * num_draws
        if start == out.size:
            break
        has_one_left = position < _NUM_WORDS
        if has_one_left:
            pair[0] = tempered[_NUM_WORDS - 1]
        _make_words(words, tempered)
        position = 0
        if has_one_left:
            pair[1] = tempered[0]
            _compare(pair, threshold, out[start : start + 1])
            start += 1
            position = 1
    return position


def draw_bernoulli(tensor: Tensor, p: float = 0.5, *, generator: Generator | None = None) -> Tensor:
    """`tensor.bernoulli_(p)`; calls PyTorch's where this kernel does not apply."""
    is_large = tensor.numel() >= MIN_ELEMENTS and tensor.device.type == "cpu"
    is_plain = is_large and tensor.dtype is torch.float32 and tensor.is_contiguous() and not is_mapped(tensor)
    if not is_plain or not 0 <= p <= 1 or not has_pytorch_bits():
        return tensor.bernoulli_(p, generator=generator)
    return _fill(tensor, p, torch.default_generator if generator is None else generator)


def _fill(tensor: Tensor, p: float, generator: Generator) -> Tensor:
    state = generator.get_state()
    raw = state.numpy()
    left, following, long_words = raw[_LEFT:].view(numpy.int32), raw[_NEXT:].view(numpy.uint64), raw[_WORDS]
    words = long_words.view(numpy.uint64).astype(numpy.uint32)
    # One word "left" means none: the next draw makes a new state. So it is with a fresh generator.
    position = _NUM_WORDS if left[0] == 1 else int(following[0])
    out = tensor.detach().view(-1).numpy()
    position = _draw(words, position, numpy.uint64(math.ceil(p * 2.0**53)), out)
    long_words.view(numpy.uint64)[:] = words
    left[0], following[0] = _NUM_WORDS - position + 1, position
    generator.set_state(state)
    return tensor


@cache
def has_pytorch_bits() -> bool:
    """Whether PyTorch draws on this machine as described above."""
    if not HAS_NUMBA or torch.default_generator.get_state().numel() != _STATE_BYTES:
        return False
    # Not torch.Generator: recording a model refuses it, and the first draw may happen while a model is recorded.
    own, pytorchs = Generator().manual_seed(0), Generator().manual_seed(0)
    for size, p in ((1, 0.5), (700, 0.9), (311, 0.1), (3, 1.0), (1000, 0.3)):
        found, expected = torch.empty(
            2, size, dtype=torch.float32, device="cpu"
        )  # the user may have set other defaults
        _fill(found, p, own), expected.bernoulli_(p, generator=pytorchs)
        if not torch.equal(found, expected) or not torch.equal(own.get_state(), pytorchs.get_state()):
            return False
        for generator in (own, pytorchs):
            torch.randint(9, (1,), generator=generator, device="cpu")  # one word, so that a pair spans two states
    return True
