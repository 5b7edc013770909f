"""The learning rate of each step, as a function of the step alone, so that a resumed run needs no state of a schedule.

A schedule is one of ours, or one of `torch.optim.lr_scheduler` by its name. PyTorch's count steps themselves, so one
is advanced on an optimizer of its own, from the beginning where an earlier step is asked for.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from undertow.errors import CallError
from undertow.train.config import PLATEAU, TrainConfig

# `step` divides the rate by ten at these shares of the run (He et al., CVPR 2016, for CIFAR-10: 32k and 48k of 64k).
STEP_DROPS = (0.5, 0.75)
STEP_FACTOR = 0.1
PLATEAU_FACTOR, PLATEAU_PATIENCE = 0.1, 3  # of `plateau`, where --schedule-args does not say


class Schedule(ABC):
    """Gives the rates of all groups of an optimizer at a step."""

    def __init__(self, config: TrainConfig, rates: Sequence[float]) -> None:
        self._config, self._rates = config, list(rates)

    def at(self, step: int, num_steps: int, num_drops: int = 0) -> list[float]:
        """The rates of update `step`, counted from 0, of `num_steps`; plateaus lowered them `num_drops` times."""
        warmup = self._config.warmup
        if step < warmup:
            return [rate * (step + 1) / warmup for rate in self._rates]
        return self._after_warmup(step - warmup, num_steps - warmup, num_drops)

    @abstractmethod
    def _after_warmup(self, step: int, num_steps: int, num_drops: int) -> list[float]: ...


class Formula(Schedule):
    """constant, linear, cosine, step and plateau."""

    def __init__(self, config: TrainConfig, rates: Sequence[float]) -> None:
        super().__init__(config, rates)
        options = config.schedule_args or {}
        allowed = {
            "step": ("at", "factor"),
            PLATEAU: ("factor", "patience"),
            "cosine": ("least",),
            "linear": ("least",),
        }
        check_names(options, allowed.get(config.schedule, ()), f"--schedule {config.schedule}")
        self._drops = _as_numbers(options.get("at", STEP_DROPS), "at")
        self._factor = _as_numbers([options.get("factor", STEP_FACTOR)], "factor")[0]
        self._least = _as_numbers([options.get("least", 0.0)], "least")[0]

    def _after_warmup(self, step: int, num_steps: int, num_drops: int) -> list[float]:
        return [rate * self._find_factor(step, num_steps, num_drops) for rate in self._rates]

    def _find_factor(self, step: int, num_steps: int, num_drops: int) -> float:
        share = min(step / max(num_steps, 1), 1.0)
        match self._config.schedule:
            case "linear":
                return max(1 - share, self._least)
            case "cosine":
                fall = (1 + math.cos(math.pi * share)) / 2
                return fall if not self._least else self._least + (1 - self._least) * fall
            case "step":
                return self._factor ** sum(share >= drop for drop in self._drops)
            case _ if self._config.schedule == PLATEAU:
                return self._factor**num_drops
        return 1.0


class FromTorch(Schedule):
    """A schedule of `torch.optim.lr_scheduler`, one step an update."""

    def __init__(self, config: TrainConfig, rates: Sequence[float]) -> None:
        super().__init__(config, rates)
        self._class = _find_class(config.schedule)
        self._options = dict(config.schedule_args or {})
        self._taken = 0
        self._scheduler: Any = None
        self._start(1)

    def _start(self, num_steps: int) -> None:
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in self._rates]
        optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
        options = dict(self._options)
        parameters = inspect.signature(self._class).parameters
        if "total_steps" in parameters and not options.keys() & {"total_steps", "epochs"}:
            options["total_steps"] = max(num_steps, 1)
        for name in ("T_max", "total_iters"):
            if name in parameters and name not in options:
                options[name] = max(num_steps, 1)
        try:
            self._scheduler = self._class(optimizer, **options)
        except (TypeError, ValueError) as error:
            given = self._options or "no --schedule-args"
            raise CallError(f"--schedule {self._config.schedule} with {given}: {error}") from None
        self._optimizer, self._taken, self._num_steps = optimizer, 0, num_steps

    def _after_warmup(self, step: int, num_steps: int, num_drops: int) -> list[float]:
        if step < self._taken or num_steps != self._num_steps:
            self._start(num_steps)
        while self._taken < min(step, max(num_steps - 1, 0)):
            self._optimizer.step()
            self._scheduler.step()
            self._taken += 1
        return [group["lr"] for group in self._optimizer.param_groups]


def make_schedule(config: TrainConfig, rates: Sequence[float]) -> Schedule:
    """The schedule of a run; `rates` are the highest of each group."""
    return Formula(config, rates) if config.schedule.islower() else FromTorch(config, rates)


def _find_class(name: str) -> Any:
    from torch.optim import lr_scheduler

    found = getattr(lr_scheduler, name, None)
    known = [
        item
        for item, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and "optimizer" in inspect.signature(value).parameters
        and not {"schedulers", "lr_lambda"} & inspect.signature(value).parameters.keys()
        and item not in ("LRScheduler", "_LRScheduler", "ReduceLROnPlateau")
    ]
    if name == "ReduceLROnPlateau":
        raise CallError(f"--schedule {name}: give --schedule {PLATEAU}, which looks at the loss after each epoch")
    if name not in known:
        raise CallError(f"--schedule {name} is not known; of torch.optim.lr_scheduler there are {', '.join(known)}")
    return found


def check_names(given: dict[str, Any], allowed: Sequence[str], what: str) -> None:
    """Raise CallError for an option that is not among the allowed ones."""
    for name in given:
        if name not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise CallError(f"{what} has no option {name!r}; {takes}")


def _as_numbers(values: Any, name: str) -> list[float]:
    numbers = values if isinstance(values, list | tuple) else [values]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in numbers):
        raise CallError(f"--schedule-args: {name} must be numbers, got {values!r}")
    return [float(item) for item in numbers]
