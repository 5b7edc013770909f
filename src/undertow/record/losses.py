"""The loss among what a model returns.

A model returns its own loss alone, as `["loss"]` or `.loss`, or first in a tuple, as `transformers` does with
`return_dict=False`. Alone or in a tuple it must be the only scalar that carries a gradient: the model may return an
accuracy too, but not a second loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def find_loss(outputs: Any, is_scalar: Callable[[Any], bool]) -> Any:
    """The loss among `outputs`, None where there is none; `is_scalar` tells scalars that carry a gradient."""
    if is_scalar(outputs):
        return outputs
    if isinstance(outputs, dict):
        return outputs.get("loss")
    if not isinstance(outputs, tuple | list) or hasattr(outputs, "loss"):
        return getattr(outputs, "loss", None)
    scalars = [place for place, item in enumerate(outputs) if is_scalar(item)]
    return outputs[0] if scalars == [0] else None


def is_scalar_tensor(item: Any) -> bool:
    """Whether it is a tensor without dimensions that carries a gradient."""
    return isinstance(item, torch.Tensor) and item.dim() == 0 and item.requires_grad
