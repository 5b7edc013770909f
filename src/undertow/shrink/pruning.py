"""Which weights of all layers are kept: those whose removal would change the loss most, by one measure for all.

In: weights, hidden values of removed ones, what a change of each costs, and how many may stay. Out: masks. A weight's
score is w^2 times the root of the mean square of its gradient, which Adam keeps anyway: with the mean square itself it
would be optimal brain damage's saliency, by the diagonal of the empirical Fisher matrix (LeCun, Denker & Solla 1990;
Theis et al. 2018), and the root did better. The threshold is one for every layer, so layers are pruned by their
sensitivity. Where an optimizer keeps no such mean, the score is w^2 times the price that was measured for the layer.

A removed weight may come back when its hidden value would be worth it, with a margin, so that none goes back and forth
(Guo, Yao & Chen 2016). One weight of a layer stays in any case: without one, nothing would pass through it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from undertow.ops.projection import Masks

_MARGIN = 0.8  # of the score of a hidden value
_SQUARES = "exp_avg_sq"  # where Adam and AdamW keep it


def find_prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are pruned, by their first names: weights, not biases or the vectors of norms."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.dim() > 1 and parameter.numel() > 1
    }


def keep_all(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Masks that remove nothing."""
    return {name: torch.ones_like(item, dtype=torch.bool, requires_grad=False) for name, item in parameters.items()}


@torch.no_grad()
def choose_again(
    masks: Masks, prices: Mapping[str, float], num_kept: int, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Change the masks so that `num_kept` weights stay, and the parameters with them."""
    squares = _mean_squares(masks, optimizer)
    wholes, scores = {}, {}
    for name, parameter in masks.parameters.items():
        kept, hidden = masks.kept[name], masks.hidden[name]
        wholes[name] = torch.where(kept, parameter.detach(), hidden)
        price = prices[name] if squares is None else squares[name].float().sqrt()
        score = wholes[name].float().square() * price
        scores[name] = torch.where(kept, score, score * _MARGIN)
    threshold = _threshold(list(scores.values()), num_kept)
    for name, parameter in masks.parameters.items():
        kept = scores[name] > threshold
        if not kept.any():
            kept[torch.unravel_index(wholes[name].abs().argmax(), kept.shape)] = True
        whole = wholes[name]
        masks.hidden[name].copy_(whole)
        masks.kept[name].copy_(kept)
        parameter.copy_(torch.where(kept, whole, torch.zeros_like(whole)))


def _mean_squares(masks: Masks, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor] | None:
    """The mean square of each weight's gradient, by the optimizer; None if it keeps none.

    A parameter that never had a gradient plays no part in the loss, and is removed.
    """
    if optimizer is None:
        return None
    found = {name: optimizer.state.get(item, {}).get(_SQUARES) for name, item in masks.parameters.items()}
    if all(item is None for item in found.values()):
        return None
    return {name: torch.zeros_like(masks.hidden[name]) if item is None else item for name, item in found.items()}


def _threshold(scores: list[Tensor], num_kept: int) -> float:
    """The score above which `num_kept` lie."""
    together = torch.cat([score.reshape(-1) for score in scores])
    num_removed = together.numel() - num_kept
    if num_removed <= 0:
        return -1.0
    return float(together.kthvalue(num_removed).values)
