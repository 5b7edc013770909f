"""Convolution in one, two or three dimensions: plain, transposed, grouped, dilated.

In: input, weight, bias. Out: their cotangents, by PyTorch's kernel or composed of convolutions. Notation for one
spatial dimension with stride s, padding p, dilation d, kernel length K:

    y[o, i] = sum_c,k x[c, i s - p + k d] w[o, c, k]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused_joint, register

aten = torch.ops.aten


def _fused(c: Call, ct: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    bias_shape = [0] if c.bias is None else c.bias.shape
    mask = [c.wants("input"), c.wants("weight"), c.wants("bias")]
    return aten.convolution_backward(
        *(ct, c.input, c.weight, bias_shape, c.stride, c.padding, c.dilation, c.transposed, c.output_padding, c.groups),
        mask,
    )


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, c: Call, output_padding: Sequence[int], is_transposed: bool
) -> torch.Tensor:
    return aten.convolution(x, weight, None, c.stride, c.padding, c.dilation, is_transposed, output_padding, c.groups)


def _crop(x: torch.Tensor, spatial_shape: Sequence[int]) -> torch.Tensor:
    for dim, length in enumerate(spatial_shape, start=2):
        if x.shape[dim] != length:
            x = x.narrow(dim, 0, length)
    return x


# ct_x[c, j] = sum_o,i,k ct_y[o, i] w[o, c, k] over i s - p + k d = j: the transposed convolution of ct_y. Several input
# lengths give the same output length; the output padding says which one it was. The cotangent of a transposed
# convolution is the plain convolution, which is longer than x if the output padding reached a stride.
def _ct_input(c: Call, ct: torch.Tensor) -> torch.Tensor:
    spatial = range(c.input.dim() - 2)
    if c.transposed:
        return _crop(_convolve(ct, c.weight, c, [0 for _ in spatial], False), c.input.shape[2:])
    covered = [
        (ct.shape[2 + i] - 1) * c.stride[i] - 2 * c.padding[i] + c.dilation[i] * (c.weight.shape[2 + i] - 1) + 1
        for i in spatial
    ]
    return _convolve(ct, c.weight, c, [c.input.shape[2 + i] - covered[i] for i in spatial], True)


# ct_w[o, c, k] = sum_n,i x[n, c, i s - p + k d] ct_y[n, o, i]: a convolution of x by ct_y with batch and channels
# exchanged, and stride and dilation exchanged. The channels of a group are convolved only with that group's outputs, so
# groups and batch together become the channels. For a transposed convolution x and ct_y are exchanged.
def _ct_weight(c: Call, ct: torch.Tensor) -> torch.Tensor:
    wide, narrow = (ct, c.input) if c.transposed else (c.input, ct)
    batch, channels = wide.shape[:2]
    spatial_shape = wide.shape[2:]
    grouped = wide.reshape(batch, c.groups, channels // c.groups, *spatial_shape).transpose(0, 2)
    grouped = grouped.reshape(channels // c.groups, c.groups * batch, *spatial_shape)
    no_padding = [0 for _ in spatial_shape]
    ct_weight = aten.convolution(
        grouped, narrow.transpose(0, 1), None, c.dilation, c.padding, c.stride, False, no_padding, c.groups
    )
    return _crop(ct_weight, c.weight.shape[2:]).transpose(0, 1)


def _ct_bias(c: Call, ct: torch.Tensor) -> torch.Tensor:
    return ct.sum([dim for dim in range(ct.dim()) if dim != 1])


def _samples(draw: Sampler) -> list[Case]:
    def plain(x, weight, bias, stride=1, padding=0, dilation=1, transposed=False, output_padding=0, groups=1):
        per_dim = [[value] * (x.dim() - 2) for value in (stride, padding, dilation, output_padding)]
        return case(x, weight, bias, *per_dim[:3], transposed, per_dim[3], groups)

    return [
        plain(draw(2, 3, 7), draw(4, 3, 3), draw(4), stride=2, padding=1),
        plain(draw(2, 4, 6, 5), draw(6, 4, 3, 2), draw(6)),
        plain(draw(2, 4, 6, 6), draw(6, 2, 3, 3), None, stride=2, padding=1, dilation=2, groups=2),
        plain(draw(2, 6, 5, 4).transpose(2, 3), draw(6, 1, 3, 3), draw(6), padding=1, groups=6),
        plain(draw(2, 3, 8, 8).contiguous(memory_format=torch.channels_last), draw(4, 3, 3, 3), draw(4), stride=3),
        case(draw(2, 3, 6, 7), draw(2, 3, 1, 3), draw(2), [1, 2], [0, 1], [1, 2], False, [0, 0], 1),
        plain(draw(1, 2, 4, 5, 4), draw(4, 1, 2, 3, 2), draw(4), stride=2, padding=1, groups=2),
        plain(draw(2, 4, 5), draw(4, 3, 3), draw(3), stride=2, padding=1, transposed=True, output_padding=1),
        plain(draw(2, 4, 3, 4), draw(4, 2, 3, 3), None, stride=2, transposed=True, groups=2),
        plain(draw(2, 4, 3, 3), draw(4, 2, 2, 2), draw(2), dilation=3, transposed=True, output_padding=2),
        plain(draw(1, 2, 3, 3, 3), draw(2, 3, 2, 2, 2), draw(3), stride=2, transposed=True),
    ]


register(
    Op(
        aten.convolution.default,
        vjps=(
            fused_joint("input", "weight", "bias", by=_fused),
            composed(input=_ct_input, weight=_ct_weight, bias=_ct_bias),
        ),
        samples=_samples,
    )
)
