"""What the search for a cut is told: measured times of a shard, and an estimate of each rank's memory.

In: a recorded shard. Out: its profile, and whether the ranks of a cut may keep to a budget. Where a rank was planned
and did not, what it lacked is remembered for other cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from undertow.alternatives.registry import find_parts
from undertow.api.stage_programs import Recorded
from undertow.costs.optimizer_state import count_optimizer_state
from undertow.costs.table import find_costs
from undertow.passes.stage_profile import find_profile
from undertow.pipeline import Request
from undertow.ranks.tree import Span, Tree
from undertow.stages.cutting import Profile, held_bytes
from undertow.stages.schedules import Schedule


def profile_of(request: Request, recorded: Recorded, schedule: Schedule, tree: Tree) -> Profile:
    """The profile of a recorded shard, with measured times or with estimated ones, as the terms say."""
    program = recorded.program
    nodes = list(program.nodes)
    if schedule.is_in_halves:
        nodes += [part for node in program.second_pass for part in find_parts(node)]
    for node in nodes:
        if node.operation.compile is not None:
            node.operation.compile()
    costs = find_costs(nodes, request.terms, {**recorded.captured.live, **request.live})
    trained = [parameter for parameter in request.model.parameters() if parameter.requires_grad]
    total = sum(parameter.nbytes for parameter in trained)
    state = 0
    if request.terms.optimizer is not None:
        state = count_optimizer_state(request.terms.optimizer, trained).num_bytes or 0
    waiting = tree.most_partial_sums(Span(0, tree.num_shards))
    owned = {
        name: int(parameter.nbytes * (state / max(1, total) + waiting))
        for name, parameter in request.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    return find_profile(program, costs, owned, schedule.is_in_halves)


@dataclass(eq=False)
class Estimate:
    """Whether the ranks of a cut may keep to a budget. At first only what they hold throughout counts."""

    profile: Profile
    schedule: Schedule
    budget_bytes: int
    batch_bytes: int
    lacking: dict[int, int] = field(default_factory=dict)  # by rank: what its plans needed beyond that

    def fits(self, starts: Sequence[int]) -> bool:
        """Whether every rank's estimate is within the budget."""
        return all(
            self._held(starts, rank) + self.lacking.get(rank, 0) <= self.budget_bytes
            for rank in range(self.schedule.num_ranks)
        )

    def learn(self, starts: Sequence[int], stage: int, minimum_bytes: int) -> None:
        """A rank with this stage was planned, and needs so much at least."""
        rank = self.schedule.rank_of(stage)
        self.lacking[rank] = max(self.lacking.get(rank, 0), minimum_bytes - self._held(starts, rank))

    def _held(self, starts: Sequence[int], rank: int) -> int:
        stages = self.schedule.stages_of(rank)
        return self.batch_bytes + sum(held_bytes(self.profile, starts, stage) for stage in stages)
