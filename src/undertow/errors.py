"""Every error that Undertow raises on purpose.

UndertowError
├── CaptureError            the model or function cannot be recorded faithfully; names the line
│   └── TooManyOutcomes     branches on tensor values had more outcomes than are stored
├── CallError (TypeError)   a call to Undertow itself is wrong; names the argument
├── DataError               a file of data or weights is missing, damaged, or refused; names the file
├── FolderError             a run's folder cannot be read or written; says what of the run survives
├── OutputError             stdout or stderr cannot be written
│   └── ClosedPipe          nobody reads it any more
├── NotFinite               the loss or a weight is not finite; names the operation that made the first such value
├── InfeasibleBudget        no plan fits the budget; says the least that fits, and what else would help
├── RankLost                another process of the job is gone or fails; says which, in what, and why
├── ProgramError            a Program is malformed; a defect in Undertow
├── PlanError               a Plan is unsound; a defect in Undertow, or a Plan from elsewhere
├── UnsupportedTorch (ImportError)  PyTorch is too old, or lacks something that Undertow needs; says which to install
├── MissingRule             `strict=True` met an operation without a rule, or PyTorch has no derivative either
└── GradientCheckFailed     an analytic derivative disagrees with the numerical one
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UndertowError(Exception):
    """Base of all errors raised on purpose."""


class CaptureError(UndertowError):
    """The model or function cannot be recorded faithfully."""


class TooManyOutcomes(CaptureError):
    """Branches on tensor values had more outcomes than are stored."""


class CallError(UndertowError, TypeError):
    """A call to Undertow itself is wrong."""


class DataError(UndertowError):
    """A file of data or weights is missing, damaged, or refused."""


class FolderError(UndertowError):
    """A run's folder cannot be read or written."""


class OutputError(UndertowError):
    """Stdout or stderr cannot be written."""


class ClosedPipe(OutputError):
    """Nobody reads stdout or stderr any more."""


class NotFinite(UndertowError):
    """The loss or a weight is infinite or not a number."""


@dataclass(frozen=True)
class WayOut:
    """A change under which the step fits the budget, and the peak that was planned for it."""

    change: str
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.change}: {self.peak_bytes} bytes"


class InfeasibleBudget(UndertowError):
    """No plan fits the budget. `minimum_bytes` can be reached; less than `lower_bound_bytes` cannot.

    `other_bits_minimum_bytes` can be reached by kernels that round differently; None if those need no less. `ways` are
    changes under which the step fits, each planned; `hints` may help and were not planned. `at` is where the `least`
    plan has its peak, and `parts` are the bytes there by what they are.
    """

    def __init__(
        self,
        message: str,
        minimum_bytes: int,
        lower_bound_bytes: int,
        other_bits_minimum_bytes: int | None,
        *,
        budget_bytes: int,
        at: str,
        parts: tuple[tuple[str, int], ...],
        ways: tuple[WayOut, ...],
        hints: tuple[str, ...],
        least: Any,
    ) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.other_bits_minimum_bytes = other_bits_minimum_bytes
        self.budget_bytes = budget_bytes
        self.at, self.parts = at, parts
        self.ways, self.hints = ways, hints
        self.least = least

    def __str__(self) -> str:
        fitting = "; ".join(map(str, self.ways)) or "no single change that was planned"
        hints = f". Not planned, may help: {'; '.join(self.hints)}" if self.hints else ""
        return f"{self.args[0]}. What would fit: {fitting}{hints}"


class RankLost(UndertowError):
    """Another process of the job is gone, stands still or has failed. `rank` is None where it is not known which."""

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class ProgramError(UndertowError):
    """A Program is malformed."""


class PlanError(UndertowError):
    """A Plan is unsound."""


class UnsupportedTorch(UndertowError, ImportError):
    """This version of PyTorch is too old, or lacks something that Undertow needs."""


class MissingRule(UndertowError):
    """An operation has no derivative rule where one is required."""


class GradientCheckFailed(UndertowError):
    """An analytic derivative disagrees with the numerical one; `result` is the GradientCheck."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result
