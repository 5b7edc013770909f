"""`undertow train --replay RUN`: a run with a parameter server again, from its log, compared with what it saved.

In: the run's folder, and what computes a batch. Out: whether the weights have the same bits. The log is read as if a
stranger had written it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undertow.errors import DataError
from undertow.hashing import hash_tensors
from undertow.server.messages import Push
from undertow.server.replay import Replay
from undertow.train.checkpoint import Checkpoint
from undertow.train.computing import BatchComputing, trained_parameters
from undertow.train.config import TrainConfig
from undertow.train.served import PUSHES, describe_job, read_values, write_values

Session = tuple[int, list[list[tuple[int, tuple[Push, ...]]]]]  # the version that it began with, and each part's log


@dataclass(frozen=True)
class Replayed:
    """What a replay has come to."""

    num_pushes: int
    weights_sha256: str
    is_same: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"pushes": self.num_pushes, "weights_sha256": self.weights_sha256, "is_same": self.is_same}

    def __str__(self) -> str:
        verdict = "the same bits" if self.is_same else "other bits than the run has saved"
        return f"{self.num_pushes} pushes replayed: {verdict}\ntrained weights sha256 {self.weights_sha256}"


def replay(
    config: TrainConfig,
    computing: BatchComputing,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    folder: Path,
) -> Replayed:
    """Do all updates of the run's log; `model` is as the run began with it."""
    job = describe_job(config, model, optimizer)
    sessions = read_sessions(folder / PUSHES, len(job.parts))
    for version, logs in sessions:
        found = Replay(job, read_values(job, model, optimizer), version, computing)
        found.run(logs)
        write_values(job, model, optimizer, [part.state() for part in found.parts])
    num_pushes = sum(len(pushes) for _, logs in sessions for log in logs for _, pushes in log)
    names = trained_parameters(model)
    saved = {name: checkpoint.weights()[name] for name in names}
    sha256 = hash_tensors({name: parameter.detach() for name, parameter in names.items()})
    return Replayed(num_pushes, sha256, sha256 == hash_tensors(saved))


def read_sessions(path: Path, num_parts: int) -> list[Session]:
    """The log: one session for each time that the run was started or resumed."""
    sessions: list[Session] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read, without which there is no replay: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            if "went_back_to_step" in item:
                raise DataError(f"{path}: the run went back to a checkpoint at line {number}; that is not replayed")
            if "began" in item:
                sessions.append((int(item["version"]), [[] for _ in range(num_parts)]))
            if "part" in item:
                pushes = tuple(_read_push(push, num_parts) for push in item["pushes"])
                sessions[-1][1][item["part"]].append((int(item["version"]), pushes))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise DataError(f"{path}, line {number}, is no line of a run's log: {error}") from None
    return sessions


def _read_push(item: Any, num_parts: int) -> Push:
    worker, number, versions, rates = item
    if len(versions) != num_parts:
        raise ValueError(f"a push has versions of {len(versions)} parts, and the run has {num_parts}")
    return Push(str(worker), int(number), tuple(map(int, versions)), tuple(map(float, rates)))
