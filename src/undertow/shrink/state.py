"""How far a shrinking has come, between two rounds, and as one file: a killed one goes on from its last whole round.

The file is written as a run's checkpoint is: safetensors, the rest as JSON in its metadata, a hash over all of it. It
holds the pruned networks that were good enough, the latest first, and the best small file so far, as its bytes.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undertow.errors import CallError, DataError
from undertow.hashing import hash_tensors
from undertow.train.weights import read_tensors, write_tensors

FORMAT = "undertow shrinking 1"
PRUNE, SHARE, DONE = "prune", "share", "done"
_BEST, _KEPT, _MODEL = "best", "kept/", "model/"


@dataclass
class Pruned:
    """A pruned network: its tensors, its masks, how much is kept, and its score on the validation data."""

    model: dict[str, Tensor]
    kept: dict[str, Tensor]
    density: float
    score: float


@dataclass
class State:
    """A shrinking between two rounds. `score` is that of the best file, or of the nearest to good enough."""

    settings: dict[str, Any]
    dense: str  # the hash of the network that is shrunk
    kind: str = PRUNE  # of the next round
    epoch: int = 0  # of all epochs so far; draws follow from it
    factor: float = 0.4  # the share that the next round of pruning leaves
    distortion: float = 0.01  # the outputs' error, in parts of their variance, that the next round of sharing allows
    low: float = 0.0  # the largest distortion that was good enough
    num_refused: int = 0
    dense_score: float = 0.0
    score: float | None = None
    is_kept: bool = False  # whether the best file is good enough
    history: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)
    pruned: list[Pruned] = field(default_factory=list)
    best: bytes = b""


def save_state(path: Path, state: State) -> None:
    """Write the file; the one before stays until this one is on the disk."""
    tensors: dict[str, Tensor] = {}
    for place, item in enumerate(state.pruned):
        tensors |= {f"{place}/{_MODEL}{name}": tensor for name, tensor in item.model.items()}
        tensors |= {f"{place}/{_KEPT}{name}": tensor for name, tensor in item.kept.items()}
    if state.best:
        tensors[_BEST] = torch.frombuffer(bytearray(state.best), dtype=torch.uint8)
    plain = {name: item for name, item in vars(state).items() if name not in ("pruned", "best")}
    plain["pruned"] = [[item.density, item.score] for item in state.pruned]
    text = json.dumps(plain)
    write_tensors(path, tensors, {"format": FORMAT, "state": text, "sha256": _digest(tensors, text)})


def load_state(path: Path) -> State:
    """Read the file; raises DataError if it is damaged or something else."""
    tensors, metadata = read_tensors(path)
    text = metadata.get("state", "")
    if metadata.get("format") != FORMAT or metadata.get("sha256") != _digest(tensors, text):
        raise DataError(f"{path} is not the state of a shrinking, or it is damaged; remove it to begin again")
    try:
        plain = json.loads(text)
        pruned = [
            Pruned(_named(tensors, f"{place}/{_MODEL}"), _named(tensors, f"{place}/{_KEPT}"), density, score)
            for place, (density, score) in enumerate(plain.pop("pruned"))
        ]
        costs = {key: (int(time), int(size)) for key, (time, size) in plain.pop("costs").items()}
        best = tensors[_BEST].numpy().tobytes() if _BEST in tensors else b""
        return State(**plain, costs=costs, pruned=pruned, best=best)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is refused: it does not hold the state of a shrinking ({error})") from None


def resume_state(path: Path, settings: dict[str, Any], dense: str) -> State:
    """The state in the file, or a new one; raises CallError if the file is of other settings or another network."""
    if not path.exists():
        return State(settings, dense)
    state = load_state(path)
    changed = [name for name, item in settings.items() if state.settings.get(name) != item]
    if state.dense != dense or changed:
        what = f"with another {changed[0]} ({state.settings.get(changed[0])!r})" if changed else "from other weights"
        raise CallError(f"{path} is of a shrinking that was begun {what}: give that again, or remove the file")
    return state


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): item for name, item in tensors.items() if name.startswith(prefix)}


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    return hashlib.sha256(f"{hash_tensors(tensors)} {text}".encode()).hexdigest()
