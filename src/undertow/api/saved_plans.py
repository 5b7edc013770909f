"""`save_plan` and `load_plan`: plans as files, to be run in another process or read there."""

from __future__ import annotations

from pathlib import Path

import torch

from undertow.api.training import TrainStep
from undertow.errors import CallError
from undertow.ir import Plan
from undertow.ir.saving import read_plan, write_plan


def save_plan(step: TrainStep | torch.nn.Module, path: str | Path) -> None:
    """Write the plan of a training step or a planned module to a file, for `saved_plan=` in another process."""
    runner = step.runner if isinstance(step, TrainStep) else getattr(step, "undertow_runner", None)
    if runner is None:
        raise CallError(f"step must come from ut.train_step or ut.plan, got {type(step).__name__}")
    write_plan(runner.plan, runner.request.terms.table, path)


def load_plan(path: str | Path) -> Plan:
    """The plan in a file, checked, to read and not to run; raises PlanError where it is not sound."""
    return read_plan(path).read()
