"""Every option of a training run, in one record. Flags and the keys of a config file have the names of its fields.

This module imports nothing heavy: the command line builds its options from it without loading PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import reprlib
import tomllib
import types
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from undertow.errors import CallError

MAX_FILE_BYTES = 1 << 20

LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
CLASS_LOSSES = ("cross_entropy", "nll_loss")  # of labels; the others take numbers in the shape of the outputs
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine", "step")
NUMERICS = ("exact", "fast", "bf16")
MAX_SEED = 2**64 - 1  # the most that torch's generators accept

# Usual first guesses, where no learning rate is given.
DEFAULT_RATES = {"sgd": 0.01, "adam": 1e-3, "adamw": 1e-3}
DEFAULT_MOMENTUM = 0.9

# A resumed run may change these: no step that was taken depends on them.
CHANGEABLE = ("epochs", "max_steps", "save_every", "patience")


def _option(default: Any, text: str, choices: tuple[str, ...] = (), least: float | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices, "least": least})


@dataclass(frozen=True)
class TrainConfig:
    """The options of a run. Every field but `model` has a default; its `metadata` is for the command line."""

    model: str = _option("", "A zoo name (vgg_small), file.py:factory or package.module:factory.")
    data: str = _option("digits", "digits, a folder, a .npz or .txt file, or file.py:factory returning two loaders.")
    loss: str = _option("cross_entropy", "A loss of torch.nn.functional.", LOSSES)
    optimizer: str = _option("sgd", "How gradients become updates.", OPTIMIZERS)
    lr: float | None = _option(None, "Learning rate; 0.01 for sgd and 0.001 for the others by default.", least=0)
    momentum: float | None = _option(None, "Momentum of sgd; 0.9 by default.", least=0)
    nesterov: bool = _option(False, "Use Nesterov's momentum, with sgd.")
    weight_decay: float = _option(0.0, "Weight decay of weights, not of biases and norms.", least=0)
    decay_all: bool = _option(False, "Apply weight decay to biases and norms too.")
    schedule: str = _option("constant", "How the learning rate falls over the run.", SCHEDULES)
    warmup: int = _option(0, "Steps over which the learning rate first rises.", least=0)
    epochs: int = _option(10, "Passes over the training data.", least=1)
    max_steps: int | None = _option(None, "Stop after this many updates.", least=1)
    batch: int = _option(16, "Examples in a batch.", least=1)
    accumulate: int = _option(1, "Batches whose gradients are averaged into one update.", least=1)
    clip_norm: float | None = _option(None, "Clip all gradients together to this norm.", least=0)
    patience: int | None = _option(None, "Stop after this many epochs without a lower test loss.", least=1)
    budget: str | None = _option(None, "Peak memory of a step: 50MiB, 6GiB or 6G, or bytes.")
    numerics: str = _option(
        "exact",
        "exact: eager's bits; fast: the fastest kernels, within error bounds; bf16: fast, in bfloat16.",
        NUMERICS,
    )
    allow_other_bits: bool = _option(False, "Use kernels that take less memory where the fastest do not fit.")
    seed: int = _option(0, "Seed of weights, data order and dropout.", least=0)
    save_every: int | None = _option(None, "Updates between checkpoints; each epoch ends with one anyway.", least=1)
    out: str | None = _option(None, "The run's folder; by default a new one under runs/.")

    @property
    def learning_rate(self) -> float:
        """The highest learning rate of the run."""
        return DEFAULT_RATES[self.optimizer] if self.lr is None else self.lr

    @property
    def sgd_momentum(self) -> float | None:
        """The momentum of sgd; None for other optimizers."""
        return DEFAULT_MOMENTUM if self.momentum is None and self.optimizer == "sgd" else self.momentum

    def effective(self, name: str) -> Any:
        """The value of an option as the run uses it: the default where none was given."""
        used = {"lr": self.learning_rate, "momentum": self.sgd_momentum}
        return used.get(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in a config file."""
        return dataclasses.asdict(self)


def make_config(given: dict[str, Any], where: str) -> TrainConfig:
    """A config from names and values; `where` says in messages where they come from."""
    known = {item.name: item for item in fields(TrainConfig)}
    values = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise CallError(
                f"{where}: there is no option {key!r}; "
                + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")
            )
        values[name] = _convert(known[name], value, where)
    config = TrainConfig(**values)
    _check_together(config, where)
    return config


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys and values of a TOML or YAML file."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CallError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes, the most for a config")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise CallError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CallError(f"{path} is not UTF-8 text") from None
    try:
        found = _parse_yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise CallError(f"{path} must hold keys with values, such as lr = 0.1")
    return found


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _convert(item: Any, value: Any, where: str) -> Any:
    """The value in the field's type; raises CallError that says what the field takes."""
    hint = typing.get_type_hints(TrainConfig)[item.name]
    parts = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    expected = parts[0]
    if value is None and types.NoneType in parts:
        return None
    if expected is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-3 as a string
    if item.name == "budget" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if type(value) is not expected or (expected is float and not math.isfinite(value)):
        raise CallError(f"{where}: {item.name} must be {_name_type(expected)}, got {reprlib.repr(value)}")
    choices, least = item.metadata["choices"], item.metadata["least"]
    if choices and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        advice = f"did you mean {near[0]}? It " if near else ""
        raise CallError(f"{where}: {item.name} {value!r} is not known; {advice}can be {', '.join(choices)}")
    if least is not None and value < least:
        raise CallError(f"{where}: {item.name} must be at least {least}, got {value!r}")
    return value


def _name_type(expected: type) -> str:
    return {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[expected]


def _check_together(config: TrainConfig, where: str) -> None:
    if not config.model:
        raise CallError(f"{where}: no model is named")
    if config.optimizer != "sgd" and (config.momentum is not None or config.nesterov):
        raise CallError(f"{where}: momentum and nesterov are options of sgd, but the optimizer is {config.optimizer}")
    if config.nesterov and config.momentum == 0:
        raise CallError(f"{where}: nesterov needs a momentum of more than 0")
    if config.seed > MAX_SEED:
        raise CallError(f"{where}: seed must be at most {MAX_SEED}, got {config.seed}")


def check_resumed(config: TrainConfig, given: dict[str, Any], folder: Path) -> TrainConfig:
    """The config of a resumed run; raises CallError for an option that must stay as it was."""
    requested = make_config({**config.to_dict(), **given}, "command line")
    if given.get("out") is not None and Path(given["out"]).resolve() != folder.resolve():
        raise CallError(f"the run in {folder} goes on in its own folder, but --out is {given['out']}: leave --out out")
    for item in fields(TrainConfig):
        name, before, now = item.name, config.effective(item.name), requested.effective(item.name)
        if now != before and name not in (*CHANGEABLE, "out"):
            started = f"without {name}" if before is None else f"with {name} {before!r}"
            raise CallError(
                f"the run in {folder} was started {started}, but now {now!r} is given: "
                f"leave --{name.replace('_', '-')} out, or start a new run"
            )
    if (requested.epochs, requested.max_steps) != (config.epochs, config.max_steps) and config.schedule != "constant":
        raise CallError(
            f"the run in {folder} has the schedule {config.schedule}, which depends on the run's length: "
            f"leave --epochs and --max-steps out"
        )
    return dataclasses.replace(requested, out=str(folder))
