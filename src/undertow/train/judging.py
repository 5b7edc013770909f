"""How good a run's weights are, and what follows: which are kept as the best, when the rate drops, when the run ends.

In: a run's evaluator, its data, its progress and its folder. Out: evaluations, and changes of the progress. Epochs are
judged by the validation data, or by the test data where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from undertow.train.checkpoint import Checkpoint, Progress, load_weights, name_weights, save_checkpoint
from undertow.train.config import PLATEAU, TrainConfig
from undertow.train.evaluation import Evaluation, Evaluator
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.schedules import PLATEAU_PATIENCE
from undertow.train.workload import Workload

VALIDATION, TEST = "validation", "test"
FINISHED, REACHED = "finished", "the loss is low enough"


class Judge:
    """Judges the weights of one run. `model` is what is evaluated and kept: the average where there is one."""

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        model: torch.nn.Module,
        evaluator: Evaluator,
        folder: RunFolder,
        progress: Progress,
    ) -> None:
        self.part = TEST if workload.validation_loader is None else VALIDATION
        self.evaluator = evaluator
        self._config, self._model, self._folder, self._progress = config, model, folder, progress
        self._loaders = {TEST: workload.test_loader, VALIDATION: workload.validation_loader}

    @property
    def parts(self) -> list[str]:
        """The parts of the data that are evaluated."""
        return list(dict.fromkeys((self.part, TEST)))

    def batches(self, part: str) -> Iterator[Any]:
        """The batches of a part, as its loader gives them: the same ones at every evaluation."""
        loader = self._loaders[part]
        assert loader is not None
        return Feed(loader, self._config.seed).batches(0, 0)

    def evaluate(self, part: str) -> Evaluation:
        """Evaluate the weights on a part of the data."""
        found, progress = self.evaluator.evaluate(self.batches(part), part), self._progress
        if part == TEST:
            progress.test_step, progress.test_loss, progress.test_accuracy = progress.step, found.loss, found.accuracy
        else:
            progress.validation_step, progress.validation_loss = progress.step, found.loss
            progress.validation_accuracy = found.accuracy
        progress.judged_loss = found.loss if part == self.part else progress.judged_loss
        return found

    @property
    def mean_training_loss(self) -> float:
        """The mean over the epoch so far."""
        return self._progress.loss_sum * self._config.accumulate / self._progress.batch

    def end_epoch(self, about: dict[str, Any]) -> None:
        """After an evaluation: keep the weights if they are the best, count epochs without progress, begin another."""
        progress, config = self._progress, self._config
        if self._note_best(about):
            progress.num_worse_epochs = progress.num_worse_since_drop = 0
        else:
            progress.num_worse_epochs += 1
            progress.num_worse_since_drop += 1
        if config.schedule == PLATEAU:
            patience = (config.schedule_args or {}).get("patience", PLATEAU_PATIENCE)
            if progress.num_worse_since_drop >= patience:
                progress.num_drops, progress.num_worse_since_drop = progress.num_drops + 1, 0
        progress.epoch_loss = self.mean_training_loss
        progress.epoch, progress.batch, progress.loss_sum = progress.epoch + 1, 0, 0.0

    def _note_best(self, about: dict[str, Any]) -> bool:
        """Keep the weights as the best if they are; returns whether."""
        progress = self._progress
        loss = progress.judged_loss
        assert loss is not None
        if progress.best_loss is not None and loss >= progress.best_loss:
            return False
        progress.best_loss, progress.best_step, progress.best_epoch = loss, progress.step, progress.epoch
        weights = name_weights(self._model.state_dict())
        save_checkpoint(self._folder.best_path, Checkpoint(weights, progress, about))
        return True

    @property
    def tests_best(self) -> bool:
        """Whether the best weights are tested at the end: validation data has judged, and the test data is unread."""
        progress = self._progress
        return self.part != TEST and progress.best_step is not None and progress.test_step != progress.step

    def test_best(self) -> Evaluation:
        """The best weights on the test data."""
        path = self._folder.best_path
        last = {name: tensor.clone() for name, tensor in self._model.state_dict().items()}
        load_weights(self._model, self._folder.read_best().weights(), str(path))
        found = self.evaluate(TEST)
        load_weights(self._model, last, "the run")
        return found

    def _is_stuck(self) -> bool:
        return self._config.patience is not None and self._progress.num_worse_epochs >= self._config.patience

    def _has_reached(self) -> bool:
        """Whether the training loss of the last whole epoch is low enough."""
        limit, found = self._config.until_loss, self._progress.epoch_loss
        return limit is not None and found is not None and found <= limit

    def is_over(self, num_steps: int) -> bool:
        """Whether a run of so many updates ends here."""
        at_start = self._progress.batch == 0
        return self._progress.step >= num_steps or (at_start and (self._is_stuck() or self._has_reached()))

    def why_over(self) -> str:
        """Why it does."""
        if self._is_stuck():
            return f"no lower {self.part} loss"
        return REACHED if self._has_reached() else FINISHED
