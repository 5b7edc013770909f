"""Undertow's own kernels against PyTorch's, bit for bit, and that they leave thread counts alone."""

import os
import subprocess
import sys

import pytest
import torch

from undertow.alternatives.convolution_parts import INPUT_PART, WEIGHT_PART
from undertow.kernels.batch_norm_again import has_pytorch_bits, normalise_again
from undertow.kernels.bits import pack_mask, pack_signs, select_by_bits, unpack_mask
from undertow.kernels.window_codes import decode_windows, encode_windows

aten = torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5, 17), (2, 4, 6, 8)])
def test_threshold_from_signs(shape, dtype):
    y, ct = torch.randn(shape, dtype=dtype).relu(), torch.randn(shape, dtype=dtype)
    y.view(-1)[0] = float("nan")
    packed = pack_signs(y)
    assert packed.numel() == (y.numel() + 7) // 8
    found = select_by_bits(ct, packed, y.stride())
    assert torch.equal(found.view(torch.uint8), aten.threshold_backward(ct, y, 0).view(torch.uint8))


def test_threshold_from_signs_in_another_layout():
    y = torch.randn(2, 4, 6, 8).relu().contiguous(memory_format=torch.channels_last)
    ct = torch.randn(2, 4, 6, 8)
    assert torch.equal(select_by_bits(ct, pack_signs(y), y.stride()), aten.threshold_backward(ct, y, 0))


@pytest.mark.parametrize("shape", [(1,), (9,), (4, 6, 10)])
def test_masks(shape):
    mask = torch.rand(shape) < 0.5
    assert torch.equal(unpack_mask(pack_mask(mask), mask.shape, mask.stride()), mask)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((2, 2), (2, 2), (0, 0), (1, 1)), ((3, 3), (2, 2), (1, 1), (1, 1)), ((3, 2), (1, 2), (1, 1), (2, 1))],
)
def test_window_codes(kernel, stride, padding, dilation):
    x = torch.randn(2, 3, 13, 11)
    _, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation)
    geometry = (x.shape[-1], kernel[1], stride, padding, dilation)
    codes = encode_windows(indices, *geometry)
    assert codes.dtype is torch.uint8
    assert torch.equal(decode_windows(codes, *geometry), indices)


@pytest.mark.skipif(not has_pytorch_bits(), reason="PyTorch's kernel rounds differently on this processor")
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 64, 8, 8), (4, 5), (3, 4, 6), (2, 33, 17, 9), (2, 2, 3, 4, 5)])
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_normalising_again(shape, is_affine, is_last):
    def draw():
        tensor = 1e3 * torch.randn(shape) + 5
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if is_last and len(shape) > 3 else tensor

    x, residual = draw(), draw()
    residual[(0,) * len(shape)] = float("nan")
    weight, bias = (torch.randn(shape[1]), torch.randn(shape[1])) if is_affine else (None, None)
    y, mean, inverse_std = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    factors = (x, weight, bias, mean, inverse_std)
    pairs = [
        (normalise_again(*factors), y),
        (normalise_again(*factors, None, 0.0), y.relu()),
        (normalise_again(*factors, None, 0.0, 6.0), aten.hardtanh(y, 0, 6)),
        (normalise_again(*factors, residual), y + residual),
        (normalise_again(*factors, residual, 0.0), (residual + y).relu()),
    ]
    for found, expected in pairs:
        assert found.stride() == expected.stride()
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("shape", "weight_shape", "stride", "padding", "dilation", "groups"),
    [
        ((3, 4, 9, 11), (6, 4, 3, 3), 1, 1, 1, 1),
        ((2, 8, 14, 14), (4, 8, 1, 1), 2, 0, 1, 1),
        ((2, 6, 12, 12), (6, 1, 5, 5), 1, 2, 1, 6),
        ((2, 16, 20), (8, 16, 3), 1, 2, 2, 1),
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_parts_of_a_convolution(shape, weight_shape, stride, padding, dilation, groups, is_last):
    x, weight, bias = torch.randn(shape), torch.randn(weight_shape), torch.randn(weight_shape[0])
    if is_last and len(shape) == 4:
        x = x.to(memory_format=torch.channels_last)
    each = [[item] * (len(shape) - 2) for item in (stride, padding, dilation)]
    geometry = (*each, False, [0] * (len(shape) - 2), groups)
    ct = torch.randn_like(aten.convolution(x, weight, bias, *geometry))
    whole = aten.convolution_backward(ct, x, weight, [weight_shape[0]], *geometry, [True, True, True])
    parts = (
        INPUT_PART(ct, weight, tuple(x.shape), x.stride(), *geometry),
        *WEIGHT_PART(ct, x, weight, [weight_shape[0]], *geometry, True),
    )
    assert all(map(torch.equal, parts, whole))
    assert WEIGHT_PART(ct, x, weight, None, *geometry, False)[1] is None


def test_the_thread_count_stays():
    code = (
        "import torch; from undertow.kernels.bits import pack_signs; before = torch.get_num_threads();"
        "pack_signs(torch.randn(100)); assert torch.get_num_threads() == before == 1, torch.get_num_threads()"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
