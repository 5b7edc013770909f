"""A memory budget as users write it: bytes as an int, or a number with a unit."""

from __future__ import annotations

import math
import os
import re
import warnings
from typing import Any

from undertow.errors import CallError
from undertow.planner.instance import MAXIMUM_TOTAL

# One letter is a power of 1024, as in `ulimit`, `docker --memory` and `systemd`.
UNITS = {
    "B": 1,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_budget(budget: Any) -> int:
    """Bytes; raises CallError that says how a budget is written. More than the machine has is a warning."""
    amount = _parse(budget)
    if amount > MAXIMUM_TOTAL:
        raise CallError("budget must be at most 2**59 bytes; for a step without a limit leave it out")
    num_bytes = int(amount)
    if num_bytes <= 0:
        raise CallError(f"budget must be more than 0 bytes, got {budget!r}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory:
        warnings.warn(
            f"the budget of {num_bytes} bytes is more than this machine's memory, {memory} bytes", stacklevel=3
        )
    return num_bytes


def _parse(budget: Any) -> int | float:
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise CallError(f'budget must be bytes as an int, or text such as "6GiB", got {type(budget).__name__}')
    if isinstance(budget, float):
        if not math.isfinite(budget) or budget != int(budget):
            raise CallError(f'budget must be a whole number of bytes, or text such as "6GiB", got {budget!r}')
        return int(budget)
    if isinstance(budget, int):
        return budget
    text = budget.strip()
    if text.endswith("%"):
        raise CallError(
            f"budget {budget!r} is a share of something; give bytes: ut.plan(...).plan.peak_bytes is what a step "
            f"takes without a budget"
        )
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text)
    unit = (match[2] or "B").upper() if match else ""
    if match is None or unit not in UNITS:
        raise CallError(
            f'budget {budget!r} is not understood; write a number and a unit, such as "6GiB" or "6G" (2**30), '
            f'"6GB" (10**9), "500MiB", or an int of bytes'
        )
    return float(match[1]) * UNITS[unit]
