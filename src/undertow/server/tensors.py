"""The tensors of one copy of a part: parameters and the optimizer's state, and what entries do to them.

In: entries with the gradients of their pushes. Out: the parameters. The optimizer is PyTorch's own, on the pieces of
the part. Only optimizers are taken whose arithmetic treats each element by itself, so a piece gets the bits that it
would have in the whole. The gradients of an update are added in the order of one tree, as sums over shards are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from undertow.errors import CallError
from undertow.ops.one_pass_updates import FEWEST_ELEMENTS
from undertow.ops.updates import update_with
from undertow.ranks.tree import Span, Tree
from undertow.server.messages import Entry, Push
from undertow.server.parts import Part, Piece

OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
PARAMETER = "parameter"


@dataclass(frozen=True)
class OptimizerSettings:
    """An optimizer as plain data: its class, the settings of each group, and the group of each parameter."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    group_of: dict[str, int]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> OptimizerSettings:
        """Those of an optimizer; `names` are those of its parameters by their ids."""
        kind = type(optimizer)
        if kind not in OPTIMIZERS:
            known = ", ".join(item.__name__.lower() for item in OPTIMIZERS)
            raise CallError(f"a parameter server updates by {known}; {kind.__name__.lower()} is none of them")
        groups = optimizer.param_groups
        plain = tuple({name: item for name, item in group.items() if name != "params"} for group in groups)
        group_of = {names[id(item)]: index for index, group in enumerate(groups) for item in group["params"]}
        return OptimizerSettings(kind.__name__, plain, group_of)

    def make(self, pieces: Mapping[Piece, torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these pieces."""
        members: list[list[torch.nn.Parameter]] = [[] for _ in self.groups]
        for piece, parameter in pieces.items():
            members[self.group_of[piece.name]].append(parameter)
        groups = [{**group, "params": found} for group, found in zip(self.groups, members, strict=True)]
        return getattr(torch.optim, self.kind)(groups, lr=self.groups[0]["lr"])


class PartTensors:
    """One copy's tensors. `log` has every update that was applied since it was made: its version and its pushes."""

    def __init__(
        self,
        part: Part,
        settings: OptimizerSettings,
        values: Mapping[str, numpy.ndarray[Any, Any]],
        is_mean: bool,
        version: int = 0,
    ) -> None:
        self.part, self._settings, self._is_mean = part, settings, is_mean
        self.load(values, version, ())

    def load(
        self,
        values: Mapping[str, numpy.ndarray[Any, Any]],
        version: int,
        log: Sequence[tuple[int, tuple[Push, ...]]],
    ) -> None:
        """Take the parameters and the optimizer's state of another copy; arrays are copied."""
        self.version, self.log = version, list(log)
        self._before: tuple[int, numpy.ndarray[Any, Any]] | None = None
        wanted = self.part.size
        for name, array in values.items():
            is_count = name.endswith("step")
            if array.dtype != numpy.float32 or array.shape != ((len(self.part.pieces),) if is_count else (wanted,)):
                raise CallError(f"the state of a part came with {name} of {array.dtype} {array.shape}")
        parameters = torch.from_numpy(values[PARAMETER].copy())
        self._pieces: dict[Piece, torch.nn.Parameter] = {}
        place = 0
        for piece in self.part.pieces:
            self._pieces[piece] = torch.nn.Parameter(parameters[place : place + piece.size])
            place += piece.size
        self._flat = parameters
        self._optimizer = self._settings.make(self._pieces)
        place = 0
        for index, (piece, parameter) in enumerate(self._pieces.items()):
            for name, array in values.items():
                if name == PARAMETER:
                    continue
                is_count = name.endswith("step")
                found = array[index : index + 1].reshape(()) if is_count else array[place : place + piece.size]
                self._optimizer.state[parameter][name] = torch.from_numpy(numpy.array(found, copy=True))
            place += piece.size

    def state(self) -> dict[str, numpy.ndarray[Any, Any]]:
        """Parameters and the optimizer's state, copied: whole arrays in the order of the pieces."""
        found = {PARAMETER: self._flat.numpy().copy()}
        entries = [self._optimizer.state.get(parameter, {}) for parameter in self._pieces.values()]
        for name, item in (entries[0] if entries else {}).items():
            if item is None:
                continue
            found[name] = torch.cat([torch.as_tensor(entry[name]).float().reshape(-1) for entry in entries]).numpy()
        return found

    def parameters(self) -> numpy.ndarray[Any, Any]:
        """The parameters, copied: what is sent must not change on its way."""
        return self._flat.numpy().copy()

    def parameters_at(self, version: int) -> tuple[int, numpy.ndarray[Any, Any]] | None:
        """A version and its parameters: this one, the latest if it is long gone; None if it is yet to come.

        An update begins when all parts have the one before. So who asks for a version before the last two has a batch
        that every part has, and whatever it computes is not applied. Raises CallError if the last but one is not held.
        """
        if version > self.version:
            return None
        if version != self.version - 1:
            return self.version, self.parameters()
        if self._before is None:
            raise CallError(f"the parameters of version {version} are not held any longer: go back to the checkpoint")
        return self._before

    def apply(self, entry: Entry, gradients: Sequence[torch.Tensor]) -> None:
        """Update by the gradients of the entry's pushes, in their order; the sum is made in the first one's memory."""
        if not entry.pushes:
            return
        self.version += 1
        self.log.append((self.version, entry.pushes))
        if not self._is_mean:
            self._before = self.version - 1, self.parameters()
        total = add_up(gradients)
        if self._is_mean and len(gradients) > 1:
            total /= len(gradients)
        for group, rate in zip(self._optimizer.param_groups, entry.pushes[0].rates, strict=True):
            group["lr"] = rate
        place = 0
        for piece, parameter in self._pieces.items():
            gradient = total[place : place + piece.size]
            update_with(self._optimizer, self._settings.group_of[piece.name], parameter, gradient)
            place += piece.size

    def sha256(self) -> str:
        """The hash of everything."""
        found = hashlib.sha256()
        for name, array in sorted(self.state().items()):
            found.update(name.encode())
            found.update(array.tobytes())
        return found.hexdigest()


def warm_up(settings: OptimizerSettings) -> None:
    """Update something once or twice: kernels that are compiled when they are first used would stop a server then."""
    for group in settings.groups:
        parameter = torch.nn.Parameter(torch.zeros(FEWEST_ELEMENTS))
        optimizer = getattr(torch.optim, settings.kind)([{**group, "params": [parameter]}], lr=group["lr"])
        for _ in range(2):
            update_with(optimizer, 0, parameter, torch.zeros(FEWEST_ELEMENTS))


def add_up(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the tree over them, a new tensor where there are several."""
    if len(gradients) == 1:
        return gradients[0]
    tree = Tree(len(gradients))
    sums: list[torch.Tensor | None] = [gradient.clone() for gradient in gradients]
    for left, right in tree.add_order([Span(index, index + 1) for index in range(len(gradients))]):
        held, added = sums[left], sums[right]
        assert held is not None and added is not None
        held += added
        sums[right] = None
    assert sums[0] is not None
    return sums[0]
