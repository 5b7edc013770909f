"""Convolution algorithms for the CPU, each with forward pass, cotangent of the input and cotangent of the weights.

In: dense channels_last float32 tensors and contiguous weights. Out: written into given tensors. `ALGORITHMS` lists all
of them, and is empty without Numba. The caller measures which is fastest for a shape. Nothing here knows of Programs or
plans.
"""

from __future__ import annotations

from undertow.kernels.compiler import HAS_NUMBA
from undertow.kernels.convolution.algorithm import Algorithm, Pass, PreparedAlgorithm
from undertow.kernels.convolution.shape import ConvolutionShape, shape_from, shape_of

ALGORITHMS: tuple[Algorithm, ...] = ()
if HAS_NUMBA:
    from undertow.kernels.convolution.direct import Direct
    from undertow.kernels.convolution.fourier import Fourier
    from undertow.kernels.convolution.grouped import Grouped
    from undertow.kernels.convolution.im2col import Im2col
    from undertow.kernels.convolution.patches import BlockedIm2col, Pointwise
    from undertow.kernels.convolution.plain import Plain
    from undertow.kernels.convolution.winograd import Winograd

    ALGORITHMS = (
        Plain(),
        Direct(),
        Im2col(),
        BlockedIm2col(),
        Winograd(2),
        Winograd(4),
        Fourier(),
        Pointwise(),
        Grouped(),
    )

__all__ = ["ALGORITHMS", "Algorithm", "ConvolutionShape", "Pass", "PreparedAlgorithm", "shape_from", "shape_of"]
