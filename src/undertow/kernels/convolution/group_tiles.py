"""The kernels of grouped convolutions: some pixels of one row, with their sums in registers.

In: addresses and sizes (integers). Out: written to memory. Channels are innermost, so 16 neighbouring channels are one
vector. There are two kinds, by how many channels a group has:

- A bundle is 16 output channels of several groups whose input channels lie in one vector of x, `per_group` inputs and
  as many outputs each. For each input of a group one shuffle brings it to all lanes of its group. A depthwise
  convolution has one channel per group, and needs no shuffle.
- A wide group fills vectors by its own outputs. Each of its inputs is one number of x, brought to all lanes.

What lies outside of the image is read from a piece of zeros instead. Bundles also have a kernel without that question,
for the inside of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from undertow.kernels.vectors import NUM_LANES, pointer_to, splat

_FLOAT = ir.FloatType()
_LANES = ir.VectorType(_FLOAT, NUM_LANES)
_BITS = ir.VectorType(ir.IntType(1), NUM_LANES)
_INDEX = ir.IntType(64)
_ZERO = ir.Constant(_LANES, [0.0] * NUM_LANES)
# Numba annotates an intrinsic with its Python signature, which has one argument more than its calls.
_intrinsic: Any = intrinsic


class _Builder:
    """LLVM's builder, with the few things that the kernels are made of."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self._fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_LANES, [_LANES] * 3), "llvm.fma.v16f32"
        )

    def moved(self, address: Any, count: Any, step: Any) -> Any:
        """address + count * step"""
        count = ir.Constant(_INDEX, count) if isinstance(count, int) else count
        step = ir.Constant(_INDEX, step) if isinstance(step, int) else step
        return self.builder.add(address, self.builder.mul(count, step))

    def lanes_of(self, bits: Any) -> Any:
        """One truth value per lane from an integer of 16 bits."""
        return self.builder.bitcast(self.builder.trunc(bits, ir.IntType(16)), _BITS)

    def all_lanes_of(self, bits: Any, num_vectors: int) -> list[Any]:
        """The same for several vectors, 16 bits each."""
        shifts = [ir.Constant(_INDEX, NUM_LANES * vector) for vector in range(num_vectors)]
        return [self.lanes_of(self.builder.lshr(bits, shift)) for shift in shifts]

    def load(self, address: Any, lanes: Any = None) -> Any:
        """16 elements; of `lanes`, only those that are set are read."""
        pointer = pointer_to(self.builder, address, _LANES)
        if lanes is None:
            loaded = self.builder.load(pointer)
            loaded.align = 4
            return loaded
        kind = ir.FunctionType(_LANES, [pointer.type, ir.IntType(32), _BITS, _LANES])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.masked.load.v16f32.p0v16f32")
        return self.builder.call(function, [pointer, ir.Constant(ir.IntType(32), 4), lanes, _ZERO])

    def store(self, address: Any, value: Any, lanes: Any = None) -> None:
        """16 elements; of `lanes`, only those that are set are written."""
        pointer = pointer_to(self.builder, address, _LANES)
        if lanes is None:
            self.builder.store(value, pointer, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [_LANES, pointer.type, ir.IntType(32), _BITS])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.masked.store.v16f32.p0v16f32")
        self.builder.call(function, [value, pointer, ir.Constant(ir.IntType(32), 4), lanes])

    def splat(self, address: Any) -> Any:
        """One number in all lanes."""
        return splat(self.builder, self.builder.load(pointer_to(self.builder, address, _FLOAT)))

    def spread(self, value: Any, per_group: int, index: int) -> Any:
        """The `index`-th channel of each group of lanes, in all lanes of its group."""
        if per_group == 1:
            return value
        order = [lane // per_group * per_group + index for lane in range(NUM_LANES)]
        return self.builder.shuffle_vector(
            value, ir.Constant(_LANES, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), NUM_LANES), order)
        )

    def variable(self, value: Any) -> Any:
        """A variable, which LLVM keeps in a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def add_product(self, total: Any, one: Any, two: Any) -> None:
        """total += one * two, rounded once."""
        self.builder.store(self.builder.call(self._fma, [one, two, self.builder.load(total)]), total)

    def in_fours(self, num: Any) -> list[tuple[Any, int, Any]]:
        """Where a loop over `num` begins, how many are taken at once, and how often: four at once, then the rest."""
        fours = self.builder.lshr(num, ir.Constant(_INDEX, 2))
        end = self.builder.shl(fours, ir.Constant(_INDEX, 2))
        return [(ir.Constant(_INDEX, 0), 4, fours), (end, 1, self.builder.sub(num, end))]

    def start_of_sums(self, bias: Any, lanes: Sequence[Any]) -> list[Any]:
        """The bias, some vectors of it, or zeros where it has no address."""
        starts = [self.variable(_ZERO) for _ in lanes]
        with self.builder.if_then(self.builder.icmp_signed("!=", bias, ir.Constant(_INDEX, 0))):
            for vector, start in enumerate(starts):
                self.builder.store(self.load(self.moved(bias, vector, 64), lanes[vector]), start)
        return [self.builder.load(start) for start in starts]

    def store_all(self, places: Sequence[Sequence[Any]], totals: Sequence[Sequence[Any]]) -> None:
        """Write each variable of a table to its place."""
        for row, found in zip(places, totals, strict=True):
            for place, total in zip(row, found, strict=True):
                self.store(place, self.builder.load(total))

    def inside(self, address: Any, column: Any, width: Any, zeros: Any) -> Any:
        """The address if the column is one of the image's, else that of the zeros."""
        return self.builder.select(self.builder.icmp_unsigned("<", column, width), address, zeros)


def _declare(num_numbers: int, generate: Callable[[_Builder, Any], None]) -> Callable[[Any], None]:
    """A function of a tuple of so many integers, for Numba's loops."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        generate(_Builder(builder), cgutils.unpack_tuple(builder, args[0]))
        return context.get_dummy_value()

    @_intrinsic
    def kernel(typingctx: Any, numbers: Any) -> Any:
        return types.void(types.UniTuple(types.int64, num_numbers)), lower

    return kernel


def make_depthwise_kernel(num_pixels: int, num_taps: int, step: int, is_checked: bool) -> Callable[[Any], None]:
    """y[p, :] = bias + sum over taps of x w, for depthwise rows of `num_taps` taps that lie beside each other.

    Each vector of x is read once for all pixels and taps of a row; `step` is from pixel to pixel, in columns. Arguments
    of the kernel, with steps in bytes: address of x for the first pixel and tap; its steps over columns and rows of
    taps; the number of rows; address of the weights and their steps over columns and rows; the column of the first
    pixel and tap, and the width; the address of zeros; the address of the bias, or 0; address of y, and its step over
    pixels; the number of pixels that are stored; bits of the channels.
    """

    def generate(build: _Builder, numbers: Any) -> None:
        (
            x, column_step, row_step, num_rows, weights, weight_step, weight_row_step, column, width, zeros, bias, y,
            y_step, num_out, bits,
        ) = numbers  # fmt: skip
        builder, lanes = build.builder, build.lanes_of(bits)
        start = build.start_of_sums(bias, [lanes])[0]
        sums = [build.variable(start) for _ in range(num_pixels)]
        with cgutils.for_range(builder, num_rows) as row:
            here = build.moved(x, row.index, row_step)
            weight = build.moved(weights, row.index, weight_row_step)
            factors = [build.load(build.moved(weight, tap, weight_step)) for tap in range(num_taps)]
            for place in range((num_pixels - 1) * step + num_taps):
                address = build.moved(here, place, column_step)
                if is_checked:
                    address = build.inside(address, build.moved(column, place, 1), width, zeros)
                value = build.load(address, lanes)
                for pixel, total in enumerate(sums):
                    if 0 <= (tap := place - pixel * step) < num_taps:
                        build.add_product(total, value, factors[tap])
        for pixel, total in enumerate(sums):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(_INDEX, pixel), num_out)):
                build.store(build.moved(y, pixel, y_step), builder.load(total), lanes)

    return _declare(15, generate)


def make_row_kernel(num_pixels: int, per_group: int, num_vectors: int, is_checked: bool) -> Callable[[Any], None]:
    """y[p, :] = bias + sum over taps and inputs of x w, for `num_pixels` pixels p; those from `num_out` are not stored.

    `per_group` is the number of channels of a bundle's groups, and 0 for a wide group, which has `num_vectors` vectors
    of outputs and `num_in` inputs. Arguments of the kernel, with steps in bytes: address of x for the first pixel and
    tap; its steps over pixels, columns of taps, rows of taps; the number of rows and columns of taps; address of the
    weights and their steps over columns and rows; the column of the first pixel and tap, the steps over pixels and
    taps in columns, and the width; the address of zeros; the address of the bias, or 0; address of y, and its step
    over pixels; `num_out`; bits of the channels of x, and of y; `num_in`.
    """

    def generate(build: _Builder, numbers: Any) -> None:
        (
            x, pixel_step, tap_step, row_step, num_rows, num_columns, weights, weight_step, weight_row_step,
            column, pixel_columns, tap_columns, width, zeros, bias, y, y_step, num_out, in_bits, out_bits, num_in,
        ) = numbers  # fmt: skip
        builder = build.builder
        in_lanes, out_lanes = build.lanes_of(in_bits), build.all_lanes_of(out_bits, num_vectors)
        starts = build.start_of_sums(bias, out_lanes)
        sums = [[build.variable(start) for start in starts] for _ in range(num_pixels)]

        with cgutils.for_range(builder, num_rows) as row, cgutils.for_range(builder, num_columns) as tap:
            here = build.moved(build.moved(x, row.index, row_step), tap.index, tap_step)
            weight = build.moved(build.moved(weights, row.index, weight_row_step), tap.index, weight_step)
            first = build.moved(column, tap.index, tap_columns)
            addresses = [build.moved(here, pixel, pixel_step) for pixel in range(num_pixels)]
            if is_checked:
                columns = [build.moved(first, pixel, pixel_columns) for pixel in range(num_pixels)]
                addresses = [
                    build.inside(address, at, width, zeros) for address, at in zip(addresses, columns, strict=True)
                ]
            if per_group:
                factors = [build.load(build.moved(weight, index, 64)) for index in range(per_group)]
                for address, (total,) in zip(addresses, sums, strict=True):
                    value = build.load(address, in_lanes)
                    for index, factor in enumerate(factors):
                        build.add_product(total, build.spread(value, per_group, index), factor)
            else:
                for first_channel, channels_at_once, num_times in build.in_fours(num_in):
                    with cgutils.for_range(builder, num_times) as channel:
                        at = build.moved(first_channel, channel.index, channels_at_once)
                        for offset in range(channels_at_once):
                            of_channel = build.moved(weight, at, 64 * num_vectors)
                            vectors = range(num_vectors * offset, num_vectors * (offset + 1))
                            factors = [build.load(build.moved(of_channel, vector, 64)) for vector in vectors]
                            for address, totals in zip(addresses, sums, strict=True):
                                value = build.splat(build.moved(build.moved(address, at, 4), offset, 4))
                                for total, factor in zip(totals, factors, strict=True):
                                    build.add_product(total, value, factor)

        for pixel, totals in enumerate(sums):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(_INDEX, pixel), num_out)):
                target = build.moved(y, pixel, y_step)
                for vector, total in enumerate(totals):
                    build.store(build.moved(target, vector, 64), builder.load(total), out_lanes[vector])

    return _declare(21, generate)


def make_weight_kernel(num_taps: int, per_group: int, is_checked: bool) -> Callable[[Any], None]:
    """sums[t, i, :] += sum over pixels p of x[p + t, input i of each group] ct[p, :], for a bundle.

    Arguments of the kernel, with steps in bytes: address of ct and its steps over pixels and lines; address of x for
    the first pixel and tap, its steps over pixels, lines and taps; the column of these, its steps over pixels and taps,
    the width; the address of zeros; the numbers of pixels and lines; address of the sums and their step over taps; bits
    of the channels.
    """

    def generate(build: _Builder, numbers: Any) -> None:
        (
            ct, ct_step, ct_line_step, x, pixel_step, line_step, tap_step, column, pixel_columns, tap_columns, width,
            zeros, num_pixels, num_lines, sums, sum_step, bits,
        ) = numbers  # fmt: skip
        builder, lanes = build.builder, build.lanes_of(bits)
        places = [
            [build.moved(build.moved(sums, tap, sum_step), index, 64) for index in range(per_group)]
            for tap in range(num_taps)
        ]
        totals = [[build.variable(build.load(place)) for place in row] for row in places]
        with cgutils.for_range(builder, num_lines) as line, cgutils.for_range(builder, num_pixels) as pixel:
            factor = build.load(build.moved(build.moved(ct, line.index, ct_line_step), pixel.index, ct_step), lanes)
            here = build.moved(build.moved(x, line.index, line_step), pixel.index, pixel_step)
            first = build.moved(column, pixel.index, pixel_columns)
            for tap, row in enumerate(totals):
                address = build.moved(here, tap, tap_step)
                if is_checked:
                    address = build.inside(address, build.moved(first, tap, tap_columns), width, zeros)
                value = build.load(address, lanes)
                for index, total in enumerate(row):
                    build.add_product(total, build.spread(value, per_group, index), factor)
        build.store_all(places, totals)

    return _declare(17, generate)


def make_wide_weight_kernel(num_inputs: int, num_vectors: int) -> Callable[[Any], None]:
    """sums[i, :] += sum over pixels p of x[p, i] ct[p, :], for `num_inputs` inputs of a wide group and one tap.

    Arguments of the kernel, with steps in bytes: address of ct and its steps over pixels and lines; address of x and
    its steps; the numbers of pixels and lines, all of which are inside; address of the sums; bits of the channels of
    ct.
    """

    def generate(build: _Builder, numbers: Any) -> None:
        ct, ct_step, ct_line_step, x, pixel_step, line_step, num_pixels, num_lines, sums, bits = numbers
        builder, lanes = build.builder, build.all_lanes_of(bits, num_vectors)
        places = [
            [build.moved(build.moved(sums, index, 64 * num_vectors), vector, 64) for vector in range(num_vectors)]
            for index in range(num_inputs)
        ]
        totals = [[build.variable(build.load(place)) for place in row] for row in places]
        with cgutils.for_range(builder, num_lines) as line, cgutils.for_range(builder, num_pixels) as pixel:
            at = build.moved(build.moved(ct, line.index, ct_line_step), pixel.index, ct_step)
            factors = [build.load(build.moved(at, vector, 64), lanes[vector]) for vector in range(num_vectors)]
            here = build.moved(build.moved(x, line.index, line_step), pixel.index, pixel_step)
            for index, row in enumerate(totals):
                value = build.splat(build.moved(here, index, 4))
                for total, factor in zip(row, factors, strict=True):
                    build.add_product(total, value, factor)
        build.store_all(places, totals)

    return _declare(10, generate)
