"""Another way to run max pooling where nobody reads the indices, as in evaluation. EXACT: a maximum is not rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from undertow.ir import Node
from undertow.ir.schema import bind_arguments
from undertow.numerics.layout import is_channels_last, is_float_image
from undertow.ops.fast_pooling import MAX_POOL_MAXIMA

_MOST_PLACES = 256  # in a window: the kernel notes the winner in a byte


def max_pool_choices(node: Node) -> list[Node]:
    """Ways to run `max_pool2d_with_indices`, the given one first."""
    y, indices = node.outputs
    target: Any = node.target
    bound = bind_arguments(target, node.args, node.kwargs)
    x = bound["self"]
    if y is None or indices is not None or not is_float_image(x) or not is_channels_last(y.tensor_type):
        return []
    kernel, padding, dilation = (_pair(bound[name]) for name in ("kernel_size", "padding", "dilation"))
    stride = _pair(bound["stride"]) if bound["stride"] else kernel
    if kernel[0] * kernel[1] > _MOST_PLACES:
        return []
    args = (x, kernel, stride, padding, dilation, y.tensor_type.shape[2:])
    return [node, replace(node, operation=MAX_POOL_MAXIMA, args=args, kwargs={}, outputs=(y,))]


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, *others = value if isinstance(value, tuple | list) else (value,)
    return first, others[0] if others else first
