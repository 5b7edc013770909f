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
from undertow.ranks.mesh import Mesh, parse_mesh
from undertow.stages.schedules import SCHEDULES as STAGE_SCHEDULES

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
OWN_LOSS = "model"  # the model returns it
CLASS_LOSSES = ("cross_entropy", "nll_loss")  # of labels; the others take numbers in the shape of the outputs
PLATEAU = "plateau"
SCHEDULES = ("constant", "linear", "cosine", "step", PLATEAU)
METRICS = ("f1", "confusion", "top5", "errors", "perplexity")
ALL = "all"
SERVER = "server"  # of --parallel
FREE = "free"  # of --max-delay
PUSH_DTYPES = ("f32", "bf16")
NUMERICS = ("exact", "fast", "bf16")
LOCKINGS = ("none", "one", "parameter", "step")
MAX_SEED = 2**64 - 1  # the most that torch's generators accept

# Usual first guesses, where no learning rate is given.
DEFAULT_RATES = {"sgd": 0.01, "adam": 1e-3, "adamw": 1e-3}
DEFAULT_MOMENTUM = 0.9

# A resumed run may change these: no step that was taken depends on them.
CHANGEABLE = (
    "epochs",
    "max_steps",
    "save_every",
    "patience",
    "until_loss",
    "keep",
    "metrics",
    "metric",
    "callbacks",
    "gradient_norm",
    "workers",
    "parallel",
    "shard_state",
    "stage_schedule",
    "locking",
    "servers",
    "replicas",
    "max_delay",
    "cluster",
    "max_restarts",
    "min_ranks",
    "lost_after",
)

# These hold for the call that gives them.
NOT_KEPT = ("max_restarts", "min_ranks")

# In a config file these may be a number, and class weights a list.
NUMBERS_AS_TEXT = ("budget", "image_size", "validation")


def _option(
    default: Any, text: str, choices: tuple[str, ...] = (), least: float | None = None, word: str | None = None
) -> Any:
    """A field. `choices`: the only values; `least`: of a number; `word`: what may stand instead of a number."""
    return field(default=default, metadata={"help": text, "choices": choices, "least": least, "word": word})


@dataclass(frozen=True)
class TrainConfig:
    """The options of a run. Every field but `model` has a default; its `metadata` is for the command line."""

    model: str = _option("", "A zoo name (vgg_small), file.py:factory or package.module:factory.")
    data: str = _option(
        "digits", "digits, a folder, a .npz, .txt, .parquet or .arrow file, or file.py:factory returning loaders."
    )
    columns: list[str] | None = _option(None, "Columns of inputs and targets in a table: image,label.")
    image_size: str | None = _option(None, "Size of images: 224, or height x width: 224x160.")
    normalise: str | None = _option(
        None, "Mean/deviation per channel: 0.5,0.5,0.5/0.2,0.2,0.2; by default those of the training images."
    )
    augment: list[str] | None = _option(
        None, "Changes of training images, by commas: resized-crop, crop, flip, jitter."
    )
    validation: str | None = _option(None, "A share of the training examples, such as 0.1, or other data.")
    class_weights: str | None = _option(None, "Weights of classes in the loss: balanced, or 1,2.5,1.")
    workers: int = _option(
        0, "Processes that read and change examples; with --parallel server, those that compute.", least=0
    )
    device: str = _option("auto", "cpu, cuda, cuda:1, or auto: a GPU where there is one.")
    init: str | None = _option(None, "Begin with the weights of a safetensors file that fit; the others are listed.")
    freeze: list[str] | None = _option(None, "Parameters that are not trained: patterns such as features.*, by commas.")
    loss: str | None = _option(
        None,
        "A loss of torch.nn.functional such as mse_loss, file.py:function, or model: the model returns its own. By "
        "default cross_entropy, and the model's own where batches are dicts.",
    )
    targets: list[str] | None = _option(None, "Of batches that are dicts, the names of the targets, by commas.")
    label_smoothing: float = _option(0.0, "Smooth the labels of cross_entropy in training by this share.", least=0)
    optimizer: str = _option("sgd", "An optimizer of torch.optim in small letters, such as sgd, adamw, rmsprop.")
    optimizer_args: dict[str, Any] | None = _option(None, "Its other arguments, such as 'betas=[0.9,0.95], eps=1e-6'.")
    lr: float | None = _option(None, "Learning rate; 0.01 for sgd, 0.001 for adam and adamw by default.", least=0)
    lr_scale: dict[str, float] | None = _option(None, "Factors of it for some parameters: 'features.*=0.1,head.*=2'.")
    momentum: float | None = _option(None, "Momentum of sgd; 0.9 by default.", least=0)
    nesterov: bool = _option(False, "Use Nesterov's momentum, with sgd.")
    weight_decay: float = _option(0.0, "Weight decay of weights, not of biases and norms.", least=0)
    decay_all: bool = _option(False, "Apply weight decay to biases and norms too.")
    schedule: str = _option(
        "constant",
        f"How the learning rate changes over the run: {', '.join(SCHEDULES)}, or one of torch.optim.lr_scheduler by "
        "its name.",
    )
    schedule_args: dict[str, Any] | None = _option(
        None, "Its arguments: 'at=[0.5,0.75], factor=0.1' of step, 'least=0.01' of cosine, 'patience=3' of plateau."
    )
    warmup: int = _option(0, "Steps over which the learning rate first rises.", least=0)
    ema: float | None = _option(None, "Evaluate and keep an average of the weights with this decay, such as 0.999.")
    epochs: int = _option(10, "Passes over the training data.", least=1)
    max_steps: int | None = _option(None, "Stop after this many updates.", least=1)
    until_loss: float | None = _option(None, "Stop after an epoch whose mean training loss is at most this.")
    batch: int | str = _option(16, "Examples in a batch, or all: the gradient of the whole set.", least=1, word=ALL)
    accumulate: int = _option(1, "Batches whose gradients are averaged into one update.", least=1)
    shards: int | None = _option(
        None, "Divide each batch into this many parts, computed alone: bits depend on them, not on ranks.", least=1
    )
    loss_is_sum: bool = _option(False, "The loss of a shard is a sum over its examples, not their mean.")
    parallel: str | None = _option(
        None,
        "data=4: 4 ranks that divide the shards, started here or by torchrun. stages=2: the layers; data=2,stages=2: "
        "both. hogwild=2: 2 workers of one machine that share parameters and update them without waiting for each "
        "other. server: --workers processes, which push gradients to a parameter server on Ray.",
    )
    shard_state: bool = _option(
        False, "Divide the optimizer's state over the ranks, and parameters for which a budget has no room."
    )
    servers: int = _option(2, "Processes of a parameter server; each has a part of the parameters.", least=1)
    replicas: int = _option(2, "Copies of each part of a parameter server, on different nodes if there are.", least=1)
    max_delay: int | str = _option(
        8,
        "The most updates between a worker's pull and its push; 0: in step; free: any number.",
        least=0,
        word=FREE,
    )
    push_dtype: str = _option(
        "f32", "How gradients travel to a parameter server; bf16 keeps what was rounded for the next push.", PUSH_DTYPES
    )
    cluster: str | None = _option(None, "host:port of a Ray cluster for --parallel server; by default one is started.")
    locking: str = _option(
        "none",
        "What keeps the updates of hogwild apart: none, one lock, one for each parameter, or steps begun together.",
        LOCKINGS,
    )
    shared_gradients: bool = _option(False, "Workers of hogwild add into one sum of gradients, with --accumulate.")
    stage_schedule: str = _option("1f1b", "In which order stages run the shards.", STAGE_SCHEDULES)
    max_restarts: int = _option(0, "Start the ranks again so often from the last checkpoint when one is lost.", least=0)
    min_ranks: int | None = _option(
        None, "With one rank fewer each time that they start again, as long as there are so many.", least=1
    )
    lost_after: float = _option(60.0, "Seconds after which a rank that does not move is lost.", least=1)
    threads: int | None = _option(
        None,
        "Threads of a process; bits depend on them. By default all cores, divided by the shards if given.",
        least=1,
    )
    clip_norm: float | None = _option(None, "Clip all gradients together to this norm.", least=0)
    gradient_norm: bool = _option(False, "Record the norm of the gradients; with --clip-norm it is recorded anyway.")
    patience: int | None = _option(
        None, "Stop after this many epochs without a lower loss on validation data (on test data without any).", least=1
    )
    keep: int = _option(0, "Keep the checkpoints of the last epochs, this many, beside the best and the last.", least=0)
    metrics: list[str] | None = _option(None, f"What evaluation counts besides, by commas: {', '.join(METRICS)}.")
    metric: list[str] | None = _option(None, "Metrics of your own, by commas: file.py:function of outputs and targets.")
    callbacks: str | None = _option(None, "A file of functions that are called as the run goes on.")
    budget: str | None = _option(None, "Peak memory of a step on the device: 50MiB, 6GiB or 6G, bytes, or auto.")
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
    def learning_rate(self) -> float | None:
        """The highest learning rate of the run; None where it is that of PyTorch's optimizer."""
        return DEFAULT_RATES.get(self.optimizer) if self.lr is None else self.lr

    @property
    def sgd_momentum(self) -> float | None:
        """The momentum of sgd; None for other optimizers."""
        return DEFAULT_MOMENTUM if self.momentum is None and self.optimizer == "sgd" else self.momentum

    @property
    def mesh(self) -> Mesh:
        """How the ranks are arranged; one rank where nothing is given."""
        return Mesh() if self.parallel in (None, SERVER) else parse_mesh(self.parallel, "--parallel")

    @property
    def num_readers(self) -> int:
        """Processes that read and change examples, for each process that computes."""
        return 0 if self.parallel == SERVER else self.workers

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
    expected, is_optional = value_type(item.name)
    word = item.metadata["word"]
    if value is None and is_optional:
        return None
    if expected in (list, dict) and isinstance(value, str):
        value = _split(item.name, value, where)
    if word is not None and isinstance(value, str) and value != word and value.isdecimal():
        value = int(value)
    if expected is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            value = float(value)  # YAML reads 1e-3 as a string
    if item.name in NUMBERS_AS_TEXT and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if item.name == "class_weights" and isinstance(value, list):
        value = ",".join(map(str, value))
    if word is not None and value == word:
        return value
    if type(value) is not expected or (expected is float and not math.isfinite(value)):
        instead = "" if word is None else f" or {word}"
        raise CallError(f"{where}: {item.name} must be {_name_type(expected)}{instead}, got {reprlib.repr(value)}")
    _check_parts(item.name, value, where)
    choices, least = item.metadata["choices"], item.metadata["least"]
    if choices and value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        advice = f"did you mean {near[0]}? It " if near else ""
        raise CallError(f"{where}: {item.name} {value!r} is not known; {advice}can be {', '.join(choices)}")
    if least is not None and value < least:
        raise CallError(f"{where}: {item.name} must be at least {least}, got {value!r}")
    return value


def value_type(name: str) -> tuple[Any, bool]:
    """The type of a field's values, and whether it may be None; of a number with a word, the number's."""
    hint = typing.get_type_hints(TrainConfig)[name]
    parts = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
    return typing.get_origin(parts[0]) or parts[0], types.NoneType in parts


def _split(name: str, text: str, where: str) -> Any:
    """A list of names, or a table, as it is written on a command line."""
    if name == "lr_scale":
        parts = [part.rpartition("=") for part in text.split(",")]
        return {pattern.strip(): factor.strip() for pattern, _, factor in parts}
    if value_type(name)[0] is list:
        return [part.strip() for part in text.split(",")]
    try:
        return tomllib.loads(f"table = {{{text}}}")["table"]
    except (ValueError, KeyError) as error:
        raise CallError(
            f"{where}: {name} must be written as 'name=value, name=[1, 2]', got {text!r} ({error})"
        ) from None


def _check_parts(name: str, value: Any, where: str) -> None:
    """Check what is in a list or a table; factors become numbers."""
    if isinstance(value, list):
        if not value or not all(isinstance(part, str) and part for part in value):
            raise CallError(f"{where}: {name} must be names, got {reprlib.repr(value)}")
        for part in value:
            if name == "metrics" and part not in METRICS:
                raise CallError(f"{where}: there is no metric {part!r}; there are {', '.join(METRICS)}")
    if name == "lr_scale" and isinstance(value, dict):
        for pattern, factor in value.items():
            try:
                value[pattern] = float(factor)
            except (TypeError, ValueError):
                value[pattern] = math.nan
            if not pattern or not math.isfinite(value[pattern]) or value[pattern] < 0:
                raise CallError(f"{where}: {name} must be patterns with factors, 'head.*=2', got {pattern}={factor}")


def _name_type(expected: type) -> str:
    names = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(expected, "a list of names" if expected is list else "a table")


def _check_together(config: TrainConfig, where: str) -> None:
    if not config.model:
        raise CallError(f"{where}: no model is named")
    if config.optimizer != "sgd" and (config.momentum is not None or config.nesterov):
        raise CallError(f"{where}: momentum and nesterov are options of sgd, but the optimizer is {config.optimizer}")
    if config.loss is not None and ":" not in config.loss and config.loss not in (*LOSSES, OWN_LOSS):
        near = difflib.get_close_matches(config.loss, (*LOSSES, OWN_LOSS), n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}? It " if near else ""
        raise CallError(
            f"{where}: loss {config.loss!r} is not known; {advice}can be {', '.join((*LOSSES, OWN_LOSS))}, or "
            f"file.py:function"
        )
    if config.label_smoothing and config.loss not in (None, "cross_entropy"):
        raise CallError(f"{where}: label_smoothing is an option of cross_entropy, but the loss is {config.loss}")
    if config.label_smoothing > 1 or (config.ema is not None and not 0 < config.ema < 1):
        raise CallError(f"{where}: label_smoothing goes from 0 to 1, and ema lies between 0 and 1")
    if config.schedule.islower() and config.schedule not in SCHEDULES:
        near = difflib.get_close_matches(config.schedule, SCHEDULES, n=1)
        advice = f"did you mean {near[0]}? It " if near else ""
        raise CallError(
            f"{where}: schedule {config.schedule!r} is not known; {advice}can be {', '.join(SCHEDULES)}, or one of "
            f"torch.optim.lr_scheduler such as OneCycleLR"
        )
    if config.loss_is_sum and config.shards is None:
        raise CallError(f"{where}: loss_is_sum says how the losses of shards are joined; give shards as well")
    if config.shards is not None and isinstance(config.batch, int) and config.batch < config.shards:
        raise CallError(
            f"{where}: a batch of {config.batch} cannot be divided into {config.shards} shards, each of which needs an "
            f"example: use fewer shards, or a larger batch"
        )
    _check_ranks(config, where)
    if config.nesterov and config.momentum == 0:
        raise CallError(f"{where}: nesterov needs a momentum of more than 0")
    if config.seed > MAX_SEED:
        raise CallError(f"{where}: seed must be at most {MAX_SEED}, got {config.seed}")


def _check_ranks(config: TrainConfig, where: str) -> None:
    _check_served(config, where)
    mesh = Mesh() if config.parallel in (None, SERVER) else parse_mesh(config.parallel, where)
    num_ranks = mesh.num_ranks
    _check_hogwild(config, mesh, where)
    if mesh.data * mesh.stages > 1 and config.shards is None:
        raise CallError(
            f"{where}: parallel={config.parallel} divides the shards of a batch over ranks, and no shards are given; "
            f"give --shards {num_ranks} or more, on which the bits depend"
        )
    if config.shards is not None and config.shards < mesh.data:
        raise CallError(
            f"{where}: {config.shards} shards cannot be divided over {mesh.data} ranks: each needs one; give more "
            f"shards, or fewer ranks"
        )
    if config.shard_state and config.parallel is None:
        raise CallError(f"{where}: shard_state divides the optimizer's state over ranks; give --parallel as well")
    if config.shard_state and config.ema is not None and config.budget is not None:
        raise CallError(
            f"{where}: ema reads all weights after each update, and with shard_state and a budget a rank may have a "
            f"part of them; leave out one of the three"
        )
    if mesh.stages > 1 and config.ema is not None:
        raise CallError(
            f"{where}: ema averages all weights after every step, and with stages={mesh.stages} a rank holds its own; "
            f"leave one of them out"
        )
    if config.min_ranks is not None and (config.min_ranks > num_ranks or not config.max_restarts):
        raise CallError(
            f"{where}: min_ranks says with how many of the {num_ranks} ranks a job may start again: give at most as "
            f"many, and --max-restarts"
        )


def _check_served(config: TrainConfig, where: str) -> None:
    """What a run with a parameter server cannot have, and what only such a run has."""
    if config.parallel != SERVER:
        for name in ("cluster", "push_dtype"):
            if getattr(config, name) != TrainConfig.__dataclass_fields__[name].default:
                raise CallError(f"{where}: {name} is about parallel=server, which is not given")
        return
    if config.workers < 1:
        raise CallError(f"{where}: parallel=server needs workers that compute: give --workers 2 or more")
    if config.replicas > config.servers:
        raise CallError(
            f"{where}: {config.replicas} replicas of each part need as many servers, and there are {config.servers}: "
            f"give --servers {config.replicas}, or fewer --replicas"
        )
    reasons = {
        "shards": "a worker computes whole batches",
        "clip_norm": "no process has all gradients of an update",
        "gradient_norm": "no process has all gradients of an update",
        "ema": "no process sees all updates",
        "accumulate": "a worker pushes each batch",
        "loss_is_sum": "a worker computes whole batches",
        "max_restarts": "processes that end are started again anyway",
    }
    for name, reason in reasons.items():
        if getattr(config, name) != TrainConfig.__dataclass_fields__[name].default:
            raise CallError(f"{where}: {name} cannot be had with parallel=server: {reason}; leave it out")
    if config.device not in ("auto", "cpu"):
        raise CallError(f"{where}: parallel=server computes on CPUs; leave device={config.device} out")


def _check_hogwild(config: TrainConfig, mesh: Mesh, where: str) -> None:
    """Workers that share parameters have batches of their own, and none of them sees all updates."""
    if mesh.hogwild == 1:
        is_given = config.locking != "none" or config.shared_gradients
        if is_given and (config.parallel is None or "hogwild" not in config.parallel):
            raise CallError(f"{where}: locking and shared_gradients are about parallel=hogwild=2, which is not given")
        return
    reasons = {
        "shards": "a worker computes whole batches",
        "ema": "a worker does not see the others' updates",
        "save_every": "workers are at different batches; a checkpoint is written after each epoch",
    }
    for name, reason in reasons.items():
        if getattr(config, name) is not None:
            raise CallError(f"{where}: {name} cannot be had with parallel={config.parallel}: {reason}; leave it out")
    if config.shared_gradients and config.accumulate == 1:
        raise CallError(
            f"{where}: shared_gradients is about gradients that are added up, and with accumulate=1 each is used up at "
            f"once; give --accumulate, or leave it out"
        )


def check_resumed(config: TrainConfig, given: dict[str, Any], folder: Path) -> TrainConfig:
    """The config of a resumed run; raises CallError for an option that must stay as it was."""
    kept = {name: value for name, value in config.to_dict().items() if name not in NOT_KEPT}
    requested = make_config({**kept, **given}, "command line")
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
    is_longer = (requested.epochs, requested.max_steps) != (config.epochs, config.max_steps)
    if is_longer and config.schedule not in ("constant", PLATEAU):
        raise CallError(
            f"the run in {folder} has the schedule {config.schedule}, which depends on the run's length: "
            f"leave --epochs and --max-steps out"
        )
    return dataclasses.replace(requested, out=str(folder))
