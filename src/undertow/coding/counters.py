"""Counters: one probability each, in 32 bits, which follows the bits seen. Inlined into the models' loops."""

from __future__ import annotations

from undertow.coding.probabilities import COUNT_BITS, COUNTER_BITS, LEAST_PROBABILITY, MAX_COUNT, RATE, STRETCH
from undertow.coding.range_coder import I64, U64
from undertow.kernels.compiler import cached_njit

_MOST = (1 << 16) - LEAST_PROBABILITY


@cached_njit(forceinline=True)
def moved(counter: int, bit: int) -> int:
    """The counter after it has seen `bit`."""
    count = counter & MAX_COUNT
    probability = counter >> COUNT_BITS
    target = -bit & ((1 << COUNTER_BITS) - 1)
    probability += ((target - probability) * RATE[U64(count)]) >> 16
    return probability << COUNT_BITS | min(count + 1, MAX_COUNT)


@cached_njit(forceinline=True)
def stretched(counter: int) -> int:
    """The counter's probability in the stretched domain."""
    return STRETCH[U64(counter >> (COUNT_BITS + COUNTER_BITS - 12))]


@cached_njit(forceinline=True)
def direct(counter: int) -> int:
    """The counter's probability in 16 bits, where it is not mixed with others."""
    # Signed: Numba makes a float of the smaller of a signed and an unsigned number.
    upper: int = I64(counter) >> (COUNT_BITS + COUNTER_BITS - 16)
    return min(max(upper, LEAST_PROBABILITY), _MOST)
