"""A batch in shards, as operations: a shard's share of the loss, its record, and sums of gradients over shards.

Each shard runs alone. Its loss counts by its share of the examples. Its record is what the others must know of it: the
loss, and what its forward pass found for buffers, such as the statistics of batch normalisation. Gradients are added in
the order of the tree (`ranks/tree.py`). Those of earlier shards wait in the step's `Shards`, as few sums as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.errors import CallError
from undertow.ir import Node
from undertow.ir.live import Live
from undertow.ir.operation import Operation, operation_maker, register_operation
from undertow.ops.updates import gradient_chain
from undertow.ranks.tree import Span, Tree, push

SHARDS = Live("shards")  # a Shards
RECORDS_CHAIN = "records of shards"
_ONE_BY_ONE = "sums over shards are kept from call to call"  # why a step is no CUDA graph

# What holds for all of these but the share of a loss.
_FACTS: dict[str, Any] = {
    "must_run": True,
    "can_repeat": False,
    "is_measurable": False,
    "why_not_captured": lambda node: _ONE_BY_ONE,
}


@dataclass(eq=False)
class Shards:
    """What a step knows while its shards run one after the other: where it is, sums and records so far.

    `share` is the current shard's part of the loss. It is a tensor that stays, because a step reads it when it runs.
    """

    tree: Tree
    held: Span  # the shards that are computed here
    seed: int = 0
    num_calls: int = 0  # so far: the generators of a shard follow from it
    shard: int = 0
    rest_bytes: int = 0  # of the batch, without the shard that runs
    share: torch.Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    shares: tuple[float, ...] = ()  # of all shards
    sums: dict[str, list[tuple[Span, torch.Tensor]]] = field(default_factory=dict)
    records: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)

    def begin(self, shard: int) -> None:
        """From now on `shard` runs."""
        self.shard = shard
        self.share.fill_(self.shares[shard])

    def forget(self) -> None:
        """Drop the sums and records of a step that has ended, or was broken off."""
        self.sums.clear()
        self.records.clear()

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add the current shard's gradient of a parameter to the sums that wait, or let it wait."""
        waiting = self.sums.setdefault(name, [])
        num_joined, span = self._join(name, waiting)
        for _ in range(num_joined):
            gradient = waiting.pop()[1].add_(gradient)
        waiting.append((span, gradient))

    def add_last(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """The sums over this rank's blocks of shards, once its last shard has a gradient; `gradient` is written over.

        The sum of the last block lies in the memory of `gradient`.
        """
        waiting = self.sums.pop(name, [])
        for _ in range(self._join(name, waiting)[0]):
            gradient.add_(waiting.pop()[1])  # the same bits as the other way round
        return [*(tensor for _, tensor in waiting), gradient]

    def _join(self, name: str, waiting: Sequence[tuple[Span, torch.Tensor]]) -> tuple[int, Span]:
        """How many of the sums that wait the current shard is added to, and the span that it then belongs to."""
        spans = [span for span, _ in waiting]
        if tuple(spans) != self.tree.blocks(Span(self.held.first, self.shard)):
            raise CallError(
                f"parameter {name} has a gradient from some shards and none from others, because the model branches on "
                f"values; such a model cannot be trained in shards: let every shard use the parameter, or train "
                f"without shards"
            )
        return push(self.tree, spans, Span(self.shard, self.shard + 1)), spans[-1]


def _share_of(loss: torch.Tensor, shards: Shards) -> torch.Tensor:
    return shards.share.to(device=loss.device, dtype=loss.dtype).expand_as(loss).clone()


# (loss, shards) -> the cotangent of the loss: its share of the examples.
SHARE = register_operation(Operation("share_of_examples", _share_of, reads_elements=False, is_measurable=False))


def _keep_record(shards: Shards, loss: torch.Tensor, found: Any, buffers: Any, *tensors: torch.Tensor) -> None:
    shards.records[shards.shard] = tuple(tensor.clone() for tensor in (loss, *tensors))


# (shards, loss, what was found for each buffer, the buffers, *the tensors that were found): the shard's record.
KEEP_RECORD = register_operation(
    Operation(
        "keep_record",
        _keep_record,
        chains=lambda node: (RECORDS_CHAIN,),
        assumed_workspace=lambda node: 0,
        **_FACTS,
    )
)


def _keep_gradient(shards: Shards, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    shards.add(name, gradient)


# (shards, name, parameter, gradient): a shard's gradient, which is not the last of this rank.
KEEP_GRADIENT = register_operation(
    Operation(
        "keep_gradient",
        _keep_gradient,
        releases_arguments=False,
        hands_over=3,
        chains=lambda node: (gradient_chain(node.args[2]),),
        assumed_workspace=lambda node: 0,
        **_FACTS,
    )
)


def _add_gradients(gradient: torch.Tensor, shards: Shards, name: str, parameter: torch.Tensor) -> Any:
    sums = shards.add_last(name, gradient.clone(memory_format=torch.preserve_format))
    return sums[0] if len(sums) == 1 else tuple(sums)


def _add_gradients_in_place(gradient: torch.Tensor, shards: Shards, name: str, parameter: torch.Tensor) -> Any:
    return shards.add_last(name, gradient)[-1]


_ADDING = _FACTS | {
    "chains": lambda node: (gradient_chain(node.args[3]),),
    "assumed_workspace": lambda node: 0,
    "releases_arguments": False,
}

# (gradient, shards, name, parameter) -> the sum over this rank's shards, in the memory of the gradient.
ADD_GRADIENTS_IN_PLACE = register_operation(
    Operation("add_gradients_", _add_gradients_in_place, shares=0, writes=lambda node: (node.args[0],), **_ADDING)
)


@operation_maker
def add_gradients(num_blocks: int) -> Operation:
    """(gradient, shards, name, parameter) -> the sum over each block of this rank's shards.

    The gradient is the last shard's, and is written over where nothing else reads it.
    """
    return Operation(
        "add_gradients",
        _add_gradients,
        returns_tuple=num_blocks > 1,
        in_place=ADD_GRADIENTS_IN_PLACE if num_blocks == 1 else None,
        is_fresh=True,
        **_ADDING,
    )


@dataclass(frozen=True)
class Found:
    """What one call found for a buffer: a statistic with its momentum, a number to add, or a whole new value.

    `place` is where a record has it; a number is known without running anything.
    """

    place: int | None = None
    momentum: float | None = None
    number: int | float = 0

    @property
    def plain(self) -> tuple[int | None, float | None, int | float]:
        """As an argument of a node."""
        return self.place, self.momentum, self.number


def _use_records(shards: Shards, found: Sequence[Sequence[Any]], *buffers: torch.Tensor) -> torch.Tensor:
    records = [shards.records[shard] for shard in range(shards.tree.num_shards)]
    for buffer, items in zip(buffers, found, strict=True):
        for record in records:
            for item in items:
                _bring_up_to_date(buffer, Found(*item), record)
    terms = [record[0].mul_(share) for share, record in zip(shards.shares, records, strict=True)]
    for left, right in shards.tree.add_order([Span(shard, shard + 1) for shard in range(len(terms))]):
        terms[left].add_(terms[right])
    return terms[0]


def _bring_up_to_date(buffer: torch.Tensor, found: Found, record: Sequence[torch.Tensor]) -> None:
    """running <- momentum statistic + (1 - momentum) running, each operation rounded."""
    if found.place is None:
        buffer.add_(found.number)
    elif found.momentum is None:
        buffer.copy_(record[found.place])
    else:
        buffer.copy_(found.momentum * record[found.place] + (1 - found.momentum) * buffer)


def _workspace_of_records(node: Node) -> int:
    """A statistic and the buffer, each scaled, and their sum."""
    return 3 * max((buffer.tensor_type.num_bytes for buffer in node.args[2:]), default=0)


# (shards, what each shard found for each buffer, *buffers) -> the loss of the batch. It brings the buffers up to date
# with the records of all shards, in the order of the shards.
USE_RECORDS = register_operation(
    Operation(
        "use_records",
        _use_records,
        writes=lambda node: node.args[2:],
        chains=lambda node: (RECORDS_CHAIN,),
        assumed_workspace=_workspace_of_records,
        **_FACTS,
    )
)
