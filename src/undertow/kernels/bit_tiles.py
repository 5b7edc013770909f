"""The kernel of a product of single bits: words of 64 bits, XOR, population count, sums in registers.

A bit stands for +1 if it is set and for -1 if not. Of n such products, those of different bits are -1, so the sum is
n - 2 popcount(a XOR b) (Rastegari, Ordonez, Redmon & Farhadi, "XNOR-Net", ECCV 2016). In and out: addresses. A vector
has one word of each of 8 columns of b, so that no sum over lanes is needed; LLVM's `ctpop` becomes one instruction
where the machine has one, and a table look-up in registers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from undertow.kernels.vectors import pointer_to, splat

NUM_LANES = 8
_INDEX = ir.IntType(64)
_WORDS = ir.VectorType(_INDEX, NUM_LANES)
_FLOATS = ir.VectorType(ir.FloatType(), NUM_LANES)
# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic


def make_bit_kernel(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """c[r, :] = num_bits - 2 sum over t of popcount(a[r, t] XOR b[t, :]), as float32.

    r runs over `num_rows`, the columns over `num_vectors` vectors. Arguments of the kernel, in bytes: address of a, its
    stride over r, address of the offsets of a's words over t; address of b, whose words lie one after the other;
    address of c and its stride over r; the number of terms, at least one; the number of bits.
    """
    block = [(row, column) for row in range(num_rows) for column in range(num_vectors)]

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, a_row, offsets, b, c, c_row, num_terms, num_bits = args
        count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_WORDS, [_WORDS]), "llvm.ctpop.v8i64")
        before = builder.block
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.end")
        builder.branch(loop)

        builder.position_at_end(loop)
        term, b_now = builder.phi(_INDEX), builder.phi(_INDEX)
        sums = [builder.phi(_WORDS) for _ in block]
        moved = builder.add(offsets, builder.mul(term, ir.Constant(_INDEX, 8)))
        a_now = builder.add(a, builder.load(pointer_to(builder, moved, _INDEX)))
        rights = []
        for column in range(num_vectors):
            address = builder.add(b_now, ir.Constant(_INDEX, 64 * column))
            right = builder.load(pointer_to(builder, address, _WORDS))
            right.align = 8
            rights.append(right)
        new_sums = []
        for row in range(num_rows):
            address = builder.add(a_now, builder.mul(a_row, ir.Constant(_INDEX, row)))
            left = splat(builder, builder.load(pointer_to(builder, address, _INDEX)), _WORDS)
            for column in range(num_vectors):
                counted = builder.call(count, [builder.xor(left, rights[column])])
                new_sums.append(builder.add(sums[row * num_vectors + column], counted))
        next_term = builder.add(term, ir.Constant(_INDEX, 1))
        for phi, start, next_value in (
            (term, ir.Constant(_INDEX, 0), next_term),
            (b_now, b, builder.add(b_now, ir.Constant(_INDEX, 64 * num_vectors))),
            *((phi, ir.Constant(_WORDS, [0] * NUM_LANES), new) for phi, new in zip(sums, new_sums, strict=True)),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(next_value, loop)
        builder.cbranch(builder.icmp_signed("<", next_term, num_terms), loop, after)

        builder.position_at_end(after)
        all_bits = splat(builder, num_bits, _WORDS)
        for (row, column), total in zip(block, new_sums, strict=True):
            twice = builder.shl(total, ir.Constant(_WORDS, [1] * NUM_LANES))
            narrow = builder.trunc(builder.sub(all_bits, twice), ir.VectorType(ir.IntType(32), NUM_LANES))
            address = builder.add(
                builder.add(c, builder.mul(c_row, ir.Constant(_INDEX, row))), ir.Constant(_INDEX, 32 * column)
            )
            builder.store(builder.sitofp(narrow, _FLOATS), pointer_to(builder, address, _FLOATS), align=4)
        return context.get_dummy_value()

    @_intrinsic
    def kernel(
        typingctx: Any, a: Any, a_row: Any, offsets: Any, b: Any, c: Any, c_row: Any, num_terms: Any, num_bits: Any
    ) -> Any:
        return types.void(*[types.int64] * 8), generate

    return kernel
