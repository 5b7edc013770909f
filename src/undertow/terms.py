"""The terms of a step: the budget, which kernels may run, and where the costs of operations come from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from undertow.ir.cost import Cost


class CostSource(StrEnum):
    """Where the times of operations come from."""

    MEASURED = "measured"
    MODEL = "model"


class Numerics(StrEnum):
    """Which kernels may run: those with eager's bits, or also those that round differently, within a stated bound.

    `bf16` is `fast` for a forward pass in bfloat16 (see `record/precision.py`).
    """

    EXACT = "exact"
    FAST = "fast"
    BF16 = "bf16"


class Preference(StrEnum):
    """How a kernel is chosen, where several may run."""

    TIME = "time"
    WORKSPACE = "workspace"


@dataclass(frozen=True)
class Terms:
    """What a plan must respect. Without a budget nothing is searched, and nothing is measured before somebody asks.

    `table` holds the measured costs that plans are made from; costs that are already in it are not measured again.
    """

    budget_bytes: int | None = None
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)
    costs: CostSource = CostSource.MEASURED
    time_limit_s: float = math.inf
    numerics: Numerics = Numerics.EXACT
    table: dict[str, Cost] = field(default_factory=dict, repr=False, compare=False)
    allows_other_bits: bool = False
    preference: Preference = Preference.TIME
    budget_note: str = ""  # where the budget comes from, if the user left that open
