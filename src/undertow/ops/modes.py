"""Running operations beneath autograd, as eager's own autograd kernels run them.

Some kernels ask whether gradients are enabled (LSTM keeps a workspace only then, with other bits). So a step cannot run
under `no_grad`. It runs in the user's grad mode, with autograd's dispatch keys switched off: nothing is recorded, and
views are plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from undertow.torch_internals import (
    AutoDispatchBelowADInplaceOrView,
    DisableAutocast,
    DispatchKey,
    SetExcludeDispatchKeyGuard,
    is_any_autocast_enabled,
    is_key_excluded,
)


class below_autograd:
    """Run what is inside without autograd and without autocast: a Program holds its casts explicitly."""

    __slots__ = ("_autocast", "_autograd")

    def __enter__(self) -> None:
        self._autograd = AutoDispatchBelowADInplaceOrView()
        self._autograd.__enter__()
        self._autocast = DisableAutocast() if is_any_autocast_enabled() else None
        if self._autocast is not None:
            self._autocast.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._autocast is not None:
            self._autocast.__exit__(*error)
        self._autograd.__exit__(*error)


AutocastState = tuple[tuple[str, bool, torch.dtype], ...]


def autocast_state() -> AutocastState:
    """Device, whether autocast is enabled for it, and to which dtype."""
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


@contextmanager
def restored_autocast(state: AutocastState) -> Iterator[None]:
    """Run what is inside under an autocast state seen before, also beneath `below_autograd`."""
    keys = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
    with ExitStack() as stack:
        for kind, is_enabled, dtype in state:
            if is_enabled:
                stack.enter_context(SetExcludeDispatchKeyGuard(keys[kind], False))
                stack.enter_context(torch.autocast(kind, dtype))
        yield


@contextmanager
def with_autograd() -> Iterator[None]:
    """Record what is inside in autograd's graph, also beneath `below_autograd`."""
    keys = (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView)
    with (
        SetExcludeDispatchKeyGuard(keys[0], False),
        SetExcludeDispatchKeyGuard(keys[1], False),
        torch.enable_grad(),
    ):
        yield


def records_in_autograd() -> bool:
    """Whether what runs here becomes part of autograd's graph."""
    key = DispatchKey.AutogradFunctionality
    return torch.is_grad_enabled() and not is_key_excluded(key)
