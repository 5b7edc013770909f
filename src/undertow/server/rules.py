"""What holds for all parts of a job, and the rule of the bounded delay.

Staleness of a push: the number of updates that were applied to the part between its worker's pull and the push itself.
An update is made of one push or of several, and none of them is staler than `max_delay`.

- With a delay of 0 the server is synchronous. Update t is made of the pushes of the batches t N to t N + N - 1, where N
  is `round_size`, whoever computed them. So the result depends on no worker, and on none that is lost.
- Otherwise an update waits while it would make somebody else's push too stale. Pushes that have waited so long that
  they are at the bound themselves are applied together, as one update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from undertow.server.messages import Push


@dataclass(frozen=True, slots=True)
class Rules:
    """What every machine of a job knows. Times are seconds of each process's own clock."""

    controllers: tuple[str, ...]
    max_delay: float = math.inf
    round_size: int = 1
    lease_s: float = 2.0

    def is_majority(self, num_controllers: int) -> bool:
        """Whether so many controllers are more than half of all."""
        return 2 * num_controllers > len(self.controllers)

    def update_of(self, number: int) -> int:
        """With a delay of 0: the update that this batch is a part of, which is also the version that it needs."""
        return number // self.round_size


def choose_update(
    rules: Rules, part: int, version: int, holding: Mapping[str, int], waiting: Sequence[Push]
) -> tuple[Push, ...]:
    """The pushes that make the next update, in the order of their numbers; none while others have to be waited for.

    `holding` says which version of the part each worker has pulled.
    """
    if rules.max_delay == 0:
        numbers = range(version * rules.round_size, (version + 1) * rules.round_size)
        found = sorted((push for push in waiting if push.number in numbers), key=lambda push: push.number)
        return tuple(found) if len(found) == len(numbers) else ()
    if not waiting:
        return ()
    have_pushed = {push.worker for push in waiting}
    if any(version - held >= rules.max_delay for worker, held in holding.items() if worker not in have_pushed):
        return ()
    at_bound = [push for push in waiting if version - push.versions[part] >= rules.max_delay]
    return tuple(sorted(at_bound, key=lambda push: push.number)) or (waiting[0],)
