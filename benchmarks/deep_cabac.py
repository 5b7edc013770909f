"""The bytes that nncodec's DeepCABAC takes for integers, such as those that `squeezenet.py --integers` writes.

nncodec needs numpy below 2, so this runs in an environment of its own, with nncodec alone:
python benchmarks/deep_cabac.py integers.npz
"""

from __future__ import annotations

import sys

import numpy
from nncodec.extensions import deepCABAC
from nncodec.nnc_core.hdsp.hdsp_tool import HDSP_OPTS_OFF


def main() -> None:
    """Print the bytes of each setting: with and without optimised contexts, in each order of the weights."""
    layers = list(numpy.load(sys.argv[1]).values())
    for is_optimised in (0, 1):
        for order in (0, 1, 3, 4):
            num_bytes = 0
            for layer in layers:
                numbers = numpy.ascontiguousarray(layer.reshape(len(layer), -1))
                encoder = deepCABAC.Encoder()
                encoder.initCtxModels(11, is_optimised)
                rows = numpy.zeros(len(numbers), numpy.int32)
                encoder.encodeLayer(numbers, 0, order, 0, 0, 0, rows, *HDSP_OPTS_OFF(), 0, 0)
                num_bytes += len(encoder.finish().tobytes())
            print(f"optimised {is_optimised}, order {order}: {num_bytes:,} bytes")


if __name__ == "__main__":
    main()
