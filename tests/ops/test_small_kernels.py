"""Kernels of small weights against PyTorch in float64: single bits exactly, others within the rounding of sums."""

import numpy
import pytest
import torch
from torch.nn import functional

from undertow.kernels.bit_product import convolve_signs, pack_filters, unpack_filters
from undertow.kernels.packed_rows import multiply_few, pack_rows, unpack_rows
from undertow.kernels.sparse_product import SparseRows, multiply_sparse, multiply_sparse_vector

UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0)


def assert_within(found, exact, magnitudes, num_terms):
    """A sum of n products in any order, a scale and a bias: n + 3 roundings, each of at most the magnitudes' sum.

    gamma(n) = n u / (1 - n u) bounds them together (Higham, 2002, section 3.1).
    """
    n = num_terms + 3
    bound = n * UNIT / (1 - n * UNIT) * magnitudes
    excess = (found.double() - exact).abs() - bound
    assert excess.max() <= 0, excess.max()


@pytest.mark.parametrize(
    ("batch", "channels", "size", "filters", "kernel", "stride", "pad"),
    [
        (2, 20, (9, 7), 13, (3, 3), (1, 1), (1, 1)),
        (1, 64, (14, 14), 33, (3, 3), (2, 2), (1, 1)),
        (3, 130, (5, 40), 16, (5, 3), (1, 2), (2, 1)),
        (2, 70, (6, 6), 8, (1, 1), (1, 1), (0, 0)),
        (1, 3, (5, 5), 4, (3, 3), (2, 3), (3, 3)),  # windows that see nothing of the image
    ],
)
def test_convolutions_of_signs_have_the_bits_of_float_ones(
    batch, channels, size, filters, kernel, stride, pad, threads
):
    x, weight = torch.randn(batch, channels, *size), torch.randn(filters, channels, *kernel)
    x[0, :, 0, 0] = torch.tensor([0.0, -0.0, float("inf")])[torch.arange(channels) % 3]
    sums = functional.conv2d(signs(x), signs(weight), None, stride, pad)
    means, scales, bias = torch.rand(batch, 1, *sums.shape[2:]), torch.rand(filters), torch.randn(filters)
    expected = sums * means * scales[:, None, None] + bias[:, None, None]
    packed = pack_filters(weight >= 0)
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=layout)
        assert torch.equal(convolve_signs(given, packed, means, scales, bias, stride, pad), expected)
    assert torch.equal(unpack_filters(packed), weight >= 0)


def test_sums_of_signs_are_integers_counted_one_by_one():
    """Shares no code with PyTorch's convolution."""
    x, weight = torch.randn(1, 5, 4, 4), torch.randn(2, 5, 3, 3)
    ones = torch.ones(2)
    found = convolve_signs(x, pack_filters(weight >= 0), torch.ones(1, 4, 4), ones, torch.zeros(2), (1, 1), (1, 1))
    for filter_, row, column in numpy.ndindex(2, 4, 4):
        total = 0
        for channel, down, right in numpy.ndindex(5, 3, 3):
            y, z = row + down - 1, column + right - 1
            if 0 <= y < 4 and 0 <= z < 4:
                same = (x[0, channel, y, z] >= 0) == (weight[filter_, channel, down, right] >= 0)
                total += 1 if same else -1
        assert found[0, filter_, row, column] == total


@pytest.mark.parametrize("num_bits", [8, 4, 1])
@pytest.mark.parametrize(("rows", "columns"), [(7, 37), (5, 200), (3, 64), (1, 1)])
def test_products_with_packed_rows(num_bits, rows, columns, threads):
    low, high = {8: (-128, 128), 4: (-8, 8), 1: (0, 2)}[num_bits]
    integers = torch.randint(low, high, (rows, columns))
    integers = 2 * integers - 1 if num_bits == 1 else integers
    scales, bias = torch.rand(rows), torch.randn(rows)
    packed = pack_rows(integers, scales, num_bits)
    assert packed.data.nbytes * 8 == rows * -(-columns // 32) * 32 * num_bits
    dense = integers.double() * scales.double()[:, None]
    assert torch.equal(unpack_rows(packed, 0, rows), integers.float() * scales[:, None])
    assert torch.equal(unpack_rows(packed, rows - 1, rows), integers[-1:].float() * scales[-1:, None])
    for batch in range(1, 7):
        x = torch.randn(batch, columns)
        exact = functional.linear(x.double(), dense, bias.double())
        magnitudes = functional.linear(x.double().abs(), dense.abs(), bias.double().abs())
        assert_within(multiply_few(packed, bias, x), exact, magnitudes, columns)


def sparse(rows, columns, density, num_codes, column_type, code_type):
    mask = torch.rand(rows, columns) < density
    mask[rows // 2] = False  # a row without weights
    codes = torch.randint(0, num_codes, (int(mask.sum()),))
    codebook, scales = torch.randn(num_codes), torch.rand(rows)
    dense = torch.zeros(rows, columns)
    dense[mask] = codebook[codes]
    starts = torch.zeros(rows + 1, dtype=torch.int64)
    starts[1:] = mask.sum(1).cumsum(0)
    found = SparseRows(
        starts,
        torch.from_numpy(mask.nonzero()[:, 1].numpy().astype(column_type)),
        torch.from_numpy(codes.numpy().astype(code_type)),
        codebook,
        scales,
    )
    return found, dense.double() * scales.double()[:, None]


@pytest.mark.parametrize(("column_type", "code_type"), [(numpy.uint16, numpy.uint8), (numpy.int32, numpy.uint16)])
def test_products_with_sparse_rows(column_type, code_type, threads):
    rows, columns = 70, 301
    weights, dense = sparse(rows, columns, 0.1, 40, column_type, code_type)
    bias = torch.randn(rows)
    x = torch.randn(columns)
    exact, magnitudes = dense @ x.double() + bias.double(), dense.abs() @ x.double().abs() + bias.double().abs()
    assert_within(multiply_sparse_vector(weights, bias, x), exact, magnitudes, columns)
    for width in (16, 48, 208, 576):  # every kernel, and two groups of positions
        x = torch.randn(columns, width)
        offsets = torch.arange(columns) * 4 * width
        exact = dense @ x.double() + bias.double()[:, None]
        magnitudes = dense.abs() @ x.double().abs() + bias.double().abs()[:, None]
        assert_within(multiply_sparse(weights, bias, x, offsets, width), exact, magnitudes, columns)
