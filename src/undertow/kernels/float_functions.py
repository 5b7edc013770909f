"""exp, tanh, erf and functions made from them, for loops that LLVM turns into vector code.

In and out: float32 scalars, inside functions that Numba compiles. No branches, no tables, no calls of the C library.
NaN gives NaN; infinities give the limits. Errors over the whole float range, checked by the tests: exp 2 units in the
last place (of 2**-126 below it), tanh and erf 3, sigmoid 3 of max(result, 2**-100). gelu is 0.5 x (1 + erf) as in
PyTorch, so where x is very negative its error is a few units of x, not of the result.

exp: x = n ln 2 + r with |r| <= ln 2 / 2, e^r by a polynomial, 2^n by writing the exponent's bits (Cody and Waite 1980).
The polynomials are minimax fits by Lawson's iteration over the intervals named.
"""

from __future__ import annotations

from typing import Any

import numpy

from undertow.kernels.compiler import HAS_NUMBA, cached_njit, intrinsic

if HAS_NUMBA:
    from numba import types

_function: Any = cached_njit(forceinline=True, fastmath={"contract"}, error_model="numpy")
_intrinsic: Any = intrinsic

_ZERO, _HALF, _ONE, _TWO = (numpy.float32(value) for value in (0, 0.5, 1, 2))
# Above the first, e^x is infinite; below the second, it rounds to 0.
_EXP_HIGH, _EXP_LOW = numpy.float32(89), numpy.float32(-104)
_LOG2_E = numpy.float32(1.4426950408889634)
# ln 2 in two pieces: the first has 9 bits, so its multiples by n are exact.
_LN2_HIGH, _LN2_LOW = numpy.float32(0.693359375), numpy.float32(-2.12194440054690583e-4)
# Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits; subtracting it gives the integer as a float.
_ROUNDER, _ROUNDER_BITS = numpy.float32(12582912), numpy.int32(0x4B400000)
# (e^r - 1 - r) / r^2 on |r| < 0.35
_EXP = tuple(
    numpy.float32(value)
    for value in (0.500000008258432, 0.1666666687237454, 0.04166625418729563, 0.008333261613433816,
                  0.0013947198862813263, 0.0001991990385906588)
)  # fmt: skip
# (tanh(x) / x - 1) / x^2 in x^2, on |x| < 0.625
_TANH = tuple(
    numpy.float32(value)
    for value in (-0.3333328392520561, 0.13331491284915659, -0.05374349791582691, 0.02065058678402451,
                  -0.005717044510782401)
)  # fmt: skip
# erf(x) / x in x^2, on |x| < 1
_ERF = tuple(
    numpy.float32(value)
    for value in (1.128379165913767, -0.3761262713607933, 0.11283600177589209, -0.02685444464897794,
                  0.0051895354497692725, -0.0008020842263920966, 7.889122819211246e-05)
)  # fmt: skip
# -ln(1 - erf(x)) on 0.95 < x < 4; erf rounds to 1 beyond
_ERFC = tuple(
    numpy.float32(value)
    for value in (-0.0001781225663897712, 1.12952735126048, 0.6333328674723133, 0.10827845904411101,
                  -0.025101740745754414, 0.004153765841831508, -0.0004265022550306781, 1.9262199466271103e-05,
                  1.69784839380415e-07)
)  # fmt: skip
_INVERSE_ROOT_TWO = numpy.float32(0.7071067811865476)
# gelu's tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
_GELU_INNER, _GELU_CUBE = numpy.float32(0.7978845608028654), numpy.float32(0.044715)
_DENSITY = numpy.float32(0.3989422804014327)


@_intrinsic
def _bits_of(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@_intrinsic
def _float_of(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@_function
def exp(x: Any) -> Any:
    """e^x."""
    x = _EXP_HIGH if x > _EXP_HIGH else x
    x = _EXP_LOW if x < _EXP_LOW else x
    rounded = x * _LOG2_E + _ROUNDER
    n = numpy.int32(_bits_of(rounded) - _ROUNDER_BITS)
    whole = rounded - _ROUNDER
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    tail = ((((_EXP[5] * r + _EXP[4]) * r + _EXP[3]) * r + _EXP[2]) * r + _EXP[1]) * r + _EXP[0]
    power = (tail * (r * r) + r) + _ONE
    # In two factors, since 2^n may be outside the float range while the result is inside.
    half = numpy.int32(n >> numpy.int32(1))
    low = _float_of(numpy.int32((half + numpy.int32(127)) << numpy.int32(23)))
    high = _float_of(numpy.int32((n - half + numpy.int32(127)) << numpy.int32(23)))
    return power * low * high


@_function
def tanh(x: Any) -> Any:
    """(e^2x - 1) / (e^2x + 1)."""
    size = -x if x < _ZERO else x
    square = x * x
    tail = (((_TANH[4] * square + _TANH[3]) * square + _TANH[2]) * square + _TANH[1]) * square + _TANH[0]
    near = x * (tail * square) + x
    far = _ONE - _TWO / (exp(size + size) + _ONE)
    far = -far if x < _ZERO else far
    return near if size < numpy.float32(0.625) else far


@_function
def erf(x: Any) -> Any:
    """2 / sqrt(pi) times the integral of e^(-t^2) from 0 to x."""
    size = -x if x < _ZERO else x
    square = x * x
    near = _ERF[6] * square + _ERF[5]
    near = (((near * square + _ERF[4]) * square + _ERF[3]) * square + _ERF[2]) * square + _ERF[1]
    near = (near * square + _ERF[0]) * x
    a = numpy.float32(4) if size > numpy.float32(4) else size
    far = (((_ERFC[8] * a + _ERFC[7]) * a + _ERFC[6]) * a + _ERFC[5]) * a + _ERFC[4]
    far = (((far * a + _ERFC[3]) * a + _ERFC[2]) * a + _ERFC[1]) * a + _ERFC[0]
    far = _ONE - exp(-far)
    far = -far if x < _ZERO else far
    return near if size < _ONE else far


@_function
def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp(-x))


@_function
def gelu(x: Any) -> Any:
    """x times the normal distribution function."""
    return _HALF * x * (_ONE + erf(x * _INVERSE_ROOT_TWO))


@_function
def gelu_derivative(x: Any) -> Any:
    """Phi(x) + x phi(x)."""
    return _HALF * (_ONE + erf(x * _INVERSE_ROOT_TWO)) + x * (_DENSITY * exp(-_HALF * x * x))


@_function
def gelu_tanh(x: Any) -> Any:
    """The form with tanh, as in GPT-2."""
    return _HALF * x * (_ONE + tanh(_GELU_INNER * (x + _GELU_CUBE * x * x * x)))


@_function
def gelu_tanh_derivative(x: Any) -> Any:
    """0.5 (1 + t) + 0.5 x (1 - t^2) u', with t = tanh(u)."""
    t = tanh(_GELU_INNER * (x + _GELU_CUBE * x * x * x))
    slope = _GELU_INNER * (_ONE + numpy.float32(3) * _GELU_CUBE * x * x)
    return _HALF * (_ONE + t) + _HALF * x * (_ONE - t * t) * slope
