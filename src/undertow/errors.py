"""Every error Undertow raises on purpose.

UndertowError
├── CaptureError            the model or function cannot be recorded faithfully; names the line
│   └── TooManyOutcomes     branches on tensor values took more outcomes than are kept
├── CallError (TypeError)   a call to Undertow itself is wrong; names the argument
├── ProgramError            a Program is malformed; a defect in Undertow
├── MissingRule             `strict=True`, or a second derivative, met an operation without a rule
└── GradientCheckFailed     an analytic derivative disagrees with the numerical one
"""

from __future__ import annotations

from typing import Any


class UndertowError(Exception):
    """Base of all errors raised on purpose."""


class CaptureError(UndertowError):
    """The model or function cannot be recorded faithfully."""


class TooManyOutcomes(CaptureError):
    """Branches on tensor values took more outcomes than are kept."""


class CallError(UndertowError, TypeError):
    """A call to Undertow itself is wrong."""


class ProgramError(UndertowError):
    """A Program is malformed."""


class MissingRule(UndertowError):
    """An operation without a derivative rule where one is required."""


class GradientCheckFailed(UndertowError):
    """An analytic derivative disagrees with the numerical one; `result` is the GradientCheck."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result
