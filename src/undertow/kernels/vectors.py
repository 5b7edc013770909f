"""Vectors of 16 float32 for Numba: loads and stores under a mask of bits, arithmetic, and the kernel of a product.

In and out: addresses as integers, and values of the type `vector`, which live in registers. LLVM's own loop vectoriser
gives up on the transforms of Winograd (too many arrays that might overlap) and on blocking a product in registers.
Written as vectors, both become straight-line code: a vector is one AVX-512 register, or several narrower ones.

A product that is added to a sum becomes one fused operation on every machine, so the bits do not depend on what the
compiler chooses. Not done: checks of addresses; callers are responsible for the bounds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

NUM_LANES = 16
_FLOAT = ir.FloatType()
_LANES = ir.VectorType(_FLOAT, NUM_LANES)
_BITS = ir.VectorType(ir.IntType(1), NUM_LANES)
_INDEX = ir.IntType(64)
_CONTRACT = ("contract",)
# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic


class VectorType(types.Type):
    """The type of 16 float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="Vector16Float32")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, _LANES)


def pointer_to(builder: Any, address: Any, element_type: Any) -> Any:
    """LLVM's pointer to an address."""
    return builder.inttoptr(address, element_type.as_pointer())


def splat(builder: Any, scalar: Any, lanes: Any = _LANES) -> Any:
    """LLVM's vector with a scalar in all lanes."""
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    order = ir.Constant(ir.VectorType(ir.IntType(32), lanes.count), [0] * lanes.count)
    return builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), order)


def _register_operator(function: Any, instruction: str) -> None:
    @infer_global(function)
    class _Signature(ConcreteTemplate):
        cases = [signature(vector, vector, vector), signature(vector, vector, types.float64)]

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = args
        if sig.args[1] is not vector:
            right = splat(builder, builder.fptrunc(right, _FLOAT))
        return getattr(builder, instruction)(left, right, flags=_CONTRACT)

    lower_builtin(function, vector, vector)(lower)
    lower_builtin(function, vector, types.float64)(lower)


_register_operator(operator.add, "fadd")
_register_operator(operator.sub, "fsub")
_register_operator(operator.mul, "fmul")


@_intrinsic
def load(typingctx: Any, address: Any) -> Any:
    """The 16 elements at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        loaded = builder.load(pointer_to(builder, args[0], _LANES))
        loaded.align = 4
        return loaded

    return vector(types.int64), generate


@_intrinsic
def store(typingctx: Any, address: Any, value: Any) -> Any:
    """Write 16 elements at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], pointer_to(builder, args[0], _LANES), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), generate


def _mask(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.trunc(bits, ir.IntType(16)), _BITS)


@_intrinsic
def load_where(typingctx: Any, address: Any, bits: Any) -> Any:
    """The elements at an address whose bit is set, 0 elsewhere; memory without a bit is not touched."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], _LANES)
        function_type = ir.FunctionType(_LANES, [pointer.type, ir.IntType(32), _BITS, _LANES])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.masked.load.v16f32.p0v16f32")
        zero = ir.Constant(_LANES, [0.0] * NUM_LANES)
        return builder.call(function, [pointer, ir.Constant(ir.IntType(32), 4), _mask(builder, args[1]), zero])

    return vector(types.int64, types.int64), generate


@_intrinsic
def store_where(typingctx: Any, address: Any, value: Any, bits: Any) -> Any:
    """Write the elements whose bit is set; memory without a bit is not touched."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = pointer_to(builder, args[0], _LANES)
        function_type = ir.FunctionType(ir.VoidType(), [_LANES, pointer.type, ir.IntType(32), _BITS])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.masked.store.v16f32.p0v16f32")
        builder.call(function, [args[1], pointer, ir.Constant(ir.IntType(32), 4), _mask(builder, args[2])])
        return context.get_dummy_value()

    return types.void(types.int64, vector, types.int64), generate


@_intrinsic
def load_element(typingctx: Any, address: Any) -> Any:
    """The float32 at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer_to(builder, args[0], _FLOAT))

    return types.float32(types.int64), generate


@_intrinsic
def store_element(typingctx: Any, address: Any, value: Any) -> Any:
    """Write one float32 at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], pointer_to(builder, args[0], _FLOAT))
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@_intrinsic
def load_byte(typingctx: Any, address: Any) -> Any:
    """The byte at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.load(pointer_to(builder, args[0], ir.IntType(8))), _INDEX)

    return types.int64(types.int64), generate


@_intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """The 32 bits at an address, as an unsigned number."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.zext(builder.load(pointer_to(builder, args[0], ir.IntType(32))), _INDEX)

    return types.uint64(types.int64), generate


@_intrinsic
def store_word(typingctx: Any, address: Any, value: Any) -> Any:
    """Write the low 32 bits of an unsigned number at an address."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(builder.trunc(args[1], ir.IntType(32)), pointer_to(builder, args[0], ir.IntType(32)))
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@_intrinsic
def store_two_bytes(typingctx: Any, address: Any, bits: Any) -> Any:
    """Write the low 16 bits at an address, the lowest first."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = builder.trunc(args[1], ir.IntType(16))
        builder.store(value, pointer_to(builder, args[0], ir.IntType(16)), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def not_at_most_zero(typingctx: Any, value: Any) -> Any:
    """One bit per lane: whether the element is not <= 0, so a NaN counts."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        compared = builder.fcmp_unordered("ugt", args[0], ir.Constant(_LANES, [0.0] * NUM_LANES))
        return builder.zext(builder.bitcast(compared, ir.IntType(16)), _INDEX)

    return types.int64(vector), generate


@_intrinsic
def at_least_zero(typingctx: Any, value: Any) -> Any:
    """One bit per lane: whether the element is >= 0, which -0.0 is and a NaN is not."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        compared = builder.fcmp_ordered(">=", args[0], ir.Constant(_LANES, [0.0] * NUM_LANES))
        return builder.zext(builder.bitcast(compared, ir.IntType(16)), _INDEX)

    return types.int64(vector), generate


@_intrinsic
def keep_where(typingctx: Any, value: Any, bits: Any) -> Any:
    """The lanes whose bit is set, +0.0 elsewhere."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(_mask(builder, args[1]), args[0], ir.Constant(_LANES, [0.0] * NUM_LANES))

    return vector(vector, types.int64), generate


@_intrinsic
def zeros(typingctx: Any) -> Any:
    """A vector of +0.0."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(_LANES, [0.0] * NUM_LANES)

    return vector(), generate


def make_product_kernel(num_rows: int, num_vectors: int) -> Callable[..., None]:
    """The kernel of a product, with its sums in registers: c[r, :] (+)= sum over d of a[r, d] b[d, :].

    r runs over `num_rows`, the columns over `num_vectors` vectors. Arguments of the kernel, strides in bytes: address
    of a, its strides over r and d; address of b and its stride over d; address of c and its stride over r; the number
    of terms; whether to add to the present content of c.
    """
    block = [(row, column) for row in range(num_rows) for column in range(num_vectors)]

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        a, a_row, a_term, b, b_term, c, c_row, num_terms, is_added = args
        fma = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_LANES, [_LANES] * 3), "llvm.fma.v16f32")

        def at(base: Any, stride: Any, index: int, offset: int = 0) -> Any:
            moved = builder.add(base, builder.mul(stride, ir.Constant(_INDEX, index)))
            return builder.add(moved, ir.Constant(_INDEX, offset))

        before = builder.block
        loop, after = builder.append_basic_block("terms"), builder.append_basic_block("terms.end")
        is_any = builder.icmp_signed(">", num_terms, ir.Constant(_INDEX, 0))
        zero = ir.Constant(_LANES, [0.0] * NUM_LANES)
        builder.cbranch(is_any, loop, after)

        builder.position_at_end(loop)
        term, a_now, b_now = (builder.phi(_INDEX) for _ in range(3))
        sums = [builder.phi(_LANES) for _ in block]
        rights = []
        for column in range(num_vectors):
            right = builder.load(pointer_to(builder, at(b_now, b_term, 0, 64 * column), _LANES))
            right.align = 4
            rights.append(right)
        new_sums = []
        for row in range(num_rows):
            left = splat(builder, builder.load(pointer_to(builder, at(a_now, a_row, row), _FLOAT)))
            for column in range(num_vectors):
                new_sums.append(builder.call(fma, [left, rights[column], sums[row * num_vectors + column]]))
        next_term = builder.add(term, ir.Constant(_INDEX, 1))
        for phi, start, next_value in (
            (term, ir.Constant(_INDEX, 0), next_term),
            (a_now, a, builder.add(a_now, a_term)),
            (b_now, b, builder.add(b_now, b_term)),
        ):
            phi.add_incoming(start, before)
            phi.add_incoming(next_value, loop)
        for phi, new_sum in zip(sums, new_sums, strict=True):
            phi.add_incoming(zero, before)
            phi.add_incoming(new_sum, loop)
        builder.cbranch(builder.icmp_signed("<", next_term, num_terms), loop, after)

        builder.position_at_end(after)
        totals = []
        for new_sum in new_sums:
            total = builder.phi(_LANES)
            total.add_incoming(zero, before)
            total.add_incoming(new_sum, loop)
            totals.append(total)
        targets = [pointer_to(builder, at(c, c_row, row, 64 * column), _LANES) for row, column in block]
        with builder.if_else(is_added) as (then, otherwise):
            with then:
                for target, total in zip(targets, totals, strict=True):
                    present = builder.load(target)
                    present.align = 4
                    builder.store(builder.fadd(present, total), target, align=4)
            with otherwise:
                for target, total in zip(targets, totals, strict=True):
                    builder.store(total, target, align=4)
        return context.get_dummy_value()

    @_intrinsic
    def kernel(
        typingctx: Any, a: Any, a_row: Any, a_term: Any, b: Any, b_term: Any, c: Any, c_row: Any, num: Any, added: Any
    ) -> Any:
        return types.void(*[types.int64] * 8, types.boolean), generate

    return kernel
