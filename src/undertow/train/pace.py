"""How the workers of a run come through an epoch: in step, or each at its own pace on a part of the batches (Hogwild).

In: the run's progress, which all workers know when an epoch begins. Out: who computes which batch, which update comes
next, when to stop, and the progress of all workers when the epoch is over.

At their own pace, workers take turns in the order of the batches: with two, one computes the even updates and the other
the odd ones. So each example is seen once in an epoch. Whoever is ready takes the next number of an update, by which
the learning rate goes. Nobody waits before the end of the epoch. There the buffers of all workers are joined, rank 0
evaluates the parameters, and all go on from the same progress. Where a run is ended within an epoch, it goes on at the
first batch that somebody has not computed, so that a few are seen twice and none is left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from undertow.api.hogwild import HogwildStep
from undertow.train.checkpoint import Progress
from undertow.train.feeding import ALL, Share
from undertow.train.job import Job


class Pace(ABC):
    """How a worker comes through an epoch."""

    share = ALL

    @abstractmethod
    def begin_epoch(self, progress: Progress, num_steps: int) -> None:
        """All workers begin, or go on with, an epoch of a run of so many updates."""

    @abstractmethod
    def begin_update(self, progress: Progress) -> None:
        """There is another update: the progress is then where it begins."""

    @abstractmethod
    def is_ending(self, reason: str) -> bool:
        """Whether all workers stop after this update; `reason` is why this one wants to."""

    @abstractmethod
    def end_epoch(self, progress: Progress, accumulate: int) -> None:
        """All workers have stopped: the progress of this one becomes that of all."""


class InStep(Pace):
    """All workers make each update together, and know the same all the time."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def begin_epoch(self, progress: Progress, num_steps: int) -> None: ...

    def begin_update(self, progress: Progress) -> None: ...

    def is_ending(self, reason: str) -> bool:
        return bool(self._job.decide_end(reason))

    def end_epoch(self, progress: Progress, accumulate: int) -> None: ...


class OwnPace(Pace):
    """Each worker makes updates of its own."""

    def __init__(self, job: Job, step: HogwildStep, accumulate: int) -> None:
        self._job, self._step, self._team = job, step, step.team
        self.share = Share(job.rank, job.size, accumulate)
        self._first = Progress()
        self._num_own = 0

    def begin_epoch(self, progress: Progress, num_steps: int) -> None:
        self._first = Progress(**vars(progress))
        self.share, self._num_own = replace(self.share, num_groups=num_steps - progress.step), 0
        if self._job.is_first:
            self._team.begin_epoch()
        self._job.gather(None)  # nobody counts before that

    def begin_update(self, progress: Progress) -> None:
        number = self._team.count_update()
        progress.step = self._first.step + number
        progress.batch = self._first.batch + number * self.share.group
        self._num_own += 1

    def is_ending(self, reason: str) -> bool:
        if reason:
            self._team.ask_to_end()
        return self._team.is_ending

    def end_epoch(self, progress: Progress, accumulate: int) -> None:
        self._step.join_buffers()
        own = [progress.loss_sum - self._first.loss_sum, progress.num_examples - self._first.num_examples]
        found = self._job.gather([self._num_own, *own])
        counts = [item[0] for item in found]
        num_updates = sum(counts)
        progress.num_examples = self._first.num_examples + sum(item[2] for item in found)
        # Up to the first batch of the worker that is furthest behind, where the epoch is not over.
        behind = min(count * self.share.num_workers + worker for worker, count in enumerate(counts))
        num_counted = min(behind, num_updates)
        progress.step = self._first.step + num_counted
        progress.batch = self._first.batch + num_counted * accumulate
        # The mean over all that were computed, for as many as count.
        weight = num_counted / num_updates if num_updates else 0.0
        progress.loss_sum = self._first.loss_sum + weight * sum(item[1] for item in found)
