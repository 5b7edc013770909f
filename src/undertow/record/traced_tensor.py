"""The tensors that recorded code runs on: shape, strides, dtype, device and autograd history, but no data.

Each holds a FakeTensor, with which PyTorch computes shapes. User code never sees the FakeTensor itself: libraries test
for it, and then take another path than in eager.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from undertow.ir import TensorType, Value
from undertow.record.views import ViewStep
from undertow.torch_internals import disabled_torch_function, make_wrapper_tensor, tree_map

if TYPE_CHECKING:
    from undertow.record.tracing import Recorder


# The attributes of a traced tensor that a real tensor does not have.
TWIN_NAMES = frozenset(("fake", "alias", "recorder", "value_at_end", "_is_param"))


class TracedTensor(torch.Tensor):
    """A tensor without data, as the user's code sees it while it is recorded."""

    fake: torch.Tensor
    alias: Alias
    recorder: Recorder
    value_at_end: Value  # once the capture is over

    @staticmethod
    def __new__(cls, fake: torch.Tensor, recorder: Recorder) -> TracedTensor:
        tensor = make_wrapper_tensor(
            cls,
            fake.shape,
            strides=fake.stride(),
            storage_offset=fake.storage_offset(),
            dtype=fake.dtype,
            device=fake.device,
        )
        tensor.fake = fake
        tensor.recorder = recorder
        return tensor

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
        return f"TracedTensor({TensorType.of(self.fake)})"


def _real_after_capture(item: Any) -> Any:
    return item.recorder.real_after_capture(item) if isinstance(item, TracedTensor) else item


@dataclass(eq=False)
class Storage:
    """Memory that tensors share: its current value as a whole, and how often it was written."""

    value: Value
    fake: torch.Tensor
    version: int = 0
    tensors: list[TracedTensor] = field(default_factory=list)


@dataclass(eq=False)
class Alias:
    """How a tensor lies in its storage, and the value it had when it was last read."""

    storage: Storage
    steps: tuple[ViewStep, ...]
    value: Value
    version: int
