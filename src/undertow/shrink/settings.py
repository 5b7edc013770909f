"""The choices of a shrinking, as plain data: what may be lost, how long is retrained, how steps are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from undertow.coding.payloads import Coder
from undertow.errors import CallError
from undertow.terms import Numerics

CODERS = ("mixed", "huffman")
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


@dataclass(frozen=True)
class Settings:
    """`max_loss` is in percentage points of accuracy; where data has no labels, in percent of the loss."""

    max_loss: float = 0.1
    coder: Coder = "mixed"
    epochs: int = 4  # of retraining in each round
    lr: float = 1e-3
    optimizer: str = "adam"
    distill: float = 0.0  # the share of the dense network's outputs in the loss
    seed: int = 0
    numerics: str = "exact"
    budget: int | str | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not self.max_loss >= 0:
            raise CallError(f"max_loss must be 0 or more percentage points, got {self.max_loss!r}")
        if self.coder not in CODERS:
            raise CallError(f"coder must be one of {', '.join(CODERS)}, got {self.coder!r}")
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise CallError(f"epochs must be a whole number of at least 1, got {self.epochs!r}")
        if not self.lr > 0 or not 0 <= self.distill <= 1:
            raise CallError(f"lr must be above 0 and distill between 0 and 1, got {self.lr!r} and {self.distill!r}")
        if self.optimizer not in OPTIMIZERS:
            raise CallError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.numerics not in list(Numerics):
            raise CallError(f"numerics must be one of {', '.join(Numerics)}, got {self.numerics!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))
