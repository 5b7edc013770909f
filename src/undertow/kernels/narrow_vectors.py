"""Loads of 16 narrow numbers as a vector of float32: bytes, halves of bytes, single bits.

In: addresses. Out: values of the type `vector`. LLVM's loop vectoriser widens such numbers to 64 bits, as Numba types
them, and is then slower than reading float32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from undertow.kernels.vectors import NUM_LANES, vector

_BYTES = ir.VectorType(ir.IntType(8), NUM_LANES)
_INTEGERS = ir.VectorType(ir.IntType(32), NUM_LANES)
_BITS = ir.VectorType(ir.IntType(1), NUM_LANES)
_LANES = ir.VectorType(ir.FloatType(), NUM_LANES)
# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic


def _load(builder: Any, address: Any, kind: Any) -> Any:
    loaded = builder.load(builder.inttoptr(address, kind.as_pointer()))
    loaded.align = 1
    return loaded


@_intrinsic
def load_signed_bytes(typingctx: Any, address: Any) -> Any:
    """16 bytes, from -128 to 127."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(builder.sext(_load(builder, args[0], _BYTES), _INTEGERS), _LANES)

    return vector(types.int64), generate


@_intrinsic
def load_low_halves(typingctx: Any, address: Any) -> Any:
    """The low halves of 16 bytes less 8, from -8 to 7."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.zext(_load(builder, args[0], _BYTES), _INTEGERS)
        low = builder.and_(wide, ir.Constant(_INTEGERS, [15] * NUM_LANES))
        return builder.sitofp(builder.sub(low, ir.Constant(_INTEGERS, [8] * NUM_LANES)), _LANES)

    return vector(types.int64), generate


@_intrinsic
def load_high_halves(typingctx: Any, address: Any) -> Any:
    """The high halves of 16 bytes less 8, from -8 to 7."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.zext(_load(builder, args[0], _BYTES), _INTEGERS)
        high = builder.lshr(wide, ir.Constant(_INTEGERS, [4] * NUM_LANES))
        return builder.sitofp(builder.sub(high, ir.Constant(_INTEGERS, [8] * NUM_LANES)), _LANES)

    return vector(types.int64), generate


@_intrinsic
def load_signs(typingctx: Any, address: Any) -> Any:
    """1 where a bit of two bytes is set, -1 elsewhere; the lowest bit is the first lane."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(_load(builder, args[0], ir.IntType(16)), _BITS)
        ones = (ir.Constant(_LANES, [sign] * NUM_LANES) for sign in (1.0, -1.0))
        return builder.select(bits, *ones)

    return vector(types.int64), generate


@_intrinsic
def sum_lanes(typingctx: Any, value: Any) -> Any:
    """The sum of the 16 elements, added in pairs."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        total = args[0]
        for width in (8, 4, 2, 1):
            lanes = ir.VectorType(ir.IntType(32), width)
            undefined = ir.Constant(total.type, ir.Undefined)
            low = builder.shuffle_vector(total, undefined, ir.Constant(lanes, list(range(width))))
            high = builder.shuffle_vector(total, undefined, ir.Constant(lanes, list(range(width, 2 * width))))
            total = builder.fadd(low, high)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(vector), generate
