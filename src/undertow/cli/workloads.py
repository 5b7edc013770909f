"""In: the config or the folder of a run. Out: its model and its data, each fitted to the other."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from undertow.cli.loading import call, describe, find_function, find_in_zoo, load_module, make_model, resolve
from undertow.data.balancing import balance
from undertow.data.examples import Source
from undertow.data.opening import adapt, open_data
from undertow.data.options import (
    BALANCED,
    check_augment,
    check_columns,
    parse_class_weights,
    parse_image_size,
    parse_normalise,
    parse_validation,
)
from undertow.data.preparation import Preparation
from undertow.data.tables import SUFFIXES
from undertow.errors import CallError, DataError
from undertow.train.callbacks import Callbacks, find_callbacks
from undertow.train.checkpoint import Checkpoint, load_weights
from undertow.train.config import ALL, TrainConfig
from undertow.train.devices import choose_device, move_model
from undertow.train.environment import find_kind
from undertow.train.evaluation import Evaluator
from undertow.train.feeding import make_test_loader
from undertow.train.folder import RunFolder
from undertow.train.layout import use_channels_last
from undertow.train.objective import Objective
from undertow.train.run import UserCode, make_objective
from undertow.train.workload import Workload, make_workload


def load_workload(config: TrainConfig, is_for_gpu: bool = False) -> Workload:
    """The model and the data of a run. The seed is set just before each is made."""
    check_augment(config.augment or ())
    if config.columns is not None:
        check_columns(config.columns)
    weights = None if config.class_weights is None else parse_class_weights(config.class_weights)
    if ":" in config.data:
        _refuse_for_loaders(config)
        train_loader, validation_loader, test_loader = _make_loaders(config.data, config.seed)
        given = None if weights is None else torch.tensor(weights)
        return Workload(
            build_model(config, None, False),
            train_loader,
            test_loader,
            validation_loader=validation_loader,
            class_weights=given,
        )
    source = open_data(
        config.data,
        _wanted_shape(config),
        columns=config.columns,
        validation=None if config.validation is None else parse_validation(config.validation),
        seed=config.seed,
        statistics=None if config.normalise is None else parse_normalise(config.normalise),
    )
    if source.size_note:
        print(source.size_note, file=sys.stderr)
    model = build_model(config, source.classes, source.preparation.vocabulary is not None)
    batch = len(source.train) if config.batch == ALL else int(config.batch)
    return make_workload(
        model,
        source,
        batch,
        augment=config.augment or (),
        num_workers=config.num_readers,
        class_weights=None if config.class_weights is None else _weigh(source, weights),
        is_for_gpu=is_for_gpu,
    )


def _refuse_for_loaders(config: TrainConfig) -> None:
    """Raise CallError for an option that loaders of the user's own cannot follow."""
    for name in ("columns", "image_size", "normalise", "augment", "validation", "workers"):
        if getattr(config, name):
            advice = "return three loaders: training, validation, test" if name == "validation" else "do it there"
            raise CallError(
                f"--{name.replace('_', '-')} is not for loaders of your own, which {config.data} makes: {advice}"
            )
    if config.class_weights == BALANCED:
        raise CallError(f"--class-weights balanced would have to read all of {config.data}: give one number per class")


def _weigh(source: Source, weights: tuple[float, ...] | None) -> torch.Tensor:
    """One weight per class: the given ones, or for `balanced` the inverse of how often a class occurs in training."""
    num_classes = None if source.classes is None else len(source.classes)
    if weights is None:
        return balance(source.train, num_classes)
    if num_classes is not None and len(weights) != num_classes:
        raise DataError(f"--class-weights gives {len(weights)} numbers, but the data has {num_classes} classes")
    return torch.tensor(weights)


def _make_loaders(name: str, seed: int) -> tuple[Any, Any, Any]:
    """The user's loaders for training, validation (None if there are two) and test."""
    module, module_name, attribute = resolve(name)
    _seed(seed)
    made = call(module, module_name, attribute, "a training and a test loader")
    is_known = isinstance(made, tuple | list) and len(made) in (2, 3)
    if not is_known or not all(hasattr(loader, "__iter__") and hasattr(loader, "__len__") for loader in made):
        raise CallError(
            f"{attribute}() in {module_name} returned {describe(made)}: it must return a training and a test loader, "
            f"or a training, a validation and a test loader, each with a length"
        )
    if len(made) == 3 and not len(made[1]):
        raise DataError(f"{attribute}() in {module_name}: the validation loader has no batches")
    return made[0], made[1] if len(made) == 3 else None, made[-1]


def _wanted_shape(config: TrainConfig) -> tuple[int | None, ...] | None:
    """The shape of one input: the model's, in the image size that was asked for; None if nothing says one."""
    taken = _taken_shape(config)
    if config.image_size is None:
        return taken
    size = parse_image_size(config.image_size)
    if taken is not None and len(taken) != 3:
        raise CallError(
            f"--image-size {config.image_size}: {config.model} takes inputs of shape {list(taken)}, not images"
        )
    return (None if taken is None else taken[0], *size)


def _taken_shape(config: TrainConfig) -> tuple[int, ...] | None:
    """The shape of one input of the model; None if the model gives no example."""
    if ":" not in config.model:
        return tuple(find_in_zoo(config.model).example_inputs(1)[0].shape[1:])
    module, module_name, attribute = resolve(config.model)
    _, args, _ = make_model(module, module_name, attribute)
    if args is None and callable(getattr(module, "example_inputs", None)):
        args = module.example_inputs(1)
    first = args[0] if isinstance(args, Sequence) and args else args
    return tuple(first.shape[1:]) if isinstance(first, torch.Tensor) else None


def build_model(config: TrainConfig, classes: Sequence[str] | None, is_text: bool) -> torch.nn.Module:
    """The model; a zoo model gets as many outputs as the data has classes."""
    if ":" in config.model:
        module, module_name, attribute = resolve(config.model)
        _seed(config.seed)
        return make_model(module, module_name, attribute)[0]
    build = find_in_zoo(config.model).build
    name = "vocabulary" if is_text else "num_classes"
    is_taken = name in inspect.signature(build).parameters
    if is_text and not is_taken:
        raise CallError(f"{config.model} is not a language model, but {config.data} is text: try char_gpt")
    _seed(config.seed)
    return build(**{name: len(classes)}) if is_taken and classes is not None else build()


def _seed(seed: int) -> None:
    """Seed all generators that a factory may use, so that a resumed run gets the same model and data."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def load_user_code(config: TrainConfig) -> UserCode:
    """The user's loss and metrics that a config names; callbacks are for training alone."""
    loss = None
    if config.loss is not None and ":" in config.loss:
        loss = _find_function(config.loss, "--loss", "the loss of the outputs and targets")
    metrics = [(name.rpartition(":")[2], _find_function(name, "--metric", "a metric")) for name in config.metric or ()]
    return UserCode(loss, metrics)


def load_callbacks(config: TrainConfig) -> Callbacks:
    """The functions of the user's file of callbacks; none where a config names no file."""
    name = config.callbacks
    return Callbacks("", {}) if name is None else find_callbacks(name, load_module(name))


def _find_function(name: str, option: str, what: str) -> Any:
    if ":" not in name:
        raise CallError(f"{option} {name}: write file.py:function or package.module:function")
    module, module_name, attribute = resolve(name)
    return find_function(module, module_name, attribute, what)


def report_code(*names: str | None) -> None:
    """Print on stderr which files were run: a run's folder names them, and its user may not know."""
    for name in names:
        module_name, _, attribute = (name or "").rpartition(":")
        if module_name:
            file = Path(module_name).resolve() if module_name.endswith(".py") else sys.modules[module_name].__file__
            print(f"{attribute} is from {file}", file=sys.stderr)


@dataclass(frozen=True)
class Trained:
    """A trained run; the model has the weights of `checkpoint` and lies on `device`."""

    config: TrainConfig
    checkpoint: Checkpoint
    model: torch.nn.Module
    preparation: Preparation | None
    classes: tuple[str, ...] | None
    device: torch.device
    code: UserCode

    @property
    def is_sequence(self) -> bool:
        """Whether it is a language model."""
        return self.preparation is not None and self.preparation.vocabulary is not None

    @property
    def objective(self) -> Objective:
        """How batches are read, and what their loss is."""
        weights = self.checkpoint.about.get("class_weights")
        tensor = None if weights is None else torch.tensor(weights)
        return make_objective(self.config, self.is_sequence, tensor, self.device, self.code.loss)

    def make_evaluator(self) -> Evaluator:
        """Evaluates the model as the run does."""
        config, code = self.config, self.code
        metrics = config.metrics or ()
        return Evaluator(self.model, self.objective, self.device, config.numerics, metrics, code.metrics)


def load_trained(run: str, device: str | None, is_last: bool = False, epoch: int | None = None) -> Trained:
    """A run's model with its best weights, with the last, or with those after an epoch that was kept.

    Without a device it lies on one of the kind that the run was begun on.
    """
    folder = RunFolder(Path(run))
    config, checkpoint = folder.read_config(), folder.read_trained(is_last, epoch)
    chosen = choose_device(find_kind(checkpoint) if device is None else device)
    try:
        data = checkpoint.about["data"]
        preparation = None if data["preparation"] is None else Preparation.from_dict(data["preparation"])
        classes = None if data["classes"] is None else tuple(map(str, data["classes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder.checkpoint_path} is refused: it does not say how data is read ({error})") from None
    model = build_model(config, classes, preparation is not None and preparation.vocabulary is not None)
    code = load_user_code(config)
    report_code(config.model, config.loss, *(config.metric or ()))
    load_weights(model, checkpoint.trained_weights(), str(folder.path))
    move_model(model, chosen)
    if chosen.type == "cuda" and checkpoint.about.get("is_channels_last"):
        use_channels_last(model)
    return Trained(config, checkpoint, model, preparation, classes, chosen, code)


def load_test_batches(trained: Trained, name: str) -> Iterable[Any]:
    """The test data called `name`, prepared as the run's own data was."""
    if ":" in name:
        loader = _make_loaders(name, trained.config.seed)[2]
        report_code(name)
        return loader
    if trained.preparation is None:
        raise CallError(f"the run was trained on your own loaders; give --data file.py:factory, not {name}")
    is_own = name == trained.config.data
    columns = trained.config.columns if is_own or Path(name).suffix in SUFFIXES else None
    source = open_data(name, trained.preparation.shape, trained.preparation.vocabulary, columns=columns)
    if source.classes is not None and trained.classes is not None and source.classes != trained.classes:
        raise DataError(f"{name} has the classes {', '.join(source.classes)}; the run has {', '.join(trained.classes)}")
    source.test.prepare_as(adapt(trained.preparation, source, name))
    batch = len(source.test) if trained.config.batch == ALL else int(trained.config.batch)
    return make_test_loader(source.test, batch)
