"""The state of a run between two steps, as one file: weights, optimizer, generators, progress, costs.

It is one file, so that a crash cannot leave two halves of different ages. It is a safetensors file; everything that is
not a tensor is JSON in its metadata. A hash over all of it shows whether the file is damaged.
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
class Progress:
    """How far a run has come. `batch` counts within the epoch; sums are over the epoch so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    last_loss: float | None = None
    best_loss: float | None = None
    num_worse_epochs: int = 0
    test_step: int | None = None  # the step after which the model was last evaluated
    test_loss: float | None = None
    test_accuracy: float | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_step_s: float | None = None
    process_peak_bytes: int | None = None
    seconds: float = 0.0
    stopped: str = ""  # why the run ended; empty until it has


@dataclass
class Checkpoint:
    """A run between two steps. `about` does not change: config, data, environment, shapes of a batch."""

    tensors: dict[str, torch.Tensor]
    progress: Progress
    about: dict[str, Any]
    costs: dict[str, tuple[int, int]] = field(default_factory=dict)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors, by their names in the model."""
        return {name.removeprefix(MODEL): tensor for name, tensor in self.tensors.items() if name.startswith(MODEL)}


def collect_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of a run, by name."""
    found = {f"{MODEL}{name}": tensor for name, tensor in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items() if optimizer is not None else ():
        found |= {f"{OPTIMIZER}{index}/{name}": item for name, item in state.items() if item is not None}
    found[f"{GENERATOR}cpu"] = torch.get_rng_state()
    return found


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file. The previous one stays until this one is on the disk."""
    state = json.dumps({"place": vars(checkpoint.progress), "about": checkpoint.about, "costs": checkpoint.costs})
    metadata = {"format": FORMAT, "state": state, "sha256": _digest(checkpoint.tensors, state)}
    write_tensors(path, checkpoint.tensors, metadata)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the file; raises DataError if it is damaged or not a checkpoint."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT:
        raise DataError(f"{path} is a safetensors file, but not a checkpoint of a run: its format is not {FORMAT!r}")
    if metadata.get("sha256") != _digest(tensors, metadata.get("state", "")):
        raise DataError(f"{path} is damaged: its content does not match the hash it was written with")
    try:
        state = json.loads(metadata["state"])
        costs = {key: (int(duration), int(workspace)) for key, (duration, workspace) in state["costs"].items()}
        progress, about = Progress(**state["place"]), dict(state["about"])
        counts = progress.step, progress.epoch, progress.batch, about["environment"]["num_threads"] - 1
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("steps or threads are not counts")
        return Checkpoint(tensors, progress, about, costs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is refused: it does not hold the state of a run ({error})") from None


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, what: str) -> None:
    """Restore the weights, the optimizer's state and the generators."""
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
    """Load these weights into the model; raises DataError that names the first one that does not fit."""
    expected = model.state_dict()
    for name in sorted(expected.keys() ^ weights.keys()):
        problem = "is not in the model" if name in weights else "is missing"
        raise DataError(f"the weights in {what} are not this model's: {name} {problem}")
    for name, tensor in expected.items():
        if tensor.shape != weights[name].shape or tensor.dtype != weights[name].dtype:
            raise DataError(
                f"the weights in {what} are not this model's: {name} is {weights[name].dtype} "
                f"{list(weights[name].shape)} there and {tensor.dtype} {list(tensor.shape)} in the model"
            )
    model.load_state_dict(dict(weights))


def _digest(tensors: Mapping[str, torch.Tensor], state: str) -> str:
    return hashlib.sha256(f"{hash_tensors(tensors)} {state}".encode()).hexdigest()
