"""A memory budget as users write it: bytes as an int, a number with a unit, or "auto".

"auto" is what the process may still take, and what of the step it holds already, less a reserve for libraries and for
what the system's pages add to the plan.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from undertow.errors import CallError
from undertow.free_memory import FreeMemory, find_free_memory
from undertow.ir import format_bytes
from undertow.ir.structure import tensors_in
from undertow.planner.instance import MAXIMUM_TOTAL
from undertow.runtime.resident import resident_bytes

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


AUTO = "auto"
# What a process takes besides a step that keeps to its budget (docs/measured.md): libraries and compiled kernels, and
# a share of the budget for pages that are not full.
RESERVED_BYTES, RESERVED_PERCENT = 200 << 20, 5


@dataclass(frozen=True)
class Budget:
    """A budget in bytes, and where it comes from if the user left that open."""

    num_bytes: int
    note: str = ""


def parse_budget(
    budget: Any, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None
) -> Budget:
    """The budget of a step; raises CallError that says how one is written. More than there is is a warning."""
    tensors = _tensors_of(model, optimizer)
    device = tensors[0].device if tensors else torch.device("cpu")
    if budget == AUTO:
        return _find_budget(find_free_memory(device), tensors)
    amount = _parse(budget)
    if amount > MAXIMUM_TOTAL:
        raise CallError("budget must be at most 2**59 bytes; for a step without a limit leave it out")
    num_bytes = int(amount)
    if num_bytes <= 0:
        raise CallError(f"budget must be more than 0 bytes, got {budget!r}")
    free = find_free_memory(device)
    held_bytes = torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()
    if num_bytes > free.free_bytes + held_bytes:
        warnings.warn(
            f"the budget of {format_bytes(num_bytes)} is more than there is: {format_bytes(free.free_bytes)} of "
            f"{format_bytes(free.limit_bytes)} are free in {free.where}",
            stacklevel=3,
        )
    return Budget(num_bytes)


def _find_budget(free: FreeMemory, tensors: list[torch.Tensor]) -> Budget:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    num_bytes = free.free_bytes * (100 - RESERVED_PERCENT) // 100 - RESERVED_BYTES + sum(storages.values())
    found = f"{format_bytes(free.free_bytes)} of {format_bytes(free.limit_bytes)} are free in {free.where}"
    if num_bytes <= 0:
        raise CallError(f'budget "auto" finds no room: {found}, and {format_bytes(RESERVED_BYTES)} are for libraries')
    return Budget(
        num_bytes,
        f"budget auto: {format_bytes(num_bytes)}, since {found}, less {RESERVED_PERCENT} % and "
        f"{format_bytes(RESERVED_BYTES)} for libraries, and what the step holds already counts in the budget",
    )


def _tensors_of(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """What of a step's memory is there before it starts."""
    if model is None:
        return []
    held: list[torch.Tensor] = [*model.parameters(), *model.buffers()]
    held += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return held + [tensor for _, tensor in tensors_in({} if optimizer is None else dict(optimizer.state))]


def _parse(budget: Any) -> int | float:
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise CallError(
            f'budget must be bytes as an int, or text such as "6GiB" or "auto", got {type(budget).__name__}'
        )
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
