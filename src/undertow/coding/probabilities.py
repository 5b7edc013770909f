"""Probabilities in integers: the tables that adaptive binary models are made of.

A probability is that of bit 1. A counter holds one in 22 bits and, below them, how often it was updated in 10 bits, so
that it moves fast at first and slowly later. A stretched probability is ln(p / (1 - p)) in units of 1/256. Models are
mixed there: a weighted sum of stretched probabilities is squashed into one probability of 16 bits, and the weights
follow the error (logistic mixing, Mahoney 2005). Every table is made by exact integer arithmetic, so all machines have
the same one. docs/small-file-format.md gives each formula and a sum of each table.
"""

from __future__ import annotations

from typing import Any

import numpy

COUNTER_BITS = 22
COUNT_BITS = 10
MAX_COUNT = (1 << COUNT_BITS) - 1
STRETCH_LIMIT = 3071
# No bit costs less than log2(65536 / (65536 - 32)) = 0.000705 bits, so a stream of so many bytes cannot claim more
# decisions than this many per byte; 16 bytes allow for the coder's state.
LEAST_PROBABILITY = 32
MAX_DECISIONS_PER_BYTE = 11_400


def _make_squash() -> Any:
    """SQUASH[x + 3072] = 65536 / (1 + exp(-x / 256)), rounded, in fixed point of 128 bits."""
    one = 1 << 128
    # exp(1/256) by its series: 20 terms reach 2^-128.
    factor, term = one, one
    for k in range(1, 21):
        term //= 256 * k
        factor += term
    powers = [one]
    for _ in range(STRETCH_LIMIT + 1):
        powers.append(powers[-1] * factor >> 128)
    table = numpy.empty(2 * STRETCH_LIMIT + 3, numpy.int32)
    for x, power in enumerate(powers):
        upper = ((power << 17) + power + one) // (2 * (power + one))
        upper = min(upper, (1 << 16) - LEAST_PROBABILITY)
        table[STRETCH_LIMIT + 1 + x] = upper
        table[STRETCH_LIMIT + 1 - x] = (1 << 16) - upper
    return table


def _make_stretch(squash: Any) -> Any:
    """STRETCH[i] is the stretched middle of the i-th of 4096 intervals: how many entries of SQUASH lie below it."""
    # Beyond `flat` SQUASH does not change any more.
    flat = STRETCH_LIMIT + 1 - int(numpy.searchsorted(squash, LEAST_PROBABILITY, side="right"))
    below = numpy.searchsorted(squash, 16 * numpy.arange(4096) + 8) - (STRETCH_LIMIT + 1)
    return numpy.clip(below, -flat, flat).astype(numpy.int32)


SQUASH = _make_squash()
STRETCH = _make_stretch(SQUASH)
# RATE[n] = 65536 / (n + 1.5): an update after n others moves the probability by this part of the error.
RATE = (131072 // (2 * numpy.arange(MAX_COUNT + 1) + 3)).astype(numpy.int32)
