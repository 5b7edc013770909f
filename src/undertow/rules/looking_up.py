"""Weights that share values (`ops/looking_up.py`): a shared value gets the sum of its weights' cotangents."""

from __future__ import annotations

from undertow.ops.looking_up import LOOK_UP, SUM_BY_CODE
from undertow.rules.registry import Op, case, composed, register

register(
    Op(
        LOOK_UP,
        # w_i = codebook[codes_i - 1], 0 where the code is 0        ct_codebook = the sums of ct by code
        (composed(codebook=lambda c, ct: SUM_BY_CODE(ct, c.codes, c.codebook.shape[0])),),
        lambda draw: [
            case(draw(4), draw.integers(5, 3, 4)),
            case(draw(4), draw.integers(5, 3, 4).byte()),
            case(draw(3), draw.integers(4, 4, 3).t()),
            case(draw(2), draw.integers(3, 0, 3)),
        ],
    )
)

register(
    Op(
        SUM_BY_CODE,
        # s_k = the sum of ct_i with codes_i = k + 1        ct_ct = ct looked up
        (composed(ct=lambda c, ct: LOOK_UP(ct, c.codes)),),
        lambda draw: [
            case(draw(3, 4), draw.integers(5, 3, 4), 4),
            case(draw(3, 4), draw.integers(5, 3, 4).byte(), 4),
            case(draw(4, 3).t(), draw.integers(5, 3, 4), 4),
        ],
    )
)
