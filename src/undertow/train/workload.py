"""What is trained: a model, batches to train on and to test on, and how a new input is prepared for the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.data.augmentation import Augmentation, Augmented
from undertow.data.examples import Examples, Source
from undertow.data.opening import set_preparation
from undertow.data.preparation import DTYPES, Preparation
from undertow.data.splitting import has_labels
from undertow.errors import CallError, DataError
from undertow.train.batches import Batch
from undertow.train.evaluation import Evaluator, check_labels
from undertow.train.feeding import Loader, make_test_loader, make_train_loader

NUM_DIGITS = 16  # of a hash; nobody forges data to match it


@dataclass(frozen=True)
class Workload:
    """A model and its data. `preparation` and `classes` are None where the user's factory made the loaders.

    `validation_loader` is None where there is no such part, `class_weights` where all classes count alike.
    """

    model: torch.nn.Module
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    preparation: Preparation | None = None
    classes: tuple[str, ...] | None = None
    validation_loader: Iterable[Any] | None = None
    class_weights: torch.Tensor | None = None

    @property
    def is_sequence(self) -> bool:
        """Whether the model predicts the next character at every position."""
        return self.preparation is not None and self.preparation.vocabulary is not None

    def describe(self) -> dict[str, Any]:
        """How new inputs are prepared, and a fingerprint that shows whether data has changed, as plain data."""
        return {
            "preparation": None if self.preparation is None else self.preparation.to_dict(),
            "classes": None if self.classes is None else list(self.classes),
            "fingerprint": {
                name: value
                for what, loader in self.loaders().items()
                for name, value in _fingerprint(what, loader).items()
            },
        }

    def loaders(self) -> dict[str, Iterable[Any]]:
        """The loaders that there are, by their names."""
        found = {"training": self.train_loader, "test": self.test_loader}
        return found if self.validation_loader is None else {**found, "validation": self.validation_loader}

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders().values():
            if isinstance(loader, Loader):
                loader.close()


def make_workload(
    model: torch.nn.Module,
    source: Source,
    batch: int,
    *,
    augment: Sequence[str] = (),
    num_workers: int = 0,
    class_weights: torch.Tensor | None = None,
    is_for_gpu: bool = False,
) -> Workload:
    """A model with the examples of a source; raises DataError if they are fewer than a batch."""
    if len(source.train) < batch:
        raise DataError(f"there are {len(source.train)} training examples, fewer than a batch of {batch}")
    source = set_preparation(source, replace(source.preparation, dtype=_find_dtype(model)))
    train = source.train
    if augment:
        train = Augmented(train, Augmentation(augment, source.preparation))
    return Workload(
        model,
        make_train_loader(train, batch, num_workers, is_for_gpu),
        make_test_loader(source.test, batch, num_workers),
        source.preparation,
        source.classes,
        None if source.validation is None else make_test_loader(source.validation, batch, num_workers),
        class_weights,
    )


def _find_dtype(model: torch.nn.Module) -> str:
    """The type of the model's parameters; float32 if there are several, so that the model has to cast."""
    found = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return next((name for name, dtype in DTYPES.items() if found == {dtype}), "float32")


def _fingerprint(what: str, loader: Any) -> dict[str, Any]:
    """What shows that data has changed: lengths, and a hash. A hash of a user's loader would have to load all of it."""
    examples = getattr(loader, "dataset", None)
    if isinstance(examples, Examples):
        return {f"{what} examples": len(examples), f"{what} hash": examples.fingerprint()[:NUM_DIGITS]}
    lengths = {f"{what} batches": len(loader)}
    return {**lengths, f"{what} examples": len(examples)} if isinstance(examples, Sized) else lengths


def check_same_data(before: Any, now: dict[str, Any], folder: str) -> None:
    """Raise DataError if the data has changed; `before` and `now` are what `describe` gave."""
    wanted = before.get("fingerprint") if isinstance(before, dict) else None
    if not isinstance(wanted, dict):
        raise DataError(f"the checkpoint in {folder} is refused: it does not say what data the run began with")
    found = now["fingerprint"]
    changed = [
        f"{name}: {wanted.get(name)} then, {found.get(name)} now"
        for name in {**wanted, **found}
        if wanted.get(name) != found.get(name)
    ]
    if changed:
        raise DataError(
            f"the data has changed since the run in {folder} began, so it would not end in the same weights "
            f"({'; '.join(changed)}): bring the old data back, or start a new run"
        )


def check_workload(workload: Workload, evaluator: Evaluator, batch: Batch, part: str) -> int | None:
    """Run the model once; returns its number of classes, if any, and raises DataError if targets do not fit."""
    try:
        outputs = evaluator.predict(*batch.args, **batch.kwargs)
    except TypeError as error:
        if "argument" not in str(error) or not batch.kwargs:
            raise
        raise CallError(
            f"the model cannot be called with a batch, whose parts go to it by name ({', '.join(batch.kwargs)}): "
            f"{error}. Name those that are for the loss: --targets"
        ) from None
    num_classes = evaluator.check_targets(outputs, batch.targets, f"{part} data")
    evaluator.check_metrics(outputs, batch)
    weights = workload.class_weights
    if weights is not None and len(weights) != num_classes:
        what = "takes no labels" if num_classes is None else f"has {num_classes} outputs"
        raise DataError(f"there are {len(weights)} class weights, but the model {what}: one is needed for each output")
    for name, loader in workload.loaders().items():
        examples = getattr(loader, "dataset", None)
        if num_classes is not None and isinstance(examples, Examples):
            check_labels(examples.targets, num_classes, f"{name} data")
            if name == "training":
                _check_several_classes(examples, workload.classes)
    return num_classes


def _check_several_classes(examples: Examples, classes: Sequence[str] | None) -> None:
    if has_labels(examples) and len(found := examples.targets.unique()) == 1:
        label = int(found[0])
        name = classes[label] if classes is not None and 0 <= label < len(classes) else label
        raise DataError(
            f"all {len(examples):,} training examples have the class {name!r}: there is nothing to tell apart"
        )
