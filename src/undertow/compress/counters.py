"""Counters: one probability each, in 32 bits, which follows the bits seen. Inlined into the models' loops."""

from __future__ import annotations

from undertow.compress.probabilities import COUNT_BITS, COUNTER_BITS, MAX_COUNT, RATE, STRETCH
from undertow.kernels.compiler import cached_njit


@cached_njit(forceinline=True)
def moved(counter: int, bit: int) -> int:
    """The counter after it has seen `bit`."""
    count = counter & MAX_COUNT
    probability = counter >> COUNT_BITS
    target = -bit & ((1 << COUNTER_BITS) - 1)
    probability += ((target - probability) * RATE[count]) >> 16
    return probability << COUNT_BITS | min(count + 1, MAX_COUNT)


@cached_njit(forceinline=True)
def stretched(counter: int) -> int:
    """The counter's probability in the stretched domain."""
    return STRETCH[counter >> (COUNT_BITS + COUNTER_BITS - 12)]
