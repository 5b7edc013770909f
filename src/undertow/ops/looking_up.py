"""Weights that share values, as an operation of PyTorch's dispatcher with a derivative.

    look_up(codebook, codes)       w_i = codebook[codes_i - 1], and 0 where codes_i is 0: a removed weight
    sum_by_code(ct, codes, num)    s_k = the sum of ct_i over all i with codes_i = k + 1

Each is the other's derivative: a shared value gets the sum of its weights' gradients (Han, Mao & Dally 2016). Codes are
integers in the shape of the weights, uint8 where that is enough. Sums are made in float64 and rounded once: on the CPU
in the order of the weights, so that they do not depend on threads, on a GPU code by code, since adding many weights to
a few places at once would take turns, in no fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undertow.kernels.compiler import HAS_NUMBA, cached_njit

MAX_BYTE_CODES = 255
# How PyTorch names the autograd Functions that it makes for operations of this library.
OWN_DERIVATIVES = "GeneratedBackwardFor_undertow_"


@cached_njit(error_model="numpy")
def _look_up_loop(codebook: Any, codes: Any, weights: Any) -> None:
    for index in range(codes.size):
        code = codes[index]
        weights[index] = codebook[code - 1] if code else 0


@cached_njit(error_model="numpy")
def _sum_loop(cts: Any, codes: Any, sums: Any) -> None:
    for index in range(codes.size):
        if codes[index]:
            sums[codes[index] - 1] += cts[index]


def _is_plain(tensor: Tensor, codes: Tensor) -> bool:
    return HAS_NUMBA and codes.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def _look_up(codebook: Tensor, codes: Tensor) -> Tensor:
    if _is_plain(codebook, codes):
        weights = torch.empty(codes.shape, dtype=codebook.dtype)
        flat = codes.contiguous().view(-1).numpy()
        _look_up_loop(codebook.detach().contiguous().numpy(), flat, weights.view(-1).numpy())
        return weights
    table = torch.cat([codebook.new_zeros(1), codebook])
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def _sum_by_code(ct: Tensor, codes: Tensor, num: int) -> Tensor:
    if _is_plain(ct, codes):
        sums = torch.zeros(num, dtype=torch.float64)
        _sum_loop(ct.detach().contiguous().view(-1).numpy(), codes.contiguous().view(-1).numpy(), sums.numpy())
        return sums.to(ct.dtype)
    zero = ct.new_zeros(())
    parts = [torch.where(codes == code, ct, zero).sum(dtype=torch.float64) for code in range(1, num + 1)]
    return torch.stack(parts).to(ct.dtype) if parts else ct.new_zeros(0)


_library = torch.library.Library("undertow", "DEF")  # noqa: TOR901  it lives as long as the process
_library.define("look_up(Tensor codebook, Tensor codes) -> Tensor")
_library.define("sum_by_code(Tensor ct, Tensor codes, int num) -> Tensor")
_library.impl("look_up", _look_up, "CompositeExplicitAutograd")
_library.impl("sum_by_code", _sum_by_code, "CompositeExplicitAutograd")

LOOK_UP = torch.ops.undertow.look_up.default
SUM_BY_CODE = torch.ops.undertow.sum_by_code.default


@torch.library.register_fake("undertow::look_up", lib=_library)
def _look_up_type(codebook: Tensor, codes: Tensor) -> Tensor:
    return codebook.new_empty(codes.shape)


@torch.library.register_fake("undertow::sum_by_code", lib=_library)
def _sum_by_code_type(ct: Tensor, codes: Tensor, num: int) -> Tensor:
    return ct.new_empty(num)


def _keep_codes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num = len(inputs[0])


def _look_up_backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None]:
    return SUM_BY_CODE(ct, ctx.saved_tensors[0], ctx.num), None


def _sum_by_code_backward(ctx: Any, ct: Tensor) -> tuple[Tensor, None, None]:
    return LOOK_UP(ct, ctx.saved_tensors[0]), None, None


torch.library.register_autograd("undertow::look_up", _look_up_backward, setup_context=_keep_codes, lib=_library)
torch.library.register_autograd("undertow::sum_by_code", _sum_by_code_backward, setup_context=_keep_codes, lib=_library)
