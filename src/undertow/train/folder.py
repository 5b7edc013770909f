"""A run's folder: its files, and how they are read back.

config.json               the options of the run
checkpoint.safetensors    the run after its last saved step
part-HASH.safetensors     parts of it, where several ranks have written it
best.safetensors          the weights with the lowest loss on the data that epochs are judged by
epoch-N.safetensors       the run after the last epochs, with --keep
metrics.jsonl             a line for each step and each evaluation
lock                      locked by the process that trains here
events.out.tfevents.*     the same numbers for TensorBoard

If config.json names a factory, resuming the run or loading its model runs that factory: trust a folder from a stranger
as you would a script. Nothing else in it is run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undertow.durable import write_durably
from undertow.errors import CallError, FolderError
from undertow.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from undertow.train.config import TrainConfig, make_config

CONFIG, CHECKPOINT, METRICS, LOCK = "config.json", "checkpoint.safetensors", "metrics.jsonl", "lock"
BEST = "best.safetensors"


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint_path(self) -> Path:
        """The path of the last good checkpoint."""
        return self.path / CHECKPOINT

    @property
    def best_path(self) -> Path:
        """The path of the best weights; there is none before the first evaluation."""
        return self.path / BEST

    def epoch_path(self, epoch: int) -> Path:
        """The path of the checkpoint after an epoch, counted from 1."""
        return self.path / f"epoch-{epoch}.safetensors"

    @property
    def metrics_path(self) -> Path:
        """The path of the records."""
        return self.path / METRICS

    def own_files(self) -> list[Path]:
        """Every checkpoint of the run."""
        fixed = [path for path in (self.checkpoint_path, self.best_path) if path.is_file()]
        return [*fixed, *self.path.glob("epoch-*.safetensors"), *self.path.glob("part-*.safetensors")]

    def check_is_free(self) -> None:
        """Raise CallError if the folder already holds a run."""
        if (self.path / CONFIG).exists() or self.checkpoint_path.exists():
            raise CallError(f"{self.path} already holds a run: go on with --resume {self.path}, or give another --out")

    def check_can_be_made(self) -> None:
        """Raise FolderError if the folder cannot be made or written; leaves nothing there."""
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise FolderError(f"the run's folder {self.path} cannot be made or written: {error.strerror}") from None
        finally:
            for path in made:
                with contextlib.suppress(OSError):
                    path.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder and lock it against other processes; the kernel unlocks it however this one ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"the run's folder {self.path} cannot be made: {error.strerror}") from None
        try:
            file = open(self.path / LOCK, "w")  # noqa: SIM115  open as long as it is locked
        except OSError as error:
            raise FolderError(f"the run's folder {self.path} cannot be written: {error.strerror}") from None
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise CallError(
                    f"another process is training in {self.path}: wait for it, or give another --out"
                ) from None
            yield

    def create(self, config: TrainConfig) -> None:
        """Start a run here: write its config."""
        self.check_is_free()
        self.write_config(config)

    def write_config(self, config: TrainConfig) -> None:
        """Write the options, also those that a resumed run changes."""
        text = json.dumps(config.to_dict(), indent=2) + "\n"
        write_durably(self.path / CONFIG, lambda file: file.write(text.encode()))

    def read_config(self) -> TrainConfig:
        """The options of the run."""
        path = self.path / CONFIG
        if not path.is_file():
            raise CallError(f"{self.path} holds no run: there is no {CONFIG} in it")
        try:
            return make_config(json.loads(path.read_text()), str(path))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise FolderError(f"{path} cannot be read: {error}") from None

    def read_checkpoint(self) -> Checkpoint:
        """The run after its last saved step."""
        if not self.checkpoint_path.is_file():
            raise CallError(f"{self.path} holds no checkpoint yet: start the run again")
        return load_checkpoint(self.checkpoint_path)

    def read_best(self) -> Checkpoint:
        """The best weights, with the run's progress when they were."""
        return load_checkpoint(self.best_path)

    def read_trained(self, is_last: bool, epoch: int | None) -> Checkpoint:
        """The checkpoint that a trained model is taken from: the best, or the last, or that of a kept epoch."""
        if epoch is not None:
            if not self.epoch_path(epoch).is_file():
                kept = sorted(int(path.stem.removeprefix("epoch-")) for path in self.path.glob("epoch-*.safetensors"))
                there = f"there are {', '.join(map(str, kept))}" if kept else "none is; --keep keeps them"
                raise CallError(f"{self.path}: the checkpoint of epoch {epoch} is not kept ({there})")
            return load_checkpoint(self.epoch_path(epoch))
        return self.read_checkpoint() if is_last or not self.best_path.is_file() else self.read_best()

    def keep_epoch(self, checkpoint: Checkpoint, num_kept: int) -> None:
        """Keep the checkpoint of the epoch that has just ended, and delete those before the last `num_kept`."""
        save_checkpoint(self.epoch_path(checkpoint.progress.epoch), checkpoint)
        for path in self.path.glob("epoch-*.safetensors"):
            number = path.stem.removeprefix("epoch-")
            if number.isdecimal() and int(number) <= checkpoint.progress.epoch - num_kept:
                path.unlink(missing_ok=True)

    def read_metrics(self) -> list[dict[str, Any]]:
        """The records, without lines that were cut off."""
        if not self.metrics_path.is_file():
            return []
        found = []
        for line in self.metrics_path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # the run was killed while it wrote this line
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                found.append(record)
        return found


def new_folder(config: TrainConfig) -> Path:
    """The folder of a run that was given none: runs/model-data, with a number if that is taken."""
    words = [Path(part.rpartition(":")[2] if ":" in part else part).stem for part in (config.model, config.data)]
    name = "-".join(words)
    path, number = Path("runs", name), 1
    while path.exists():
        number += 1
        path = Path("runs", f"{name}-{number}")
    return path
