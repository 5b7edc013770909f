"""Casts and moves between devices.

In: the dtype and device of `c.self`. Out: the cotangent cast back in one step, dtype and device together, as eager
does; a mere change of memory format leaves the cotangent as it is.
"""

import torch

from undertow.ops.registry import Op, case, composed, kink, register

aten = torch.ops.aten

register(
    Op(
        aten._to_copy.default,
        (composed(self=lambda c, ct: ct.to(device=c.self.device, dtype=c.self.dtype)),),
        lambda draw: [
            case(draw(3, 4), dtype=torch.float64),
            case(draw(4, 3).t(), memory_format=torch.contiguous_format),
            case(draw(1, 2, 3, 4), memory_format=torch.channels_last),
            kink(draw(4, 3).t(), dtype=torch.float32),
            kink(draw(3, 4).float(), dtype=torch.float64),
            kink(draw(4, 3).t(), dtype=torch.bfloat16),
            kink(draw(3), dtype=torch.float16),
        ],
    )
)
