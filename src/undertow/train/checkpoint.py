"""What a run is made of between two steps, as one file: weights, optimizer, generators, place in the data, costs.

One file and not two, so that no crash can leave halves of different ages. It is a safetensors file; everything that is
no tensor is JSON in its metadata. A hash over all of it tells a damaged file from a whole one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from undertow.errors import DataError
from undertow.train.weights import hash_tensors, read_tensors, write_tensors

FORMAT = "undertow checkpoint 1"
MODEL, OPTIMIZER, GENERATOR = "model/", "optimizer/", "generator/"


@dataclass
class Place:
    """Where a run is. `batch` counts within the epoch; sums are over the epoch so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    last_loss: float | None = None
    best_loss: float | None = None
    num_worse_epochs: int = 0
    test_step: int | None = None  # the step after which it was last evaluated
    test_loss: float | None = None
    test_accuracy: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    process_peak_bytes: int | None = None
    seconds: float = 0.0
    stopped: str = ""  # why the run ended; empty while it has not


@dataclass
class Checkpoint:
    """A run between two steps. `about` is what does not change: config, data, environment, shapes of a batch."""

    tensors: dict[str, torch.Tensor]
    place: Place
    about: dict[str, Any]
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors by their own names."""
        return {name.removeprefix(MODEL): tensor for name, tensor in self.tensors.items() if name.startswith(MODEL)}


def collect_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Everything of a run that is a tensor, by name."""
    found = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items() if optimizer is not None else ():
        found |= {f"{OPTIMIZER}{index}/{name}": item for name, item in state.items() if item is not None}
    found[f"{GENERATOR}cpu"] = torch.get_rng_state()
    return found


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file; the one before stays until this one is on the disk."""
    state = json.dumps({"place": vars(checkpoint.place), "about": checkpoint.about, "costs": checkpoint.costs})
    metadata = {"format": FORMAT, "state": state, "sha256": _digest(checkpoint.tensors, state)}
    write_tensors(path, checkpoint.tensors, metadata)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the file; raises DataError unless it is whole and a checkpoint."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file but no checkpoint of a run: its format is not {FORMAT!r}")
    if metadata.get("sha256") != _digest(tensors, metadata.get("state", "")):
        raise DataError(f"{path} is damaged: its content does not have the hash it was written with")
    try:
        state = json.loads(metadata["state"])
        costs = {key: (int(duration), int(workspace)) for key, (duration, workspace) in state["costs"].items()}
        place, about = Place(**state["place"]), dict(state["about"])
        counts = place.step, place.epoch, place.batch, about["environment"]["num_threads"] - 1
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("steps or threads are no counts")
        return Checkpoint(tensors, place, about, costs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is refused: its state is not that of a run ({error})") from None


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, what: str) -> None:
    """Put weights, the optimizer's state and the generators back as they were."""
    load_weights(model, checkpoint.weights(), what)
    if optimizer is None:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(OPTIMIZER):
                index, _, key = name.removeprefix(OPTIMIZER).partition("/")
                if tensor.dim() and tensor.shape != parameters[int(index)].shape:
                    raise ValueError(f"{name} has the shape {list(tensor.shape)}")
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(checkpoint.tensors[f"{GENERATOR}cpu"])
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} is refused: the optimizer or the generator cannot be restored ({error})") from None


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Give the model these weights; raises DataError naming the first that does not fit."""
    own = model.state_dict()
    for name in sorted(own.keys() ^ weights.keys()):
        owner = "the model has none" if name in weights else "they are missing"
        raise DataError(f"the weights in {what} are not this model's: {name}, {owner}")
    for name, tensor in own.items():
        if tensor.shape != weights[name].shape or tensor.dtype != weights[name].dtype:
            raise DataError(
                f"the weights in {what} are not this model's: {name} is {weights[name].dtype} "
                f"{list(weights[name].shape)} there and {tensor.dtype} {list(tensor.shape)} in the model"
            )
    model.load_state_dict(dict(weights))


def _digest(tensors: Mapping[str, torch.Tensor], state: str) -> str:
    return hashlib.sha256(f"{hash_tensors(tensors)} {state}".encode()).hexdigest()
