"""What is compressed. In: a run, or a model with weights and data. Out: the trained network, its data, and what judges.

Validation data judges. A run that had none gets a share of its training data: the network has seen these examples, so
they judge mildly, and that is said. Test data never judges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from undertow.cli.workloads import Trained, load_trained, load_user_code, load_workload, report_code
from undertow.errors import CallError, DataError
from undertow.train.checkpoint import Checkpoint, Progress, load_weights
from undertow.train.config import make_config
from undertow.train.devices import choose_device, move_model
from undertow.train.weights import read_tensors
from undertow.train.workload import Workload

_OF_DATA = ("columns", "image_size", "normalise", "augment", "validation", "workers")


@dataclass(frozen=True)
class Source:
    """A trained network with its data."""

    trained: Trained
    workload: Workload
    validation: Iterable[Any]
    notes: tuple[str, ...]


def load_source(run: str, data: str | None, validation: str, weights: str | None, device: str, is_last: bool) -> Source:
    """The network and its data; raises where there is nothing to judge or to test on."""
    if weights is None:
        if not Path(run).is_dir():
            raise CallError(f"{run} is no folder of a run; of a model, give --weights FILE.safetensors and --data too")
        trained = load_trained(run, device, is_last)
        config = trained.config if data is None else replace(trained.config, data=data)
    else:
        if data is None:
            raise CallError(f"--weights {weights}: say which data to retrain on with --data")
        config = make_config({"model": run, "data": data}, "command line")
    is_own_loader = ":" in config.data
    if is_own_loader and data is not None:
        # What the run did to its own data is not for loaders that are given instead.
        fresh: dict[str, Any] = {item.name: item.default for item in fields(config) if item.name in _OF_DATA}
        config = replace(config, **fresh)
    has_split = config.validation is not None
    notes: tuple[str, ...] = ()
    if not is_own_loader and not has_split:
        config = replace(config, validation=validation)
    workload = _load_workload(config, has_split)
    if workload.validation_loader is None:
        raise CallError(f"{config.data} makes no validation loader, and test data must not judge: return three loaders")
    if weights is None and not has_split and not is_own_loader and workload.preparation is not None:
        notes = (f"the run had no validation data: {validation} of the training data judges, which it has seen",)
    if not len(workload.test_loader):  # type: ignore[arg-type]
        raise DataError(f"{config.data} has no test data: the small network could not be measured")
    if weights is not None:
        trained = _load_model(workload, weights, device, config)
    elif workload.preparation is not None and trained.preparation is not None:
        _prepare_alike(workload, trained)
    report_code(config.data if is_own_loader else None)
    return Source(trained, workload, workload.validation_loader, notes)


def _load_workload(config: Any, has_split: bool) -> Workload:
    try:
        return load_workload(config)
    except CallError as error:
        # Data with a validation part of its own needs no share.
        if has_split or "validation part of its own" not in str(error):
            raise
        return load_workload(replace(config, validation=None))


def _load_model(workload: Workload, weights: str, device: str, config: Any) -> Trained:
    tensors, _ = read_tensors(Path(weights))
    load_weights(workload.model, tensors, weights)
    chosen = choose_device(device)
    move_model(workload.model, chosen)
    code, about = load_user_code(config), Checkpoint({}, Progress(), {})
    return Trained(config, about, workload.model, workload.preparation, workload.classes, chosen, code)


def _prepare_alike(workload: Workload, trained: Trained) -> None:
    """Prepare inputs as the run did: another split of the data has another mean."""
    if workload.classes != trained.classes:
        raise DataError("the data has other classes than the run")
    for loader in workload.loaders().values():
        loader.dataset.prepare_as(trained.preparation)  # type: ignore[attr-defined]
