"""Products and convolutions of signs, packed 64 to a word: float32 in, float32 out, single bits in between.

In: x in rows of channels, weights as packed signs; and what a layer multiplies its sums with. Out: for each output
pixel and filter ((sum * k) * alpha) + bias, each operation rounded as PyTorch rounds it. The sums are integers below
2^24, so float32 holds them exactly, in whatever order they are added: results have the bits of a float convolution of
signs. A sign is +1 where x >= 0, else -1 (a NaN too). What pads the image counts as 0, not as a sign: it is packed as
-1 and taken back, by the number of set bits of each tap of each filter. A product of matrices is a convolution of 1x1.

Not done: dilation, groups, several short runs of channels in one word: 20 channels take as long as 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy
import torch
from torch import Tensor

from undertow.kernels.bit_tiles import NUM_LANES, make_bit_kernel
from undertow.kernels.compiler import cached_njit
from undertow.kernels.convolution.winograd_tiles import tail_bits
from undertow.kernels.threads import run_parallel
from undertow.kernels.vectors import at_least_zero, load_where, store_two_bytes

WORD_BITS = 64
# 8 x 16 sums in 16 registers.
_NUM_VECTORS = 2
_PANEL = _NUM_VECTORS * NUM_LANES
_PIXELS = 32  # of a thread's block: its sums and a panel of weights stay in the L1 cache

_eight_rows = make_bit_kernel(8, _NUM_VECTORS)
_four_rows = make_bit_kernel(4, _NUM_VECTORS)
_two_rows = make_bit_kernel(2, _NUM_VECTORS)
_one_row = make_bit_kernel(1, _NUM_VECTORS)


@dataclass(frozen=True)
class PackedSigns:
    """Filters as bits. `words` is [panel of 16 filters][word][filter], a filter's words by tap, then by channel."""

    words: Tensor  # int64
    corrections: Tensor  # float32, [tap, filter]: what to add where the tap lies outside the image
    num_filters: int
    num_channels: int
    kernel: tuple[int, int]


def num_words(num_channels: int) -> int:
    """How many words the signs of one pixel take."""
    return -(-num_channels // WORD_BITS)


def pack_filters(is_positive: Tensor) -> PackedSigns:
    """Pack signs given as bool [filters, channels, height, width], or [filters, channels]."""
    if is_positive.ndim == 2:
        is_positive = is_positive[:, :, None, None]
    num_filters, num_channels, *kernel = is_positive.shape
    by_tap = is_positive.permute(0, 2, 3, 1).numpy()
    bits = numpy.zeros((-(-num_filters // _PANEL) * _PANEL, *kernel, num_words(num_channels) * WORD_BITS), numpy.bool_)
    bits[:num_filters, :, :, :num_channels] = by_tap
    words = numpy.packbits(bits, axis=-1, bitorder="little").view(numpy.int64)
    panels = words.reshape(-1, _PANEL, words[0].size).transpose(0, 2, 1)
    counts = by_tap.sum(-1).reshape(num_filters, -1).T
    return PackedSigns(
        torch.from_numpy(numpy.ascontiguousarray(panels)),
        torch.from_numpy(numpy.ascontiguousarray((2.0 * counts - num_channels).astype(numpy.float32))),
        num_filters,
        num_channels,
        (kernel[0], kernel[1]),
    )


def unpack_filters(filters: PackedSigns) -> Tensor:
    """Whether each weight is positive, [filters, channels, height, width]."""
    words = numpy.ascontiguousarray(filters.words.numpy().transpose(0, 2, 1)).reshape(
        -1, *filters.kernel, num_words(filters.num_channels)
    )
    bits = numpy.unpackbits(words[: filters.num_filters].view(numpy.uint8), axis=-1, bitorder="little")
    by_tap = torch.from_numpy(bits[..., : filters.num_channels]).to(torch.bool)
    return by_tap.permute(0, 3, 1, 2)


@cached_njit(parallel=True, error_model="numpy")
def _pack_pixels(x: int, num_channels: int, sizes: Any, pad: Any, packed: Any) -> None:
    """Signs of channels_last pixels into the inside of padded images of words, [image, row, column, word]."""
    num_images, height, width = sizes
    row_pad, column_pad = pad
    for line in numba.prange(num_images * height):
        image, row = line // height, line % height
        for column in range(width):
            source = x + 4 * num_channels * (line * width + column)
            target = packed[image, row + row_pad, column + column_pad].ctypes.data
            for channel in range(0, num_channels, 16):
                inside = tail_bits(num_channels, channel)
                found = at_least_zero(load_where(source + 4 * channel, inside)) & inside
                store_two_bytes(target + channel // 8, found)


@numba.njit(error_model="numpy")
def _multiply(
    a: int, a_row: int, offsets: int, b: int, c: int, c_row: int, num_rows: int, num_terms: int, num_bits: int
) -> None:
    row = 0
    while row + 8 <= num_rows:
        _eight_rows(a + row * a_row, a_row, offsets, b, c + row * c_row, c_row, num_terms, num_bits)
        row += 8
    if num_rows & 4:
        _four_rows(a + row * a_row, a_row, offsets, b, c + row * c_row, c_row, num_terms, num_bits)
        row += 4
    if num_rows & 2:
        _two_rows(a + row * a_row, a_row, offsets, b, c + row * c_row, c_row, num_terms, num_bits)
        row += 2
    if num_rows & 1:
        _one_row(a + row * a_row, a_row, offsets, b, c + row * c_row, c_row, num_terms, num_bits)


@numba.njit(error_model="numpy")
def _take_back_padding(
    sums: Any, corrections: Any, kernel: Any, stride: Any, pad: Any, size: Any, row: int, column: int, num: int
) -> None:
    """Add to each pixel's sums the corrections of its taps that lie outside."""
    for pixel in range(num):
        for tap_row in range(kernel[0]):
            y = row * stride[0] + tap_row - pad[0]
            for tap_column in range(kernel[1]):
                x = (column + pixel) * stride[1] + tap_column - pad[1]
                if not (0 <= y < size[0] and 0 <= x < size[1]):
                    tap = tap_row * kernel[1] + tap_column
                    for filter_ in range(corrections.shape[1]):
                        sums[pixel, filter_] += corrections[tap, filter_]


@cached_njit(parallel=True, error_model="numpy")
def _convolve(
    packed: Any, words: Any, corrections: Any, offsets: Any, kernel: Any, stride: Any, pad: Any, num_channels: int,
    input_scales: Any, scales: Any, bias: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    num_images, out_height, out_width, num_filters = out.shape
    size = packed.shape[1] - 2 * pad[0], packed.shape[2] - 2 * pad[1]
    pieces = (out_width + _PIXELS - 1) // _PIXELS
    num_terms, num_bits = offsets.size, num_channels * kernel[0] * kernel[1]
    a_row = 8 * stride[1] * packed.shape[3]
    for unit in numba.prange(num_images * out_height * pieces):
        image, rest = unit // (out_height * pieces), unit % (out_height * pieces)
        row, column = rest // pieces, rest % pieces * _PIXELS
        num = min(_PIXELS, out_width - column)
        sums = scratch[numba.get_thread_id()]
        a = packed[image, row * stride[0], column * stride[1]].ctypes.data
        for panel in range(words.shape[0]):
            _multiply(
                a, a_row, offsets.ctypes.data, words[panel].ctypes.data, sums.ctypes.data + 4 * panel * _PANEL,
                4 * sums.shape[1], num, num_terms, num_bits,
            )  # fmt: skip
        if pad[0] or pad[1]:
            _take_back_padding(sums, corrections, kernel, stride, pad, size, row, column, num)
        for pixel in range(num):
            k = input_scales[image, row, column + pixel]
            for filter_ in range(num_filters):
                out[image, row, column + pixel, filter_] = sums[pixel, filter_] * k * scales[filter_] + bias[filter_]


@dataclass(frozen=True)
class PackedImages:
    """Signs of images, padded with -1."""

    words: Any  # int64, [image, row, column, word]
    num_channels: int


def pack_images(x: Tensor, pad: tuple[int, int]) -> PackedImages:
    """The signs of x [n, c, h, w]."""
    rows = x.permute(0, 2, 3, 1).contiguous()
    num_images, height, width, num_channels = rows.shape
    size = num_images, height + 2 * pad[0], width + 2 * pad[1], num_words(num_channels)
    words = numpy.zeros(size, numpy.int64)
    run_parallel(_pack_pixels, rows.data_ptr(), num_channels, (num_images, height, width), pad, words)
    return PackedImages(words, num_channels)


def convolve_packed(
    images: PackedImages,
    filters: PackedSigns,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor,
    stride: tuple[int, int],
    pad: tuple[int, int],
) -> Tensor:
    """((images * filters) * input_scales) * scales + bias, [n, c, h, w]; input_scales has one per output pixel."""
    num_images, padded_height, padded_width, size = images.words.shape
    taps = numpy.arange(filters.kernel[0])[:, None] * padded_width + numpy.arange(filters.kernel[1])
    offsets = 8 * (taps[:, :, None] * size + numpy.arange(size)).reshape(-1)
    out_size = [
        (length - filters.kernel[dim]) // stride[dim] + 1 for dim, length in enumerate((padded_height, padded_width))
    ]
    out = torch.empty(num_images, *out_size, filters.num_filters)
    scratch = numpy.empty((torch.get_num_threads(), _PIXELS, filters.words.shape[0] * _PANEL), numpy.float32)
    run_parallel(
        _convolve, images.words, filters.words.numpy(), filters.corrections.numpy(), offsets, filters.kernel, stride,
        pad, images.num_channels, input_scales.reshape(num_images, *out_size).numpy(), scales.numpy(), bias.numpy(),
        scratch, out.numpy(),
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def convolve_signs(
    x: Tensor,
    filters: PackedSigns,
    input_scales: Tensor,
    scales: Tensor,
    bias: Tensor,
    stride: tuple[int, int],
    pad: tuple[int, int],
) -> Tensor:
    """The same for the signs of x."""
    return convolve_packed(pack_images(x, pad), filters, input_scales, scales, bias, stride, pad)
