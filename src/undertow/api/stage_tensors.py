"""Which parameters and buffers a rank holds: those that its stages read.

In: for each tensor of the model the stages that read it, the first of which updates it. Tensors that a rank's stages do
not read are set aside: their memory is freed, and they read as "not a number", so that nobody takes them for weights.
`gather` brings all tensors to all ranks of a row, and the next step sets them aside again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.ir import TensorType
from undertow.ops.clipping import in_memory_order
from undertow.ranks.lane import Steps
from undertow.ranks.ranks import Ranks

OWNED_TAGS = (1 << 21) + (1 << 20)  # of parameters that travel; what stages send has smaller tags


def is_set_aside(tensor: torch.Tensor) -> bool:
    """Whether another rank holds it: here it is one number, seen in every place."""
    return tensor.numel() > 1 and not any(tensor.stride())


@dataclass(eq=False)
class StageTensors:
    """The tensors of a model over the ranks of a row."""

    model: torch.nn.Module
    ranks: Ranks
    row: Sequence[int]  # the ranks of this row, in the order of the stages
    readers: Mapping[str, Sequence[int]]  # for each tensor the places in the row that hold it; the first updates it
    is_whole: bool = True
    kinds: dict[str, TensorType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = {name: TensorType.of(tensor) for name, tensor in self.tensors().items()}

    @property
    def place(self) -> int:
        """This rank's place in its row."""
        return self.row.index(self.ranks.rank)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, each once."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

    def is_here(self, name: str) -> bool:
        """Whether this rank's stages read a tensor; one that no stage reads stays where it is."""
        return self.place in self.readers.get(name, (self.place,))

    def is_own(self, name: str) -> bool:
        """Whether this rank updates it."""
        return self.readers.get(name, (self.place,))[0] == self.place

    def set_aside(self) -> None:
        """Free what this rank's stages do not read. Whole numbers stay: they are counters, and small."""
        if not self.is_whole:
            return
        for name, tensor in self.tensors().items():
            if not self.is_here(name) and tensor.dtype.is_floating_point:
                tensor.data = torch.full((), torch.nan, dtype=tensor.dtype).expand(tensor.shape)
        self.is_whole = False

    def gather(self) -> None:
        """Bring all tensors to all ranks of the row, from those that update them."""
        if self.is_whole:
            return
        for number, (name, tensor) in enumerate(self.tensors().items()):
            readers = self.readers.get(name)
            if readers is not None:
                if not self.is_here(name) and tensor.dtype.is_floating_point:
                    kind = self.kinds[name]
                    tensor.data = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype)
                self.send(tensor.data, readers[0], range(len(self.row)), number)
        self.is_whole = True

    def send_updated(self, names: Sequence[str]) -> None:
        """Parameters that several ranks of the row hold go from the one that updates them to the others."""
        tensors = self.tensors()
        numbers = {name: number for number, name in enumerate(tensors)}
        for name in names:
            self.send(tensors[name].data, self.readers[name][0], self.readers[name], numbers[name])

    def send(self, tensor: torch.Tensor, source: int, targets: Sequence[int], number: int) -> None:
        """A tensor from one place of the row to others; all of them call this in the same order."""
        steps = self._send(tensor, source, targets, OWNED_TAGS + number)
        self.ranks.finish(self.ranks.lane.start("a parameter", steps))

    def _send(self, tensor: torch.Tensor, source: int, targets: Sequence[int], tag: int) -> Steps:
        messages = self.ranks.messages
        if self.place not in (source, *targets):
            return
        flat = in_memory_order(tensor).view(torch.uint8)
        if self.place == source:
            sent: list[Any] = []
            for place in targets:
                if place != source:
                    sent += messages.send(flat, self.row[place], tag, 0)
            yield sent
        else:
            yield messages.receive(flat, self.row[source], tag, 0)
