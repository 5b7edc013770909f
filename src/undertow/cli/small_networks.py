"""What a `.utz` file says of its network beside the weights, and how a model is made from it.

In: a trained run, or a file. Out: metadata, or the file's Trained. The metadata is short, since it counts: the model's
name, its loss where that is not the usual one, how inputs are prepared, and the classes. A file may come from a
stranger, so it can name a model of the zoo, and never code that would run. Code is named by who calls: `--model`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from undertow.cli.workloads import Trained, build_model
from undertow.coding.small_file import MAGIC, SmallFile, open_small_file
from undertow.data.preparation import Preparation
from undertow.errors import CallError, DataError
from undertow.shrink.compressed import load_file
from undertow.train.checkpoint import Checkpoint, Progress
from undertow.train.config import TrainConfig, make_config
from undertow.train.devices import choose_device, move_model
from undertow.train.run import UserCode

_NAMED = ("model", "loss", "targets", "columns")  # options that evaluation needs


def is_small_file(path: str) -> bool:
    """Whether there is a `.utz` file at `path`, or its name says so."""
    found = Path(path)
    if not found.is_file():
        return found.suffix == ".utz"
    with open(found, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC or found.suffix == ".utz"


def describe_network(
    config: TrainConfig, preparation: Preparation | None, classes: tuple[str, ...] | None
) -> dict[str, Any]:
    """The metadata of a file."""
    defaults = {item.name: item.default for item in fields(TrainConfig)}
    about = {name: value for name in _NAMED if (value := getattr(config, name)) != defaults[name]}
    if preparation is not None:
        plain, usual = preparation.to_dict(), Preparation(()).to_dict()
        about["preparation"] = {name: item for name, item in plain.items() if item != usual[name]}
    if classes is not None:
        is_numbered = classes == tuple(map(str, range(len(classes))))
        about["classes"] = len(classes) if is_numbered else list(classes)
    return about


def load_small_network(path: str, model: str | None, device: str | None) -> Trained:
    """The network of a file, on a device; `model` names it where the file does not, or names code."""
    file = open_small_file(Path(path))
    config, preparation, classes = _read_about(file, model)
    is_text = preparation is not None and preparation.vocabulary is not None
    built = build_model(config, classes, is_text)
    load_file(file, built)
    chosen = choose_device("cpu" if device is None else device)
    move_model(built, chosen)
    return Trained(config, Checkpoint({}, Progress(), {}), built, preparation, classes, chosen, UserCode())


def _read_about(file: SmallFile, model: str | None) -> tuple[TrainConfig, Preparation | None, tuple[str, ...] | None]:
    about = file.metadata
    named = about.get("model")
    if model is None and (not isinstance(named, str) or ":" in named):
        what = (
            f"names the code {named!r}, which is not run on a file's word" if isinstance(named, str) else "names none"
        )
        raise CallError(f"{file.where} {what}: say which model it is with --model file.py:factory")
    loss = about.get("loss")
    if isinstance(loss, str) and ":" in loss:
        raise CallError(f"{file.where} was trained with {loss}, code of its user: evaluate its run instead")
    try:
        given = {name: about[name] for name in _NAMED if about.get(name) is not None} | {"model": model or named}
        config = make_config(given, file.where)
        preparation = None
        if isinstance(about.get("preparation"), dict):
            preparation = Preparation.from_dict(Preparation(()).to_dict() | about["preparation"])
        classes: Any = about.get("classes")
        if isinstance(classes, int) and not isinstance(classes, bool):
            if not 0 <= classes <= 1 << 20:
                raise ValueError(f"{classes} classes")
            return config, preparation, tuple(map(str, range(classes)))
        return config, preparation, None if classes is None else tuple(map(str, list(classes)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file.where} is refused: it does not say how its network is read ({error})") from None
