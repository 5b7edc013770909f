"""Softmax and losses.

In: inputs, targets and, for softmax, outputs. Out: the cotangents of inputs and targets. A loss reduces its elements by
`reduction`: 0 leaves them, 1 takes the mean, 2 the sum. The cotangent of an element is the cotangent of the loss,
divided by the number of elements for the mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from undertow.ir.pytorch import declare
from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, fused, kink, register
from undertow.torch_internals import OpOverload

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2


def _averaged(c: Call, ct: torch.Tensor) -> torch.Tensor:
    return ct / c.self.numel() if c.reduction == _MEAN else ct


# y = softmax(x)        ct_x = y (ct_y - sum(ct_y y))
def _ct_softmax(c: Call, ct: torch.Tensor) -> torch.Tensor:
    weighted = ct * c.out
    return weighted - c.out * weighted.sum(c.dim, keepdim=True)


_SOFTMAX_VJPS = (
    fused(self=lambda c, ct: aten._softmax_backward_data(ct, c.out, c.dim, c.self.dtype)),
    composed(self=_ct_softmax),
)

register(
    Op(
        aten._softmax.default,
        vjps=_SOFTMAX_VJPS,
        samples=lambda draw: [
            case(draw(2, 4), -1, False),
            case(draw(2, 3, 4), 1, False),
            case(draw(4, 3).t(), 0, False),
        ],
    )
)

register(
    Op(
        aten._safe_softmax.default,
        # A row with only -inf gives zero instead of NaN, and has a zero derivative.
        vjps=_SOFTMAX_VJPS,
        samples=lambda draw: [
            case(draw(2, 4), -1),
            kink(draw(2, 3, 4).masked_fill(torch.tensor([True, False, False, False]), -torch.inf), 2),
            kink(draw(2, 3, 4).index_fill(1, torch.tensor([1]), -torch.inf), -1),
        ],
    )
)

register(
    Op(
        aten._log_softmax.default,
        # y = log softmax(x)        ct_x = ct_y - exp(y) sum(ct_y)
        vjps=(
            # The result is contiguous, but FakeTensors say otherwise.
            fused(self=lambda c, ct: aten._log_softmax_backward_data(ct, c.out, c.dim, c.self.dtype).contiguous()),
            composed(self=lambda c, ct: ct - c.out.exp() * ct.sum(c.dim, keepdim=True)),
        ),
        samples=lambda draw: [
            case(draw(2, 4), -1, False),
            case(draw(2, 3, 4), 1, False),
            case(draw(4, 3).t(), 0, False),
        ],
    )
)


# y[n] = -w[t] x[n, t] with t the target of n, and 0 where t is ignored; the mean divides by the sum of these w[t].
# Targets are per row, or per pixel if there are dims after the class dim 1; a single row has no batch dim.
def _ct_negative_log_likelihood(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    class_dim = 1 if c.self.dim() > 1 else 0
    num_classes = c.self.shape[class_dim]
    is_counted = c.target != c.ignore_index
    target = torch.where(is_counted, c.target, 0)
    share = ct / c.outs[1] if c.reduction == _MEAN else ct
    if c.weight is not None:
        share = share * c.weight.index_select(0, target.reshape(-1)).view(target.shape)
    classes = torch.arange(num_classes, device=target.device).view([-1] + [1] * max(0, target.dim() - 1))
    is_target = (classes == target.unsqueeze(class_dim)) & is_counted.unsqueeze(class_dim)
    share = share.unsqueeze(class_dim) if share.dim() else share
    return torch.where(is_target, -share, 0.0)


def _register_negative_log_likelihood(
    target: OpOverload, kernel: OpOverload, samples: Callable[[Sampler], list[Case]]
) -> None:
    def by_kernel(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
        return kernel(ct, c.self, c.target, c.weight, c.reduction, c.ignore_index, c.outs[1])

    register(Op(target, vjps=(fused(self=by_kernel), composed(self=_ct_negative_log_likelihood)), samples=samples))


_register_negative_log_likelihood(
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    lambda draw: [
        case(draw(3, 4), torch.tensor([1, 0, 3]), None, _MEAN, -100),
        case(draw(3, 4), torch.tensor([1, 2, 3]), draw.uniform(0.5, 2, 4), _MEAN, 2),
        case(draw(3, 4), torch.tensor([1, -100, 3]), draw.uniform(0.5, 2, 4), _NONE, -100),
        case(draw(4), torch.tensor(2), None, _SUM, -100),
        case(draw(4), torch.tensor(2), draw.uniform(0.5, 2, 4), _NONE, -100),
    ],
)

_register_negative_log_likelihood(
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    lambda draw: [
        case(draw(2, 4, 1, 3), draw.integers(4, 2, 1, 3), None, _MEAN, -100),
        case(draw(2, 4, 3, 2), draw.integers(4, 2, 3, 2), draw.uniform(0.5, 2, 4), _MEAN, 1),
        case(draw(2, 4, 3, 2), draw.integers(4, 2, 3, 2), draw.uniform(0.5, 2, 4), _NONE, 2),
        case(draw(2, 3, 2, 2), draw.integers(3, 2, 2, 2), None, _SUM, 0),
    ],
)


def _register_difference_loss(
    target: OpOverload,
    kernel: OpOverload,
    derivative: Callable[[Call, torch.Tensor], torch.Tensor],
    parameter: str | None,
) -> None:
    """A loss of x - t. The kernel gives the target's cotangent too, with input and target exchanged."""

    def by_kernel(c: Call, ct: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        # The kernel always returns a contiguous tensor, but FakeTensors say otherwise.
        return kernel(ct, x, other, c.reduction, *([getattr(c, parameter)] if parameter else [])).contiguous()

    def by_derivative(c: Call, ct: torch.Tensor) -> torch.Tensor:
        return _averaged(c, ct) * derivative(c, c.self - c.target)

    register(
        Op(
            target,
            vjps=(
                fused(
                    self=lambda c, ct: by_kernel(c, ct, c.self, c.target),
                    target=lambda c, ct: by_kernel(c, ct, c.target, c.self),
                ),
                composed(self=by_derivative, target=lambda c, ct: -by_derivative(c, ct)),
            ),
            samples=lambda draw: [
                case(draw.distinct(3, 4), draw.uniform(-0.01, 0.01, 3, 4)),
                case(draw.distinct(3, 4), draw.uniform(-0.01, 0.01, 3, 4), _SUM),
                case(draw.distinct(4, 3).t(), draw.uniform(-0.01, 0.01, 3, 4), _NONE, *([0.7] if parameter else [])),
            ],
        )
    )


# l(d) = d^2
_register_difference_loss(
    aten.mse_loss.default, aten.mse_loss_backward.default, lambda c, difference: 2 * difference, None
)
# l(d) = d^2 / (2 beta) where |d| < beta, else |d| - beta / 2
_register_difference_loss(
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    lambda c, difference: (difference / c.beta).clamp(-1, 1),
    "beta",
)
# l(d) = d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2)
_register_difference_loss(
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    lambda c, difference: difference.clamp(-c.delta, c.delta),
    "delta",
)


def _weighted(c: Call, ct: torch.Tensor) -> torch.Tensor:
    return ct if c.weight is None else ct * c.weight


# y = -w (t log x + (1 - t) log(1 - x))
# ct_x = w ct_y (x - t) / (x (1 - x))        ct_t = w ct_y (log(1 - x) - log x)
def _ct_probability(c: Call, ct: torch.Tensor) -> torch.Tensor:
    # The kernel has the same lower bound for the denominator.
    variance = ((1 - c.self) * c.self).clamp(min=1e-12)
    return _averaged(c, _weighted(c, ct * (c.self - c.target) / variance))


register(
    Op(
        aten.binary_cross_entropy.default,
        vjps=(
            fused(
                self=lambda c, ct: aten.binary_cross_entropy_backward(ct, c.self, c.target, c.weight, c.reduction),
                target=lambda c, ct: _averaged(c, _weighted(c, -aten.logit(c.self) * ct)),
            ),
            composed(
                self=_ct_probability,
                target=lambda c, ct: _averaged(c, _weighted(c, ((1 - c.self).log() - c.self.log()) * ct)),
            ),
        ),
        samples=lambda draw: [
            case(draw.uniform(0.1, 0.9, 3, 4), draw.uniform(0.1, 0.9, 3, 4)),
            case(draw.uniform(0.1, 0.9, 3, 4), draw.uniform(0.1, 0.9, 3, 4), draw.uniform(0.5, 2, 3, 4), _NONE),
            case(draw.uniform(0.1, 0.9, 3, 4), draw.uniform(0.1, 0.9, 3, 4), None, _SUM),
        ],
    )
)


# y = -w (p t log s + (1 - t) log(1 - s)) with s = sigmoid(x), p the weight of the positives
# ct_x = w ct_y ((p t + 1 - t) s - p t)        ct_t = w ct_y (log(1 - s) - p log s), which is -w ct_y x for p = 1
def _ct_logit(c: Call, ct: torch.Tensor) -> torch.Tensor:
    if c.pos_weight is None:
        slope = c.self.sigmoid() - c.target
    else:
        positive = c.pos_weight * c.target
        slope = (positive + 1 - c.target) * c.self.sigmoid() - positive
    return _averaged(c, _weighted(c, slope * ct))


def _ct_logit_target(c: Call, ct: torch.Tensor) -> torch.Tensor:
    if c.pos_weight is None:
        slope = -c.self
    else:
        log_negative = torch.nn.functional.logsigmoid(-c.self)
        slope = log_negative - c.pos_weight * torch.nn.functional.logsigmoid(c.self)
    return _averaged(c, _weighted(c, slope * ct))


register(
    Op(
        aten.binary_cross_entropy_with_logits.default,
        vjps=(composed(self=_ct_logit, target=_ct_logit_target),),
        samples=lambda draw: [
            case(draw(3, 4), draw.uniform(0, 1, 3, 4)),
            case(draw(3, 4), draw.uniform(0, 1, 3, 4), draw.uniform(0.5, 2, 4), draw.uniform(0.5, 2, 4)),
            case(draw(3, 4), draw.uniform(0, 1, 3, 4), draw.uniform(0.5, 2, 3, 4), None, _NONE),
            case(draw(3, 4), draw.uniform(0, 1, 3, 4), None, draw.uniform(0.5, 2, 4), _SUM),
        ],
    )
)

register(
    Op(
        aten.soft_margin_loss.default,
        # y = log(1 + exp(-t x))        ct_x = -t sigmoid(-t x) ct_y
        vjps=(
            fused(self=lambda c, ct: aten.soft_margin_loss_backward(ct, c.self, c.target, c.reduction)),
            composed(self=lambda c, ct: -c.target * (-c.target * c.self).sigmoid() * _averaged(c, ct)),
        ),
        samples=lambda draw: [
            case(draw(3, 4), draw.distinct(3, 4).sign()),
            case(draw(3, 4), draw.distinct(3, 4).sign(), _NONE),
        ],
    )
)


# y[n] = w[t] sum over j != t of max(0, margin - x[n, t] + x[n, j])^p / C
def _ct_multi_margin(c: Call, ct: torch.Tensor) -> torch.Tensor:
    x, target = (c.self, c.target) if c.self.dim() > 1 else (c.self.unsqueeze(0), c.target.view(1))
    num_rows, num_classes = x.shape
    is_target = torch.arange(num_classes, device=x.device) == target.unsqueeze(1)
    violation = (c.margin - x.gather(1, target.unsqueeze(1)) + x).clamp(min=0).masked_fill(is_target, 0)
    slope = c.p * (violation if c.p == 2 else (violation > 0).to(x.dtype)) / num_classes
    if c.weight is not None:
        slope = slope * c.weight.index_select(0, target).unsqueeze(1)
    slope = torch.where(is_target, -slope.sum(1, keepdim=True), slope)
    ct = ct / num_rows if c.reduction == _MEAN else ct
    return (slope * ct.view(-1, 1)).view(c.self.shape)


register(
    Op(
        aten.multi_margin_loss.default,
        vjps=(
            fused(
                self=lambda c, ct: aten.multi_margin_loss_backward(
                    ct, c.self, c.target, c.p, c.margin, c.weight, c.reduction
                )
            ),
            composed(self=_ct_multi_margin),
        ),
        samples=lambda draw: [
            case(draw(3, 4), torch.tensor([1, 0, 3])),
            case(draw(3, 4), torch.tensor([1, 0, 3]), 2, 0.7, draw.uniform(0.5, 2, 4), _NONE),
            case(draw(4), torch.tensor([2]), 1, 1.3, None, _SUM),
        ],
    )
)


# y[n] = sum over targets t and others j of max(0, 1 - x[n, t] + x[n, j]) / C. The targets end at the first negative
# number; the second output marks them.
def _ct_multilabel_margin(c: Call, ct: torch.Tensor, *_: None) -> torch.Tensor:
    x, target, is_target = (t if c.self.dim() > 1 else t.unsqueeze(0) for t in (c.self, c.target, c.outs[1]))
    num_rows, num_classes = x.shape
    is_listed = (target < 0).cumsum(1) == 0
    target = target.clamp(min=0)
    violation = 1 - x.gather(1, target).unsqueeze(2) + x.unsqueeze(1)
    counts = (violation > 0) & is_listed.unsqueeze(2) & (is_target == 0).unsqueeze(1)
    slope = counts.to(x.dtype) / num_classes
    slope = slope.sum(1).scatter_add(1, target, -slope.sum(2))
    ct = ct / num_rows if c.reduction == _MEAN else ct
    return (slope * ct.view(-1, 1)).view(c.self.shape)


register(
    Op(
        aten.multilabel_margin_loss_forward.default,
        vjps=(
            fused(
                self=lambda c, ct, *_: aten.multilabel_margin_loss_backward(
                    ct, c.self, c.target, c.reduction, c.outs[1]
                )
            ),
            composed(self=_ct_multilabel_margin),
        ),
        samples=lambda draw: [
            case(draw(2, 4), torch.tensor([[1, -1, 0, 0], [2, 3, -1, 0]]), _MEAN),
            case(draw(2, 4), torch.tensor([[1, 0, 2, -1], [-1, 3, -1, 0]]), _NONE),
            case(draw(4), torch.tensor([3, 0, -1, 1]), _SUM),
        ],
    )
)

for _loss in (
    aten.binary_cross_entropy.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
):
    declare(_loss, is_oversized=True)
