"""In: the config or the folder of a run. Out: its model and its data, each fitted to the other."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from undertow.cli.loading import call, describe, find_function, find_in_zoo, load_module, make_model, resolve
from undertow.data.examples import Arrays
from undertow.data.images import Images
from undertow.data.opening import open_data
from undertow.data.preparation import Preparation
from undertow.errors import CallError, DataError
from undertow.train.callbacks import find_callbacks
from undertow.train.checkpoint import Checkpoint, load_weights
from undertow.train.config import ALL, TrainConfig
from undertow.train.devices import choose_device, move_model
from undertow.train.evaluation import Evaluator
from undertow.train.feeding import make_test_loader
from undertow.train.folder import RunFolder
from undertow.train.objective import Objective
from undertow.train.run import UserCode, find_kind, make_objective
from undertow.train.workload import Workload, make_workload


def load_workload(config: TrainConfig) -> Workload:
    """The model and the data of a run. The seed is set just before each is made."""
    if ":" in config.data:
        train_loader, test_loader = _make_loaders(config.data, config.seed)
        return Workload(_build(config, None, False), train_loader, test_loader)
    source = open_data(config.data, _wanted_shape(config))
    model = _build(config, source.classes, source.preparation.vocabulary is not None)
    batch = len(source.train) if config.batch == ALL else int(config.batch)
    return make_workload(model, source, batch)


def _make_loaders(name: str, seed: int) -> tuple[Any, Any]:
    module, module_name, attribute = resolve(name)
    _seed(seed)
    made = call(module, module_name, attribute, "a training and a test loader")
    is_pair = isinstance(made, tuple | list) and len(made) == 2
    if not is_pair or not all(hasattr(loader, "__iter__") and hasattr(loader, "__len__") for loader in made):
        raise CallError(
            f"{attribute}() in {module_name} returned {describe(made)}: it must return a training and a test loader, "
            f"each with a length"
        )
    return made[0], made[1]


def _wanted_shape(config: TrainConfig) -> tuple[int, ...] | None:
    """The shape of one input of the model; None if the model gives no example."""
    if ":" not in config.model:
        return tuple(find_in_zoo(config.model).example_inputs(1)[0].shape[1:])
    module, module_name, attribute = resolve(config.model)
    _, args, _ = make_model(module, module_name, attribute)
    if args is None and callable(getattr(module, "example_inputs", None)):
        args = module.example_inputs(1)
    first = args[0] if isinstance(args, Sequence) and args else args
    return tuple(first.shape[1:]) if isinstance(first, torch.Tensor) else None


def _build(config: TrainConfig, classes: Sequence[str] | None, is_text: bool) -> torch.nn.Module:
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
    """The user's loss, metrics and callbacks that a config names."""
    loss = None
    if config.loss is not None and ":" in config.loss:
        loss = _find_function(config.loss, "--loss", "the loss of the outputs and targets")
    metrics = [(name.rpartition(":")[2], _find_function(name, "--metric", "a metric")) for name in config.metric or ()]
    if config.callbacks is None:
        return UserCode(loss, metrics)
    return UserCode(loss, metrics, find_callbacks(config.callbacks, load_module(config.callbacks)))


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
    model = _build(config, classes, preparation is not None and preparation.vocabulary is not None)
    code = load_user_code(config)
    report_code(config.model, config.loss, *(config.metric or ()))
    load_weights(model, checkpoint.trained_weights(), str(folder.path))
    move_model(model, chosen)
    return Trained(config, checkpoint, model, preparation, classes, chosen, code)


def load_test_batches(trained: Trained, name: str) -> Iterable[Any]:
    """The test data called `name`, prepared as the run's own data was."""
    if ":" in name:
        loader = _make_loaders(name, trained.config.seed)[1]
        report_code(name)
        return loader
    if trained.preparation is None:
        raise CallError(f"the run was trained on your own loaders; give --data file.py:factory, not {name}")
    source = open_data(name, trained.preparation.shape, trained.preparation.vocabulary)
    if source.classes is not None and trained.classes is not None and source.classes != trained.classes:
        raise DataError(f"{name} has the classes {', '.join(source.classes)}; the run has {', '.join(trained.classes)}")
    if isinstance(source.test, Arrays | Images):
        # The format of an image gives the largest value of a pixel; an array is taken to have the run's own.
        scale = trained.preparation.scale if name.endswith(".npz") else source.preparation.scale
        source.test.preparation = replace(trained.preparation, scale=scale)
    batch = len(source.test) if trained.config.batch == ALL else int(trained.config.batch)
    return make_test_loader(source.test, batch)
