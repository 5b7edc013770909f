"""SGD, Adam and AdamW: the update of one parameter in one pass over memory, with the bits of `torch.optim`.

In: parameter, gradient and state, dense float32 of one layout. Out: all but the gradient are updated in place. The bits
are the same as with foreach=False, fused=False, capturable=False, differentiable=False: the same roundings in the same
order, found by experiment on torch 2.13, for vector bodies and tails alike:

    a.add(b, alpha=v)            fma(v, b, a)
    a.lerp(b, w)                 fma(w, b - a, a) if |w| < 0.5 else fma(-(b - a), 1 - w, b)
    a.addcmul(b, c, value=v)     fma(v b, c, a)
    a.addcdiv(b, c, value=v)     a + (v b) / c
    sqrt                         where PyTorch was built with MKL, a call of MKL's, which is not correctly rounded

Without fused multiply-add PyTorch rounds differently; `is_bit_identical` compares once per process. Not done: amsgrad,
maximize, sparse gradients, learning rates as tensors.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy
import torch

from undertow.kernels.compiler import HAS_NUMBA, cached_njit, intrinsic, numba
from undertow.kernels.streaming import distinct
from undertow.kernels.threads import run_parallel

if HAS_NUMBA:
    from llvmlite import ir
    from numba import types

# Elements of one iteration of the parallel loop: five arrays of them stay in the L2 cache between its two passes.
_PIECE_ELEMENTS = 1 << 14
# mkl_vml_defines.h: VML_HA, VML_FTZDAZ_OFF, VML_ERRMODE_IGNORE, as PyTorch calls it.
_SQUARE_ROOT_MODE = 0x2 | 0x140000 | 0x100

_intrinsic: Any = intrinsic
# Without fastmath: LLVM fuses nothing by itself.
_loop: Any = cached_njit(error_model="numpy")
_parallel: Any = cached_njit(parallel=True, error_model="numpy")


@_intrinsic
def _fused(typing_context: Any, factor: Any, other: Any, addend: Any) -> Any:
    """factor * other + addend with one rounding."""
    signature = types.float32(types.float32, types.float32, types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return signature, generate


@_intrinsic
def _call_square_root(typing_context: Any, address: Any, number: Any, source: Any, target: Any) -> Any:
    """Call MKL's vmsSqrt, which is at an address."""
    signature = types.void(types.int64, types.int64, types.int64, types.int64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number, pointer, mode = ir.IntType(32), ir.FloatType().as_pointer(), ir.IntType(64)
        function_type = ir.FunctionType(ir.VoidType(), [number, pointer, pointer, mode])
        function = builder.inttoptr(arguments[0], function_type.as_pointer())
        pointers = [builder.inttoptr(address, pointer) for address in arguments[2:]]
        builder.call(function, [builder.trunc(arguments[1], number), *pointers, ir.Constant(mode, _SQUARE_ROOT_MODE)])
        return context.get_dummy_value()

    return signature, generate


@_loop
def _sgd_piece(
    parameter: Any, gradient: Any, buffer: Any, first: int, last: int, negative_rate: Any, momentum: Any, taken: Any,
    decay: Any, has_decay: bool, has_momentum: bool, is_first: bool, is_nesterov: bool,
) -> None:  # fmt: skip
    parameter, gradient, buffer = distinct(parameter), distinct(gradient), distinct(buffer)
    for offset in range(last - first):
        index = numpy.uint64(first + offset)
        step = gradient[index]
        if has_decay:
            step = _fused(decay, parameter[index], step)
        if has_momentum:
            moved = step if is_first else _fused(taken, step, buffer[index] * momentum)
            buffer[index] = moved
            step = _fused(momentum, moved, step) if is_nesterov else moved
        parameter[index] = _fused(negative_rate, step, parameter[index])


@_parallel
def _sgd(
    parameter: Any, gradient: Any, buffer: Any, negative_rate: Any, momentum: Any, taken: Any, decay: Any,
    has_decay: bool, has_momentum: bool, is_first: bool, is_nesterov: bool,
) -> None:  # fmt: skip
    for piece in numba.prange((parameter.size + _PIECE_ELEMENTS - 1) // _PIECE_ELEMENTS):
        first: Any = numpy.int64(piece) * _PIECE_ELEMENTS
        last = min(parameter.size, first + _PIECE_ELEMENTS)
        _sgd_piece(
            parameter, gradient, buffer, first, last, negative_rate, momentum, taken, decay, has_decay, has_momentum,
            is_first, is_nesterov,
        )  # fmt: skip


@_loop
def _moments_piece(
    parameter: Any, gradient: Any, average: Any, average_square: Any, first: int, last: int, weight: Any, rest: Any,
    is_small: bool, beta2: Any, taken: Any, shrink: Any, decay: Any, is_decoupled: bool, is_coupled: bool,
) -> None:  # fmt: skip
    parameter, gradient = distinct(parameter), distinct(gradient)
    average, average_square = distinct(average), distinct(average_square)
    for offset in range(last - first):
        index = numpy.uint64(first + offset)
        step = gradient[index]
        if is_decoupled:
            parameter[index] *= shrink
        if is_coupled:
            step = _fused(decay, parameter[index], step)
        difference = step - average[index]
        average[index] = _fused(weight, difference, average[index]) if is_small else _fused(-difference, rest, step)
        average_square[index] = _fused(taken * step, step, average_square[index] * beta2)


@_loop
def _step_piece(
    parameter: Any, average: Any, root: Any, num_elements: int, correction: Any, epsilon: Any, negative_step: Any
) -> None:
    parameter, average, root = distinct(parameter), distinct(average), distinct(root)
    for offset in range(num_elements):
        index = numpy.uint64(offset)
        divisor = root[index] / correction + epsilon
        parameter[index] += (negative_step * average[index]) / divisor


@_parallel
def _adam(
    parameter: Any, gradient: Any, average: Any, average_square: Any, weight: Any, rest: Any, is_small: bool,
    beta2: Any, taken: Any, shrink: Any, decay: Any, is_decoupled: bool, is_coupled: bool, correction: Any,
    epsilon: Any, negative_step: Any, square_root: int,
) -> None:  # fmt: skip
    for piece in numba.prange((parameter.size + _PIECE_ELEMENTS - 1) // _PIECE_ELEMENTS):
        first: Any = numpy.int64(piece) * _PIECE_ELEMENTS
        last = min(parameter.size, first + _PIECE_ELEMENTS)
        _moments_piece(
            parameter, gradient, average, average_square, first, last, weight, rest, is_small, beta2, taken, shrink,
            decay, is_decoupled, is_coupled,
        )  # fmt: skip
        root = numpy.empty(last - first, numpy.float32)
        if square_root != 0:
            _call_square_root(square_root, last - first, average_square[first:last].ctypes.data, root.ctypes.data)
        else:
            for index in range(last - first):
                root[index] = numpy.sqrt(average_square[first + index])
        _step_piece(
            parameter[first:last], average[first:last], root, last - first, correction, epsilon, negative_step
        )  # fmt: skip


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def sgd_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    is_first_step: bool,
    learning_rate: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """One step of torch.optim.SGD; at the first step the momentum buffer is written, not read."""
    flat = _flat(parameter).numpy()
    if momentum != 0 and momentum_buffer is None:
        raise ValueError("sgd_step: with momentum a momentum buffer is required; found None")
    buffer = flat if momentum_buffer is None else _flat(momentum_buffer).numpy()
    constants = (numpy.float32(value) for value in (-learning_rate, momentum, 1 - dampening, weight_decay))
    flags = (weight_decay != 0, momentum != 0, is_first_step, nesterov)
    run_parallel(_sgd, flat, _flat(gradient).numpy(), buffer, *constants, *flags)


def adam_step(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    average_square: torch.Tensor,
    step: int,
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    is_decoupled: bool,
) -> None:
    """Step number `step`, from 1, of torch.optim.Adam, or of AdamW if the weight decay is decoupled."""
    correction = (1 - beta2**step) ** 0.5
    step_size = learning_rate / (1 - beta1**step)
    weight = numpy.float32(1 - beta1)
    constants = (
        weight, numpy.float32(1) - weight, bool(abs(weight) < 0.5), numpy.float32(beta2), numpy.float32(1 - beta2),
        numpy.float32(1 - learning_rate * weight_decay), numpy.float32(weight_decay),
        weight_decay != 0 and is_decoupled, weight_decay != 0 and not is_decoupled,
    )  # fmt: skip
    last_constants = (numpy.float32(correction), numpy.float32(epsilon), numpy.float32(-step_size))
    arrays = (_flat(tensor).numpy() for tensor in (parameter, gradient, average, average_square))
    run_parallel(_adam, *arrays, *constants, *last_constants, _square_root())


@functools.cache
def _square_root() -> int:
    """The address of the square root that PyTorch calls; 0 for the processor's instruction."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():  # only PyTorch for Linux has MKL and this file name
        return 0
    function = getattr(ctypes.CDLL(str(library)), "vmsSqrt", None)  # the library is loaded already
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def is_bit_identical() -> bool:
    """Whether this PyTorch rounds as described above, found once from small examples."""
    plain: Any = {"dtype": torch.float32, "device": "cpu"}
    generator = torch.Generator().manual_seed(0)
    for options in ({"weight_decay": 0.1}, {"weight_decay": 0.1, "betas": (0.4, 0.9)}):
        parameter = torch.randn(1000, generator=generator, **plain).requires_grad_()
        parameter.grad = torch.randn(1000, generator=generator, **plain)
        own = parameter.detach().clone()
        state = torch.zeros(1000, **plain), torch.zeros(1000, **plain)
        optimizer = torch.optim.Adam([parameter], foreach=False, fused=False, **options)
        for step in (1, 2):
            optimizer.step()
            beta1, beta2 = optimizer.defaults["betas"]
            adam_step(own, parameter.grad, *state, step, 1e-3, beta1, beta2, 1e-8, 0.1, False)
        if not torch.equal(parameter.detach(), own):
            return False
    return True
