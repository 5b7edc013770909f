"""A run again, from the log of its updates: in one process, to the same bits.

In: the parameters that the run began with, and for each part its updates in order, with who pushed which batch,
computed with which versions of all parts. Out: the parameters and the state of the optimizer. What was chance in the
run, who was fast and who was killed, stands in the log; a gradient follows from its batch and those versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from undertow.errors import DataError
from undertow.server.job import F32, JobDescription
from undertow.server.messages import Entry, Push
from undertow.server.parts import cut, paste
from undertow.server.tensors import PartTensors
from undertow.server.worker import Computing

Log = Sequence[tuple[int, tuple[Push, ...]]]


class Replay:
    """The parts of a run, as they were at one version after another."""

    def __init__(
        self, job: JobDescription, values: Sequence[Mapping[str, Any]], version: int, computing: Computing
    ) -> None:
        if job.push_dtype != F32:
            raise DataError(
                "a run whose gradients travelled in bf16 cannot be replayed: what was rounded is not logged"
            )
        is_mean = job.rules.max_delay > 0
        self._job, self._computing = job, computing
        self.parts = [
            PartTensors(part, job.optimizer, found, is_mean, version)
            for part, found in zip(job.parts, values, strict=True)
        ]
        self._gradients: dict[str, torch.Tensor] = {}
        self._parameters = computing.parameters()
        computing.prepare(self._take)

    def run(self, logs: Sequence[Log]) -> None:
        """Do all updates of all parts, each when the versions that it was computed with are there."""
        pending = [list(log) for log in logs]
        pushes = {push for log in logs for _, item in log for push in item}
        # A version is kept while a gradient that needs it is not computed, a gradient while a part needs it.
        needed = Counter((part, version) for push in pushes for part, version in enumerate(push.versions))
        unused = Counter(push for log in logs for _, item in log for push in item)
        kept = {(part, item.version): item.parameters() for part, item in enumerate(self.parts)}
        found: dict[Push, list[torch.Tensor]] = {}
        while any(pending):
            before = sum(map(len, pending))
            for part, log in enumerate(pending):
                while log and all(self._compute(push, found, kept, needed) for push in log[0][1]):
                    version, made_of = log.pop(0)
                    tensors = self.parts[part]
                    if version != tensors.version + 1:
                        raise DataError(f"the log lacks what happened to part {part} before version {version}")
                    tensors.apply(Entry(0, made_of), [found[push][part] for push in made_of])
                    if needed[part, version]:
                        kept[part, version] = tensors.parameters()
                    if not needed[part, version - 1]:
                        kept.pop((part, version - 1), None)
                    for push in made_of:
                        unused[push] -= 1
                        if not unused[push]:
                            del found[push]
            if sum(map(len, pending)) == before:
                raise DataError("the log lacks an update that others were computed from")

    def _compute(
        self, push: Push, found: dict[Push, list[torch.Tensor]], kept: dict[Any, Any], needed: Counter[Any]
    ) -> bool:
        """Have the gradient of a push, if the versions that it was computed with are there."""
        if push in found:
            return True
        places = list(enumerate(push.versions))
        if not all(place in kept for place in places):
            return False
        for part, version in places:
            paste(self._parameters, self._job.parts[part], torch.from_numpy(kept[part, version]))
            needed[part, version] -= 1
            if not needed[part, version] and version < self.parts[part].version:
                del kept[part, version]
        self._computing.compute(push.number)
        found[push] = [cut(self._gradients, part) for part in self._job.parts]
        return True

    def _take(self, name: str, gradient: torch.Tensor) -> None:
        self._gradients[name] = gradient.detach().clone()
