"""What stages send each other, as operations: a start and a finish, computing in between, bytes as their cost.

A stage's Program for one shard runs in pieces. Where a piece ends, PAUSE gives way to other shards. What a piece reads
of other stages was asked for before it began, so that it arrives while something else is computed. A generator's state
travels like a tensor: the next stage that draws goes on from it.

Between two stages of one rank nothing is sent: the receiver gets a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from undertow.ir import Node, TensorType
from undertow.ir.live import Live
from undertow.ir.operation import REVERSIBLE, Operation, register_operation
from undertow.ops.clipping import in_memory_order
from undertow.ops.communication import LINK_FACTS, LINK_LANE
from undertow.ops.shards import RECORDS_CHAIN
from undertow.ops.updates import chain_of
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.ranks import Ranks

STAGE_LINK = Live("link between stages")  # a StageLink
ROUTE_TAGS = 1 << 21  # of what stages send; buckets, records and packages have smaller tags


@dataclass(eq=False)
class StageLink:
    """What the stages of one rank are bound to. `shard` is the one that runs."""

    ranks: Ranks
    rank_of_stage: Sequence[int]
    shard: int = 0
    waited_ns: int = 0  # for what other stages send, since the step was made
    sent_bytes: dict[tuple[int, int], int] = field(default_factory=dict)  # from stage to stage, since the step was made
    _sending: dict[tuple[int, int], list[Transfer]] = field(default_factory=dict)  # by stage and shard
    _arriving: dict[tuple[int, int], tuple[Transfer | None, torch.Tensor]] = field(default_factory=dict)

    def ask_for(self, route: int, shard: int, source: int, kind: TensorType) -> None:
        """Begin to receive what `source` sends of a shard; `take` waits for it."""
        rank = self.rank_of_stage[source]
        if rank == self.ranks.rank:
            return  # it is put here by whoever makes it
        tensor = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype)
        steps = _receive(self.ranks, _as_sent(tensor), rank, ROUTE_TAGS + route)
        transfer = self.ranks.lane.start(f"what stage {source} made of shard {shard}", steps)
        self._arriving[route, shard] = transfer, tensor

    def take(self, route: int) -> torch.Tensor:
        """What was asked for, of the shard that runs."""
        transfer, tensor = self._arriving.pop((route, self.shard))
        if transfer is not None:
            start_ns = time.perf_counter_ns()
            self.ranks.finish(transfer)
            self.waited_ns += time.perf_counter_ns() - start_ns
        return tensor

    def start_send(self, route: int, stage: int, target: int, tensor: torch.Tensor) -> Transfer | None:
        """Begin to send; what is sent must stay as it is until `finish_send`."""
        place = stage, target
        self.sent_bytes[place] = self.sent_bytes.get(place, 0) + tensor.nbytes
        rank = self.rank_of_stage[target]
        if rank == self.ranks.rank:
            self._arriving[route, self.shard] = None, tensor.clone(memory_format=torch.preserve_format)
            return None
        steps = _send(self.ranks, _as_sent(tensor), rank, ROUTE_TAGS + route)
        transfer = self.ranks.lane.start(f"shard {self.shard} to stage {target}", steps)
        self._sending.setdefault((stage, self.shard), []).append(transfer)
        return transfer

    def has_sent(self, stage: int, shard: int) -> bool:
        """Whether all that a stage sends of a shard has left."""
        return all(transfer.is_done.is_set() for transfer in self._sending.get((stage, shard), ()))

    def finish_send(self, transfer: Transfer | None) -> None:
        """Wait until it was sent."""
        if transfer is not None:
            self.ranks.finish(transfer)

    def forget(self) -> None:
        """Drop what a step that has ended, or was broken off, sent and received."""
        self._sending.clear()
        self._arriving.clear()


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor.detach()).view(torch.uint8)


def _send(ranks: Ranks, flat: torch.Tensor, rank: int, tag: int) -> Steps:
    yield ranks.messages.send(flat, rank, tag, 0)


def _receive(ranks: Ranks, flat: torch.Tensor, rank: int, tag: int) -> Steps:
    yield ranks.messages.receive(flat, rank, tag, 0)


_SENDING = LINK_FACTS | {"lane": LINK_LANE}

# (link, route, stage, target stage, tensor) -> the transfer, which uses the tensor until it was waited for.
START_SEND = register_operation(
    Operation("start_send", lambda link, *about: link.start_send(*about), borrows=True, **_SENDING)
)

# (transfer, link): it was sent.
FINISH_SEND = register_operation(
    Operation("finish_send", lambda transfer, link: link.finish_send(transfer), **_SENDING)
)

# (link, route) -> what another stage has sent.
FINISH_RECEIVE = register_operation(
    Operation("finish_receive", lambda link, route: link.take(route), is_fresh=True, **_SENDING)
)


def _set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


# (generator, state): from here on it goes on where the stage before stopped.
SET_STATE = register_operation(
    Operation(
        "set_generator_state",
        _set_state,
        must_run=True,
        can_repeat=False,
        is_measurable=False,
        chains=lambda node: (REVERSIBLE,),
        assumed_workspace=lambda node: 0,
        why_not_captured=lambda node: "a generator's state came from another stage",
    )
)


def _never_called(*names: str) -> None:
    raise AssertionError("a pause is written into the code of a step")


def _chains_of_pause(node: Node) -> tuple[str, ...]:
    return LINK_LANE, REVERSIBLE, RECORDS_CHAIN, *map(chain_of, node.args)


# (*names of parameters): other pieces run before the next operation does. What is done with the gradients of these
# stays in its piece, because gradients are added in the order of the shards.
PAUSE = register_operation(
    Operation(
        "pause",
        _never_called,
        pauses=True,
        must_run=True,
        can_repeat=False,
        is_measurable=False,
        costs_nothing=True,
        chains=_chains_of_pause,
        assumed_workspace=lambda node: 0,
        why_not_captured=lambda node: "the pieces of a stage run in turns",
    )
)


# () -> what stands for the loss in the record of a stage that has none.
NO_LOSS = register_operation(Operation("no_loss", lambda: torch.zeros(()), is_fresh=True, is_measurable=False))
