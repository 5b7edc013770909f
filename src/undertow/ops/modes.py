"""Running operations beneath autograd, as eager's own autograd kernels run them.

Some kernels ask whether gradients are enabled (LSTM keeps a workspace only then, with other bits), so a step cannot run
under `no_grad`. It runs with the user's grad mode and with autograd's dispatch keys switched off: nothing is recorded,
and views are plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run what is inside without autograd and without autocast: a Program holds its casts explicitly."""
    with torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
        yield


@contextmanager
def with_autograd() -> Iterator[None]:
    """Record what is inside in autograd's graph, also beneath `below_autograd`."""
    keys = (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys[0], False),
        torch._C._SetExcludeDispatchKeyGuard(keys[1], False),
        torch.enable_grad(),
    ):
        yield
