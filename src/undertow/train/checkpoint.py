"""The state of a run between two steps, as one file: weights, optimizer, generators, progress, costs.

It is one file, so that a crash cannot leave two halves of different ages. It is a safetensors file; everything that is
not a tensor is JSON in its metadata. A hash over all of it shows whether the file is damaged. Several ranks write parts
of the tensors beside it (`checkpoint_parts.py`), which it lists.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from undertow.errors import DataError, FolderError
from undertow.hashing import hash_tensors
from undertow.train.checkpoint_parts import PartMissing, delete_other_parts, divide_tensors, read_parts, write_part
from undertow.train.devices import device_states, set_device_states
from undertow.train.job import Job
from undertow.train.weights import read_tensors, write_tensors

FORMAT = "undertow checkpoint 1"
FORMAT_IN_PARTS = "undertow checkpoint in parts 1"
NUM_AVERAGED = "num_averaged"  # how many updates an average of weights has taken in
MODEL, AVERAGE, OPTIMIZER, GENERATOR = "model/", "average/", "optimizer/", "generator/"


@dataclass
class Progress:
    """How far a run has come. `batch` counts within the epoch; sums are over the epoch so far."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    loss_sum: float = 0.0
    last_loss: float | None = None
    epoch_loss: float | None = None  # the mean training loss of the last whole epoch
    judged_loss: float | None = None  # of the last evaluation that epochs are judged by
    num_examples: int = 0
    best_loss: float | None = None
    best_step: int | None = None
    best_epoch: int | None = None
    num_worse_epochs: int = 0
    num_drops: int = 0  # of the learning rate, after epochs without progress
    num_worse_since_drop: int = 0
    validation_step: int | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
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
        return self._named(MODEL)

    def average(self) -> dict[str, torch.Tensor]:
        """The averaged weights, and how many were averaged; empty for a run without."""
        return self._named(AVERAGE)

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """What the run is for: the averaged weights where it has them."""
        return {name: item for name, item in self.average().items() if name != NUM_AVERAGED} or self.weights()

    def _named(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}


def collect_tensors(
    model: torch.nn.Module,
    optimizer_state: Mapping[str, Any],
    average: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Every tensor of a run, by name. `optimizer_state` is the whole of it, as its `state_dict()`."""
    found = name_weights(model.state_dict())
    found |= {f"{AVERAGE}{name}": tensor for name, tensor in average.items()}
    for index, state in optimizer_state["state"].items():
        found |= {
            f"{OPTIMIZER}{index}/{name}": torch.as_tensor(item) for name, item in state.items() if item is not None
        }
    return found | {f"{GENERATOR}{name}": state for name, state in device_states(device).items()}


def name_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names that they have in a checkpoint."""
    return {f"{MODEL}{name}": tensor for name, tensor in weights.items()}


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write the file. The previous one stays until this one is on the disk."""
    state = _write_state(checkpoint)
    metadata = {"format": FORMAT, "state": state, "sha256": _digest(checkpoint.tensors, state)}
    write_tensors(path, checkpoint.tensors, metadata)


def save_in_parts(path: Path, checkpoint: Checkpoint, job: Job) -> None:
    """Write the checkpoint of a run, each rank a part; one process writes one file."""
    if job.size == 1:
        save_checkpoint(path, checkpoint)
        delete_other_parts(path.parent, ())
        return
    # Generators differ from rank to rank: rank 0 evaluates, and nothing that is drawn for a step comes from them.
    whole = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(GENERATOR)}
    divided = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in whole and tensor.numel()}
    whole |= {name: tensor for name, tensor in checkpoint.tensors.items() if not tensor.numel()}
    file = write_part(path.parent, divided, divide_tensors(divided, job.size)[job.rank])
    files = job.gather(file)

    def write_main_file() -> None:
        for rank, name in enumerate(files):
            if not path.with_name(name).is_file():
                raise FolderError(
                    f"rank {rank} has written {name} into {path.parent}, and rank 0 does not find it there: the run's "
                    f"folder must be on a disk that all ranks share"
                )
        state = _write_state(checkpoint)
        parts = json.dumps({"files": files, "shapes": {name: list(tensor.shape) for name, tensor in divided.items()}})
        metadata = {"format": FORMAT_IN_PARTS, "state": state, "parts": parts}
        write_tensors(path, whole, {**metadata, "sha256": _digest(whole, state + parts)})
        delete_other_parts(path.parent, files)

    job.decide(write_main_file)


def _write_state(checkpoint: Checkpoint) -> str:
    return json.dumps({"place": vars(checkpoint.progress), "about": checkpoint.about, "costs": checkpoint.costs})


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the file; raises DataError if it is damaged or not a checkpoint."""
    tensors, metadata = read_tensors(path)
    while True:
        try:
            return _make_checkpoint(path, tensors, metadata)
        except PartMissing:
            known = metadata
            tensors, metadata = read_tensors(path)
            if metadata == known:
                raise


def _make_checkpoint(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Checkpoint:
    if metadata.get("format") not in (FORMAT, FORMAT_IN_PARTS):
        raise DataError(f"{path} is a safetensors file, but not a checkpoint of a run: its format is not {FORMAT!r}")
    if metadata.get("sha256") != _digest(tensors, metadata.get("state", "") + metadata.get("parts", "")):
        raise DataError(f"{path} is damaged: its content does not match the hash it was written with")
    try:
        if "parts" in metadata:
            parts = json.loads(metadata["parts"])
            tensors |= read_parts(path, tuple(map(str, parts["files"])), dict(parts["shapes"]))
        state = json.loads(metadata["state"])
        costs = {key: (int(duration), int(workspace)) for key, (duration, workspace) in state["costs"].items()}
        progress, about = Progress(**state["place"]), dict(state["about"])
        counts = progress.step, progress.epoch, progress.batch, about["environment"]["num_threads"] - 1
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError("steps or threads are not counts")
        return Checkpoint(tensors, progress, about, costs)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is refused: it does not hold the state of a run ({error})") from None


def restore(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, what: str
) -> None:
    """Restore the weights, the optimizer's state and the generators."""
    load_weights(model, checkpoint.weights(), what)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, torch.Tensor | int]] = {}
    try:
        for name, tensor in checkpoint.tensors.items():
            if name.startswith(OPTIMIZER):
                index, _, key = name.removeprefix(OPTIMIZER).partition("/")
                sizes = parameters[int(index)].shape
                # Some optimizers keep sums over a dimension, whose size is then 1.
                is_fitting = tensor.dim() == len(sizes) and all(
                    size in (1, wanted) for size, wanted in zip(tensor.shape, sizes, strict=True)
                )
                if tensor.dim() and not is_fitting:
                    raise ValueError(f"{name} has the shape {list(tensor.shape)}")
                # SparseAdam counts its steps in a Python number, by which a power rounds otherwise than by a tensor.
                is_count = not tensor.dim() and tensor.dtype is torch.int64
                state.setdefault(int(index), {})[key] = int(tensor) if is_count else tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        set_device_states(checkpoint._named(GENERATOR), device)
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError) as error:
        raise DataError(f"{what} is refused: the optimizer or the generator cannot be restored ({error})") from None


def load_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Load these weights into the model; raises DataError that names the first one that does not fit."""
    check_weights(model, weights, what)
    model.load_state_dict(dict(weights))


def check_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise DataError that names the first weight that does not fit the model."""
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


def _digest(tensors: Mapping[str, torch.Tensor], state: str) -> str:
    return hashlib.sha256(f"{hash_tensors(tensors)} {state}".encode()).hexdigest()
