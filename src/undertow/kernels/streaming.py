"""What Numba's loops cannot express: which arrays do not overlap, and stores that bypass the caches.

In and out: arrays inside loops that Numba compiles. A plain store first reads the cache line it will overwrite. If the
output is larger than the cache, that read is a third of the traffic of y = f(x), and its lines displace others.
`store_row` copies a finished row with non-temporal stores, which do neither. They need a row that starts on a cache
line; other rows are copied with plain stores. Outputs that the next operation will find in the cache, for which
`is_streamed` is False, are better written directly.
"""

from __future__ import annotations

from typing import Any

import torch

from undertow.kernels.compiler import HAS_NUMBA, intrinsic

if HAS_NUMBA:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.core.imputils import impl_ret_borrowed

# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic

_LANES = 16
_LINE_BYTES = 64
# Half of the last-level cache of a server's core complex: larger outputs do not survive in it until they are read.
_STREAMED_BYTES = 16 * 2**20


def is_streamed(out: torch.Tensor) -> bool:
    """Whether stores to an output should bypass the caches."""
    return out.numel() * out.element_size() >= _STREAMED_BYTES


@_intrinsic
def store_row(typing_context: Any, buffer: Any, source_row: Any, out: Any, row: Any, start: Any, width: Any) -> Any:
    """out[row, start : start + width] = buffer[source_row, :width], past the caches if it starts on a cache line."""
    signature = types.void(buffer, types.intp, out, types.intp, types.intp, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source_row, _, row, start, width = arguments
        source = context.make_array(signature.args[0])(context, builder, arguments[0])
        target = context.make_array(signature.args[2])(context, builder, arguments[2])
        integer = width.type
        source_columns = cgutils.unpack_tuple(builder, source.shape, 2)[1]
        target_columns = cgutils.unpack_tuple(builder, target.shape, 2)[1]
        read = builder.gep(source.data, [builder.mul(source_row, source_columns)])
        write = builder.gep(target.data, [builder.add(builder.mul(row, target_columns), start)])
        offset_in_line = builder.and_(builder.ptrtoint(write, integer), integer(_LINE_BYTES - 1))
        vector = ir.VectorType(ir.FloatType(), _LANES)
        num_vectors = builder.udiv(width, integer(_LANES))

        def copy_vectors(bypasses_cache: bool) -> None:
            with cgutils.for_range(builder, num_vectors, intp=integer) as loop:
                index = [builder.mul(loop.index, integer(_LANES))]
                value = builder.load(builder.bitcast(builder.gep(read, index), vector.as_pointer()), align=4)
                at = builder.bitcast(builder.gep(write, index), vector.as_pointer())
                store = builder.store(value, at, align=_LINE_BYTES if bypasses_cache else 4)
                if bypasses_cache:
                    store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))

        with builder.if_else(builder.icmp_unsigned("==", offset_in_line, integer(0))) as (then, otherwise):
            with then:
                copy_vectors(True)
            with otherwise:
                copy_vectors(False)
        tail = builder.mul(num_vectors, integer(_LANES))
        with cgutils.for_range_slice(builder, tail, width, integer(1), intp=integer) as (index, _):
            builder.store(builder.load(builder.gep(read, [index])), builder.gep(write, [index]))
        return context.get_dummy_value()

    return signature, generate


@_intrinsic
def finish_stores(typing_context: Any) -> Any:
    """Complete the stores that bypass the caches before anything else the thread does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def distinct(typing_context: Any, array: Any) -> Any:
    """The same array, with a promise to LLVM: it shares memory with no other `distinct` array, except elementwise.

    LLVM guards a vector loop by comparing every pointer written with every other, and gives up beyond eight
    comparisons. Here the pointer passes through empty assembly whose result is declared `noalias`, like the result of
    malloc. A loop whose iterations touch only their own element may still overwrite its input: LLVM moves nothing
    across iterations that touch the same memory.
    """
    signature = array(array)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = view.data.type
        identity = ir.InlineAsm(ir.FunctionType(pointer, [pointer]), "", "=r,0")
        # llvmlite has no return attributes; the calling convention is printed where they belong.
        view.data = builder.call(identity, [view.data], cconv="ccc noalias")
        # Use the pointer once more: LLVM would take memory that nothing else has seen for private and drop its stores.
        seen = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [pointer]), "", "r,~{memory}", side_effect=True)
        builder.call(seen, [view.data])
        return impl_ret_borrowed(context, builder, signature.return_type, view._getvalue())

    return signature, generate
