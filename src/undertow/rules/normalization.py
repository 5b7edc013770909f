"""Normalisation: layer, group, batch and RMS normalisation, weight normalisation, renorm.

In: input, weight, bias. Out: their cotangents. Notation: x^ = (x - mean) r with r = 1 / sqrt(var + eps), y = x^ w + b.
Over the m elements that share statistics:

    ct_w = sum ct_y x^        ct_b = sum ct_y        g = ct_y w        ct_x = r (g - mean(g) - x^ mean(g x^))

The fused form reads the statistics that the forward pass saved; the composed form computes them again from the input,
so that a second derivative sees how they depend on it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from undertow.rules.registry import (
    Call,
    Case,
    Op,
    Sampler,
    case,
    composed,
    composed_joint,
    find_op,
    fused_joint,
    register,
)
from undertow.torch_internals import suggest_memory_format

aten = torch.ops.aten


def _standardized(x: torch.Tensor, dims: list[int], eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x^ and r over `dims`."""
    centered = x - x.mean(dims, keepdim=True)
    scale = ((centered * centered).mean(dims, keepdim=True) + eps).rsqrt()
    return centered * scale, scale


def _ct_through_statistics(g: torch.Tensor, normal: torch.Tensor, scale: torch.Tensor, dims: list[int]) -> torch.Tensor:
    projection = normal * (g * normal).mean(dims, keepdim=True)
    return scale * (g - g.mean(dims, keepdim=True) - projection)


def _wanted(c: Call, names: Sequence[str]) -> list[bool]:
    return [c.wants(name) for name in names]


_AFFINE = ("input", "weight", "bias")
_NO_CONTRIBUTION = dict.fromkeys(_AFFINE)


# The kernels return these layouts for every layout of the cotangent, but FakeTensors say otherwise.
def _with_layout(ct_x: torch.Tensor | None, layout: torch.memory_format) -> torch.Tensor | None:
    return None if ct_x is None else ct_x.contiguous(memory_format=layout)


def _layer_norm_kernel(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    ct_x, ct_weight, ct_bias = aten.native_layer_norm_backward(
        *(ct, c.input, c.normalized_shape, c.outs[1], c.outs[2], c.weight, c.bias), _wanted(c, _AFFINE)
    )
    return _with_layout(ct_x, torch.contiguous_format), ct_weight, ct_bias


def _layer_norm(c: Call, ct: torch.Tensor, *_: None) -> dict[str, torch.Tensor]:
    dims = list(range(-len(c.normalized_shape), 0))
    normal, scale = _standardized(c.input, dims, c.eps)
    g = ct if c.weight is None else ct * c.weight
    batch_dims = list(range(ct.dim() - len(dims)))
    summed = (lambda ct: ct.sum(batch_dims)) if batch_dims else (lambda ct: ct)
    cts = {"input": _ct_through_statistics(g, normal, scale, dims)}
    return cts | {"weight": summed(ct * normal), "bias": summed(ct)}


register(
    Op(
        aten.native_layer_norm.default,
        vjps=(fused_joint(*_AFFINE, by=_layer_norm_kernel), composed_joint(*_AFFINE, by=_layer_norm)),
        samples=lambda draw: [
            case(draw(2, 3, 4), [4], draw(4), draw(4), 1e-5),
            case(draw(2, 3, 4), [3, 4], draw(3, 4), None, 1e-3),
            case(draw(4, 3, 2).permute(2, 1, 0), [4], None, None, 1e-5),
            case(draw(5), [5], draw(5), draw(5), 1e-5),
        ],
    )
)


def _group_norm_kernel(
    c: Call, ct: torch.Tensor | None, ct_mean: torch.Tensor | None, ct_scale: torch.Tensor | None
) -> Any:
    if ct is None:
        return _NO_CONTRIBUTION
    if ct_mean is not None or ct_scale is not None:
        return _group_norm_with_statistics(c, ct, ct_mean, ct_scale)
    layout = suggest_memory_format(c.input) if ct.device.type == "cpu" else torch.contiguous_format
    mask = _wanted(c, _AFFINE)
    # The CPU kernel for channels-last crashes unless the input's cotangent is requested (torch 2.13).
    mask[0] |= layout is not torch.contiguous_format
    return aten.native_group_norm_backward(
        *(ct.contiguous(memory_format=layout), c.input.contiguous(memory_format=layout), c.outs[1], c.outs[2]),
        *(c.weight, c.N, c.C, c.HxW, c.group, mask),
    )


# In autograd the saved mean and r can have a gradient too, though only together with the output:
# dmean/dx = 1 / m        dr/dx = -r^3 (x - mean) / m
# This is its arithmetic for that case: ct_x = ct_y w r + b x + c with sums over the m elements in b and c.
def _group_norm_with_statistics(
    c: Call, ct: torch.Tensor, ct_mean: torch.Tensor | None, ct_scale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    grouped, per_group = (c.N, c.group, c.C // c.group, c.HxW), (c.N, c.group, 1, 1)
    num_elements = c.C // c.group * c.HxW
    x, ct = c.input.reshape(grouped), ct.reshape(grouped)
    mean, scale = c.outs[1].reshape(per_group), c.outs[2].reshape(per_group)
    along, total = (t.sum(3).unsqueeze(-1) for t in (ct * x, ct))
    gain, gained_along, gained_total = scale, along, total
    if c.weight is not None:
        weight = c.weight.reshape(1, c.group, -1, 1)
        gain, gained_along, gained_total = scale * weight, along * weight, total * weight
    gained_along, gained_total = (t.sum(2).unsqueeze(-2) for t in (gained_along, gained_total))
    cubed = scale * scale * scale
    b = (gained_total * mean - gained_along) * cubed * (1.0 / num_elements)
    constant = -b * mean - gained_total * scale * (1.0 / num_elements)
    through_statistics = []
    if ct_mean is not None:
        through_statistics.append(ct_mean.reshape(per_group).expand(grouped) / num_elements)
    if ct_scale is not None:
        ct_variance = cubed * -0.5 * ct_scale.reshape(per_group)
        through_statistics.append(ct_variance * (2.0 / num_elements) * (x - x.mean((2, 3), keepdim=True)))
    ct_x = gain * ct + b * x + constant + functools.reduce(torch.add, through_statistics)
    ct_weight = ((along - total * mean) * scale).sum(0).reshape(c.C)
    return {"input": ct_x.reshape(c.input.shape), "weight": ct_weight, "bias": total.sum(0).reshape(c.C)}


def _group_norm(
    c: Call, ct: torch.Tensor | None, ct_mean: torch.Tensor | None, ct_scale: torch.Tensor | None
) -> dict[str, torch.Tensor | None]:
    if ct is None:
        return _NO_CONTRIBUTION
    grouped, per_group = (c.N, c.group, c.C // c.group, c.HxW), (c.N, c.group, 1, 1)
    num_elements = c.C // c.group * c.HxW
    normal, scale = _standardized(c.input.reshape(grouped), [2, 3], c.eps)
    ct = ct.reshape(grouped)
    g = ct if c.weight is None else ct * c.weight.view(1, c.group, -1, 1)
    ct_x = _ct_through_statistics(g, normal, scale, [2, 3])
    if ct_mean is not None:
        ct_x = ct_x + ct_mean.reshape(per_group) / num_elements
    if ct_scale is not None:
        ct_x = ct_x - ct_scale.reshape(per_group) * scale * scale * normal / num_elements
    ct_weight, ct_bias = (t.sum((0, 3)).view(-1) for t in (ct * normal, ct))
    return {"input": ct_x.view(c.input.shape), "weight": ct_weight, "bias": ct_bias}


register(
    Op(
        aten.native_group_norm.default,
        vjps=(fused_joint(*_AFFINE, by=_group_norm_kernel), composed_joint(*_AFFINE, by=_group_norm)),
        samples=lambda draw: [
            case(draw(2, 4, 3, 3), draw(4), draw(4), 2, 4, 9, 2, 1e-5),
            case(draw(2, 6, 5), None, None, 2, 6, 5, 3, 1e-3),
            # Without a weight: eager crashes when only the weight's gradient is wanted.
            case(draw(2, 4, 3, 3).contiguous(memory_format=torch.channels_last), None, None, 2, 4, 9, 1, 1e-5),
        ],
    )
)


# In training mode the statistics come from the batch. The kernel is not given the running statistics, which the forward
# pass has overwritten: it would not read them. In evaluation mode they are constants.
def _is_training(c: Call) -> bool:
    return getattr(c, "training", False)


def _batch_norm_kernel(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    running = (None, None) if _is_training(c) else (c.running_mean, c.running_var)
    ct_x, ct_weight, ct_bias = aten.native_batch_norm_backward(
        *(ct, c.input, c.weight, *running, c.outs[1], c.outs[2], _is_training(c), _epsilon(c), _wanted(c, _AFFINE))
    )
    if ct.device.type == "cpu":
        ct_x = _with_layout(ct_x, suggest_memory_format(c.input))
    return ct_x, ct_weight, ct_bias


def _epsilon(c: Call) -> float:
    return c.eps if hasattr(c, "eps") else c.epsilon


def _batch_norm(c: Call, ct: torch.Tensor, *_: None) -> dict[str, torch.Tensor]:
    per_channel = [-1 if dim == 1 else 1 for dim in range(ct.dim())]
    dims = [dim for dim in range(ct.dim()) if dim != 1]
    g = ct if c.weight is None else ct * c.weight.view(per_channel)
    if _is_training(c):
        normal, scale = _standardized(c.input, dims, _epsilon(c))
        ct_x = _ct_through_statistics(g, normal, scale, dims)
    else:
        scale = (c.running_var.view(per_channel) + _epsilon(c)).rsqrt()
        normal = (c.input - c.running_mean.view(per_channel)) * scale
        ct_x = g * scale
    return {"input": ct_x, "weight": (ct * normal).sum(dims), "bias": ct.sum(dims)}


_BATCH_NORM_VJPS = (fused_joint(*_AFFINE, by=_batch_norm_kernel), composed_joint(*_AFFINE, by=_batch_norm))


def _batch_norm_samples(draw: Sampler) -> list[Case]:
    def running() -> tuple[torch.Tensor, torch.Tensor]:
        return draw(4), draw.uniform(0.5, 2, 4)

    channels_last = draw(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    return [
        case(draw(2, 4, 3, 3), draw(4), draw(4), *running(), True, 0.1, 1e-5),
        case(draw(2, 4, 3, 3), draw(4), draw(4), *running(), False, 0.1, 1e-5),
        case(draw(6, 4), None, None, *running(), True, 0.1, 1e-3),
        case(channels_last, draw(4), None, *running(), True, 0.1, 1e-5),
        case(draw(3, 4, 5), None, draw(4), *running(), False, 0.1, 1e-5),
    ]


def _without_running_statistics(draw: Sampler) -> list[Case]:
    return [
        case(draw(2, 4, 3, 3), draw(4), draw(4), None, None, True, 0.1, 1e-5),
        case(draw(1, 4, 2, 2, 3), None, draw(4), None, None, True, 0.1, 1e-5),
    ]


register(
    Op(
        aten.native_batch_norm.default,
        vjps=_BATCH_NORM_VJPS,
        samples=lambda draw: _batch_norm_samples(draw) + _without_running_statistics(draw),
    )
)


for _target in (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default):
    register(Op(_target, vjps=_BATCH_NORM_VJPS, samples=_batch_norm_samples))

register(
    Op(
        aten._native_batch_norm_legit.no_stats,
        vjps=_BATCH_NORM_VJPS,
        samples=lambda draw: [case(*(plain.args[:3] + plain.args[5:])) for plain in _without_running_statistics(draw)],
    )
)

register(
    Op(
        aten._native_batch_norm_legit_no_training.default,
        vjps=_BATCH_NORM_VJPS,
        samples=lambda draw: [case(*(plain.args[:5] + plain.args[6:])) for plain in _batch_norm_samples(draw)],
    )
)


def _cudnn_batch_norm_kernel(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    if not c.training:
        return _batch_norm_kernel(c, ct)
    ct = ct.contiguous(memory_format=suggest_memory_format(c.input))
    return aten.cudnn_batch_norm_backward(c.input, ct, c.weight, None, None, c.outs[1], c.outs[2], c.epsilon, c.outs[3])


register(
    Op(
        aten.cudnn_batch_norm.default,
        vjps=(fused_joint(*_AFFINE, by=_cudnn_batch_norm_kernel), composed_joint(*_AFFINE, by=_batch_norm)),
        samples=lambda draw: _batch_norm_samples(draw)[:2],
        devices=("cuda",),
    )
)


# x^ = x r with r = 1 / sqrt(mean(x^2) + eps), y = x^ w        ct_x = r (g - x^ mean(g x^))        dr/dx = -r^2 x^ / m
# On the CPU PyTorch decomposes this operation before it can be recorded.
def _rms_norm_kernel(c: Call, ct: torch.Tensor | None, ct_scale: torch.Tensor | None) -> Any:
    if ct is None or ct_scale is not None:
        return _rms_norm(c, ct, ct_scale)
    mask = _wanted(c, ("input", "weight"))
    return aten._fused_rms_norm_backward(ct, c.input, c.normalized_shape, c.outs[1], c.weight, mask)


def _rms_norm(c: Call, ct: torch.Tensor | None, ct_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    x, dims = c.input, list(range(-len(c.normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if c.eps is None else c.eps
    scale = ((x * x).mean(dims, keepdim=True) + eps).rsqrt()
    normal = x * scale
    cts = {"input": torch.zeros_like(x)}
    if ct is not None:
        g = ct if c.weight is None else ct * c.weight
        cts["input"] = scale * (g - normal * (g * normal).mean(dims, keepdim=True))
        cts["weight"] = (ct * normal).sum_to_size(c.normalized_shape)
    if ct_scale is not None:
        num_elements = torch.Size(c.normalized_shape).numel()
        cts["input"] = cts["input"] - ct_scale * scale * scale * normal / num_elements
    return cts


register(
    Op(
        aten._fused_rms_norm.default,
        vjps=(
            fused_joint("input", "weight", by=_rms_norm_kernel),
            composed_joint("input", "weight", by=_rms_norm),
        ),
        samples=lambda draw: [
            case(draw(2, 3, 4), [4], draw(4), 1e-5),
            case(draw(2, 3, 4), [3, 4], None, None),
        ],
        devices=("cuda",),
    )
)


# y = v g / n, n the norm of v over all dimensions but one        ct_g = sum(ct_y v) / n
# ct_v = (g / n) (ct_y - v sum(ct_y v) / n^2)
def _weight_norm_kernel(c: Call, ct: torch.Tensor, *_: None) -> tuple[torch.Tensor, torch.Tensor]:
    return aten._weight_norm_interface_backward(ct.contiguous(), c.v, c.g, c.outs[1], c.dim)


def _weight_norm(c: Call, ct: torch.Tensor, *_: None) -> dict[str, torch.Tensor]:
    dims = [dim for dim in range(c.v.dim()) if dim != c.dim]
    square = (c.v * c.v).sum(dims, keepdim=True)
    norm = square.sqrt()
    along = (ct * c.v).sum(dims, keepdim=True)
    return {"v": c.g / norm * (ct - c.v * along / square), "g": along / norm}


register(
    Op(
        aten._weight_norm_interface.default,
        vjps=(fused_joint("v", "g", by=_weight_norm_kernel), composed_joint("v", "g", by=_weight_norm)),
        samples=lambda draw: [
            case(draw(3, 4), draw(3, 1)),
            case(draw(3, 4, 2), draw(3, 1, 1), 0),
            case(draw(3, 4), draw(1, 4), 1),
        ],
    )
)


# y = x m / (n + 1e-7) where the norm n of a slice exceeds the largest allowed, m; x elsewhere
# ct_x = m / (n + 1e-7) (ct_y - dn/dx sum(ct_y x) / (n + 1e-7))        with dn/dx by the norm's own rule
def _renorm(c: Call, ct: torch.Tensor) -> torch.Tensor:
    dims = [dim for dim in range(c.self.dim()) if dim != c.dim % c.self.dim()]
    # Eager sums in the device's accumulation type.
    is_wide = c.self.dtype == torch.float64 or (c.self.dtype == torch.float32 and ct.device.type == "cpu")
    dtype = torch.float64 if is_wide else torch.float32
    norm_of = aten.linalg_vector_norm.default
    norm = norm_of(c.self, c.p, dims, True, dtype=dtype)
    along = (c.self * ct).sum(dims, keepdim=True, dtype=dtype)
    norm_rule = find_op(norm_of)
    assert norm_rule is not None
    norm_call = Call(norm_of, (c.self, c.p, dims, True), {"dtype": dtype}, (norm,), {"self"})
    through_norm = norm_rule.exact_vjp.cotangents(norm_call, (along,))["self"]
    inverse = (norm + 1e-7).reciprocal()
    shrunk = c.maxnorm * inverse * (ct - inverse * through_norm)
    return torch.where(norm > c.maxnorm, shrunk.to(ct.dtype), ct)


register(
    Op(
        aten.renorm.default,
        vjps=(composed(self=_renorm),),
        samples=lambda draw: [
            case(draw(3, 4), 2, 0, 1.5),
            case(draw(3, 4, 2), 1, -1, 5.0),
            case(draw(4, 3).t(), 3.0, 1, 1.0),
        ],
    )
)
