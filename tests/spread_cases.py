"""Families of cases too large for every run: a spread sample runs by default, all of them by `scripts/test --all`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def spread(cases: Sequence[Any], name_of: Callable[[Any], str], *, every: int) -> list[Any]:
    """Parameters for pytest, one per case; all but each `every`-th are marked `exhaustive`."""
    return [
        pytest.param(case, id=name_of(case), marks=() if index % every == 0 else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]
