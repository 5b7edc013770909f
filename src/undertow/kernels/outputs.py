"""Where a kernel writes: into given tensors, or into new ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Out = Sequence[torch.Tensor | None] | None  # a tensor per output; None where one is to be made


def given(out: Out, index: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The tensor for output number `index`: the given one, or a new one."""
    found = None if out is None else out[index]
    return make() if found is None else found
