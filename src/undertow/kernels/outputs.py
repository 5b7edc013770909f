"""Where a kernel writes: into the tensors that it was given, or into new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Out = Sequence[torch.Tensor | None] | None  # a tensor per output; None where one is to be made


def given(out: Out, place: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor for an output: the one that was given, or a new one."""
    found = None if out is None else out[place]
    return make() if found is None else found
