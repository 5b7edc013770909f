"""Scaled dot-product attention through fused kernels, on the CPU and on CUDA.

In: query, key and value, the outputs, perhaps a mask. Out: their cotangents. Notation: S = s Q K^T + M, P = softmax(S)
over the last dimension, Y = P V, with the scale s and the additive mask M.

    ct_V = P^T ct_Y        ct_P = ct_Y V^T        ct_S = P (ct_P - sum(ct_P P))
    ct_Q = s ct_S K        ct_K = s ct_S^T Q

The fused form keeps one number per row of S (its logsumexp); the composed form makes S again from Q and K. Attention
through the "math" kernel (a mask that needs a gradient, dropout on the CPU) is recorded as elementary operations and
needs no rule here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from undertow.errors import MissingRule
from undertow.ir.pytorch import declare
from undertow.rules.registry import Call, Case, Op, Sampler, case, composed_joint, fused_joint, kink, register

aten = torch.ops.aten

_INPUTS = ("query", "key", "value")


def _per_query_head(c: Call, x: torch.Tensor) -> torch.Tensor:
    """Keys or values for every query head; if there are fewer of them, neighbouring query heads share one."""
    shared = c.query.shape[1] // x.shape[1]
    if shared == 1:
        return x
    batch, heads, *rest = x.shape
    return x.unsqueeze(2).expand(batch, heads, shared, *rest).reshape(batch, heads * shared, *rest)


def _summed_over_shared(ct: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    shared = ct.shape[1] // x.shape[1]
    return ct if shared == 1 else ct.unflatten(1, (x.shape[1], shared)).sum(2)


def _probabilities(c: Call, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = c.query.matmul(_per_query_head(c, c.key).mT) * scale
    if mask is not None:
        scores = scores + mask
    if c.is_causal:
        row = torch.arange(scores.shape[-2], device=scores.device).unsqueeze(1)
        column = torch.arange(scores.shape[-1], device=scores.device)
        scores = scores.masked_fill(column > row, -math.inf)
    return aten._safe_softmax(scores, -1)


def _attention(c: Call, ct: torch.Tensor, mask: torch.Tensor | None) -> dict[str, torch.Tensor]:
    if c.dropout_p != 0:
        raise MissingRule(
            "second derivative of fused attention: dropout 0 is required, since the kernel keeps no dropout mask; "
            f"found {c.dropout_p}; set dropout to 0"
        )
    scale = c.query.shape[-1] ** -0.5 if c.scale is None else c.scale
    probabilities = _probabilities(c, mask, scale)
    ct_probabilities = ct.matmul(_per_query_head(c, c.value).mT)
    weighted = ct_probabilities * probabilities
    ct_scores = weighted - probabilities * weighted.sum(-1, keepdim=True)
    return {
        "query": ct_scores.matmul(_per_query_head(c, c.key)) * scale,
        "key": _summed_over_shared(ct_scores.mT.matmul(c.query) * scale, c.key),
        "value": _summed_over_shared(probabilities.mT.matmul(ct), c.value),
        "attn_bias": ct_scores,
    }


def _samples(draw: Sampler) -> list[Case]:
    square = [draw(2, 2, 5, 4) for _ in range(3)]
    longer = [draw(2, 2, 3, 4), draw(2, 2, 5, 4), draw(2, 2, 5, 4)]
    # The layout of a projection split into heads
    transposed = [draw(2, 5, 2, 4).transpose(1, 2) for _ in range(3)]
    grouped = [draw(2, 4, 3, 4), draw(2, 2, 3, 4), draw(2, 2, 3, 4)]
    blocked = torch.where(draw.booleans(5, 5).fill_diagonal_(True), 0.0, -math.inf).to(torch.float64)
    return [
        case(*square),
        case(*longer, scale=0.3),
        case(*square, 0.0, True),
        case(*transposed, attn_mask=draw(5, 5)),
        case(*square, attn_mask=blocked),
        case(*longer, attn_mask=draw(2, 1, 3, 5)),
        case(*grouped),
    ]


def _flash_on_cpu(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(ct, c.query, c.key, c.value, c.outs[0], c.outs[1], c.dropout_p, c.is_causal),
        **{"attn_mask": c.attn_mask, "scale": c.scale},
    )


register(
    Op(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        vjps=(
            fused_joint(*_INPUTS, by=_flash_on_cpu),
            composed_joint(*_INPUTS, by=lambda c, ct, *_: _attention(c, ct, c.attn_mask)),
        ),
        samples=_samples,
        devices=("cpu",),
    )
)


def _in_half_precision(draw: Sampler, *arguments: object) -> list[Case]:
    inputs = [draw(2, 2, 16, 8).half() for _ in range(3)]
    return [kink(*inputs, *arguments), kink(*inputs, *arguments, scale=0.3)]


# The outputs have the sequence lengths as integers; a dense batch has them in its shape.
def _flash_on_cuda(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_backward(
        *(ct, c.query, c.key, c.value, *c.outs[:4], c.query.shape[2], c.key.shape[2]),
        *(c.dropout_p, c.is_causal, c.outs[-3], c.outs[-2]),
        scale=c.scale,
    )


register(
    Op(
        aten._scaled_dot_product_flash_attention.default,
        vjps=(
            fused_joint(*_INPUTS, by=_flash_on_cuda),
            composed_joint(*_INPUTS, by=lambda c, ct, *_: _attention(c, ct, None)),
        ),
        samples=lambda draw: _in_half_precision(draw, 0.0, True),
        devices=("cuda",),
    )
)


def _cudnn(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor, ...]:
    return aten._scaled_dot_product_cudnn_attention_backward(
        *(ct, c.query, c.key, c.value, *c.outs[:2], c.outs[-3], c.outs[-2], c.attn_bias, *c.outs[2:4]),
        *(c.query.shape[2], c.key.shape[2], c.dropout_p, c.is_causal),
        scale=c.scale,
    )


register(
    Op(
        aten._scaled_dot_product_cudnn_attention.default,
        vjps=(
            fused_joint(*_INPUTS, by=_cudnn),
            composed_joint(*_INPUTS, by=lambda c, ct, *_: _attention(c, ct, c.attn_bias)),
        ),
        samples=lambda draw: _in_half_precision(draw, None, True, 0.0, True),
        devices=("cuda",),
    )
)


def _efficient_backward(*args: Any, **kwargs: Any) -> Any:
    """The kernel, with outputs of their own.

    Where query, key and value lie in one storage, it would put their cotangents into one as well, which lives until the
    last of them is read. A storage is not seen to be the same through DLPack.
    """
    ct, query, key, value, *others = args
    if query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr():
        key, value = (from_dlpack(to_dlpack(item)) for item in (key, value))
    return aten._scaled_dot_product_efficient_attention_backward(ct, query, key, value, *others, **kwargs)


def _rehearse_efficient_backward(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    """Outside CUDA graphs the kernel reads its seed and offset on the CPU, where the forward pass leaves them.

    Recorded, they lie with the other outputs on the GPU: a made-up seed there would be read at a GPU's address.
    """
    seed, offset = (item.cpu() for item in args[7:9])
    return partial(_efficient_backward, *args[:7], seed, offset, *args[9:], **kwargs)


declare(
    aten._scaled_dot_product_efficient_attention_backward.default,
    run=_efficient_backward,
    rehearse=_rehearse_efficient_backward,
)


def _efficient(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    wanted = [c.wants(name) for name in (*_INPUTS, "attn_bias")]
    return aten._scaled_dot_product_efficient_attention_backward(
        *(ct, c.query, c.key, c.value, c.attn_bias, *c.outs[:4], c.dropout_p, wanted, c.is_causal), scale=c.scale
    )


register(
    Op(
        aten._scaled_dot_product_efficient_attention.default,
        vjps=(
            fused_joint(*_INPUTS, "attn_bias", by=_efficient),
            composed_joint(*_INPUTS, "attn_bias", by=lambda c, ct, *_: _attention(c, ct, c.attn_bias)),
        ),
        samples=lambda draw: _in_half_precision(draw, None, True, 0.0, True),
        devices=("cuda",),
    )
)
