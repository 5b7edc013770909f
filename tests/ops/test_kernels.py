"""Undertow's own kernels against PyTorch's, bit for bit, and what they leave alone."""

import os
import subprocess
import sys

import pytest
import torch

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


def test_the_thread_count_stays():
    code = (
        "import torch; from undertow.kernels.bits import pack_signs; before = torch.get_num_threads();"
        "pack_signs(torch.randn(100)); assert torch.get_num_threads() == before == 1, torch.get_num_threads()"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
