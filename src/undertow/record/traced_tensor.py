"""The tensors that recorded code runs on: shape, strides, dtype, device and autograd history, but no data.

Each has an Outline, from which the types of results are found, where needed with PyTorch's FakeTensors. User code never
sees a FakeTensor: libraries test for it, and then take another path than in eager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from undertow.ir import Value
from undertow.record.outlines import Outline
from undertow.record.views import ViewStep
from undertow.torch_internals import disabled_torch_function, make_wrapper_tensor, tree_map

if TYPE_CHECKING:
    from undertow.record.tracing import Recorder


# The attributes of a traced tensor that a real tensor does not have.
TWIN_NAMES = frozenset(("outline", "alias", "recorder", "value_at_end", "_is_param"))


class TracedTensor(torch.Tensor):
    """A tensor without data, as the user's code sees it while it is recorded."""

    outline: Outline
    alias: Alias
    recorder: Recorder
    value_at_end: Value  # once the capture is over

    @staticmethod
    def __new__(cls, outline: Outline, recorder: Recorder) -> TracedTensor:
        kind = outline.type
        tensor = make_wrapper_tensor(
            cls,
            kind.shape,
            strides=kind.strides,
            storage_offset=outline.offset,
            dtype=kind.dtype,
            device=kind.device,
        )
        tensor.outline = outline
        tensor.recorder = recorder
        return tensor

    @property
    def fake(self) -> torch.Tensor:
        """The tensor as PyTorch's fake kernels take it."""
        return self.outline.fake

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Code that keeps tensors outside the model, such as a cache of masks, still holds one after its capture.
        args, kwargs = tree_map(_real_after_capture, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def data(self) -> Any:
        """The tensor without history, sharing memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if new.shape != self.shape or new.dtype != self.dtype or new.device != self.device:
            self.recorder.refuse("assigning .data of another type", "make a new tensor instead")
        with torch.no_grad():
            self.copy_(new)

    def data_ptr(self) -> int:
        """Refused: a recorded tensor has no memory."""
        return self.recorder.refuse("reading a tensor's address (data_ptr)", "keep the computation in torch")

    def tolist(self) -> Any:
        """Read element by element, so that every number becomes a guard."""
        return self.item() if self.dim() == 0 else [element.tolist() for element in self]

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a recorded tensor has no memory to share."""
        return self.recorder.refuse("sharing a tensor's memory (DLPack)", "keep the computation in torch")

    def register_hook(self, hook: Any) -> Any:
        """Refused: the hook would run on a tensor that a planned step never makes."""
        self.recorder.refuse(
            "a tensor hook (register_hook)", "move the hook to a parameter, or into an autograd.Function"
        )

    def retain_grad(self) -> None:
        """Refused, like a hook."""
        self.recorder.refuse("retain_grad() on an intermediate tensor", "return the tensor, or use ut.trace")

    def numpy(self, *, force: bool = False) -> Any:
        """Refused: a recorded tensor has no data."""
        self.recorder.refuse("a conversion to NumPy", "keep the computation in torch")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Refused: it would write gradients in the middle of a forward pass."""
        self.recorder.refuse(".backward() inside the recorded code", "use torch.autograd.grad, which is recorded")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self.numpy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({self.outline.type})"


def _real_after_capture(item: Any) -> Any:
    return item.recorder.real_after_capture(item) if isinstance(item, TracedTensor) else item


@dataclass(eq=False)
class Storage:
    """Memory that tensors share: its current value as a whole, and how often it was written."""

    value: Value
    outline: Outline
    version: int = 0
    tensors: list[TracedTensor] = field(default_factory=list)

    @property
    def fake(self) -> torch.Tensor:
        """The whole, as PyTorch's fake kernels take it."""
        return self.outline.fake


@dataclass(eq=False)
class Alias:
    """How a tensor lies in its storage, and the value it had when it was last read."""

    storage: Storage
    steps: tuple[ViewStep, ...]
    value: Value
    version: int
