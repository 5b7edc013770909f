"""The kernel of a sparse product: a row's weights times as many runs of x, summed in registers.

In: addresses of a row's entries, each an offset into x and a value, and of x. Out: written to memory, times a scale and
plus a bias. Every entry adds to all positions of the tile, so a vector of sums is one run of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from undertow.kernels.vectors import NUM_LANES, pointer_to, splat

_FLOAT = ir.FloatType()
_LANES = ir.VectorType(_FLOAT, NUM_LANES)
_INDEX = ir.IntType(64)
# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic


def make_sparse_kernel(num_vectors: int) -> Callable[..., None]:
    """c[p] = scale * sum over e of values[e] * x[offsets[e] + p] + bias, p over `num_vectors` vectors.

    Arguments of the kernel: addresses of the offsets, int64 in bytes, and of the values; the number of entries;
    addresses of x and c; scale and bias.
    """

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        offsets, values, num_entries, x, c, scale, bias = args
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_LANES, [_LANES] * 3), "llvm.fma.v16f32")
        zero = ir.Constant(_LANES, [0.0] * NUM_LANES)
        before = builder.block
        loop, after = builder.append_basic_block("entries"), builder.append_basic_block("entries.end")
        builder.cbranch(builder.icmp_signed(">", num_entries, ir.Constant(_INDEX, 0)), loop, after)

        builder.position_at_end(loop)
        entry = builder.phi(_INDEX)
        sums = [builder.phi(_LANES) for _ in range(num_vectors)]
        offset_at = builder.add(offsets, builder.shl(entry, ir.Constant(_INDEX, 3)))
        value_at = builder.add(values, builder.shl(entry, ir.Constant(_INDEX, 2)))
        run = builder.add(x, builder.load(pointer_to(builder, offset_at, _INDEX)))
        value = splat(builder, builder.load(pointer_to(builder, value_at, _FLOAT)))
        new_sums = []
        for index, total in enumerate(sums):
            loaded = builder.load(pointer_to(builder, builder.add(run, ir.Constant(_INDEX, 64 * index)), _LANES))
            loaded.align = 4
            new_sums.append(builder.call(fma, [loaded, value, total]))
        next_entry = builder.add(entry, ir.Constant(_INDEX, 1))
        entry.add_incoming(ir.Constant(_INDEX, 0), before)
        entry.add_incoming(next_entry, loop)
        for total, new_sum in zip(sums, new_sums, strict=True):
            total.add_incoming(zero, before)
            total.add_incoming(new_sum, loop)
        builder.cbranch(builder.icmp_signed("<", next_entry, num_entries), loop, after)

        builder.position_at_end(after)
        totals = []
        for new_sum in new_sums:
            total = builder.phi(_LANES)
            total.add_incoming(zero, before)
            total.add_incoming(new_sum, loop)
            totals.append(total)
        all_scale, all_bias = splat(builder, scale), splat(builder, bias)
        for index, total in enumerate(totals):
            target = pointer_to(builder, builder.add(c, ir.Constant(_INDEX, 64 * index)), _LANES)
            builder.store(builder.call(fma, [total, all_scale, all_bias]), target, align=4)
        return context.get_dummy_value()

    @_intrinsic
    def kernel(
        typingctx: Any, offsets: Any, values: Any, num_entries: Any, x: Any, c: Any, scale: Any, bias: Any
    ) -> Any:
        return types.void(*[types.int64] * 5, types.float32, types.float32), generate

    return kernel
