"""Some of the ranks of a job, as if they were all: those that have the same layers.

In: the ranks and a number that keeps the messages of several groups apart. Out: what the sums of a stage are bound to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import AT_ONCE, Messages, Pending, Urgency
from undertow.ranks.ranks import Ranks

GROUP_TAGS = 1 << 22  # of one group; larger than any tag of a transfer

MakeSteps = Callable[[Messages, Callable[[torch.Tensor], torch.Tensor]], Steps]


class GroupMessages(Messages):
    """Messages among the members, who are known by their places."""

    def __init__(self, messages: Messages, members: Sequence[int], first_tag: int) -> None:
        super().__init__(members.index(messages.rank), len(members))
        self._messages, self._members, self._first_tag = messages, members, first_tag

    def send(self, tensor: torch.Tensor, to: int, tag: int, part: int, urgency: Urgency = AT_ONCE) -> Sequence[Pending]:
        return self._messages.send(tensor, self._members[to], self._first_tag + tag, part, urgency)

    def receive(self, tensor: torch.Tensor, source: int, tag: int, part: int) -> Sequence[Pending]:
        return self._messages.receive(tensor, self._members[source], self._first_tag + tag, part)


class RankGroup:
    """This process among the members of a group."""

    def __init__(self, ranks: Ranks, members: Sequence[int], number: int) -> None:
        self._ranks, self._members, self._first_tag = ranks, tuple(members), number * GROUP_TAGS
        self.rank, self.size = self._members.index(ranks.rank), len(self._members)

    def start(
        self,
        about: str,
        make: MakeSteps,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> Transfer:
        """Start a transfer among the members."""

        def make_within(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
            return make(GroupMessages(messages, self._members, self._first_tag), at)

        return self._ranks.start(about, make_within, device, reads, writes)

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer; raises RankLost."""
        self._ranks.finish(transfer)
