"""`compress`: a trained model in, the smallest file out that keeps the accuracy asked for.

    compress(model, train=..., validation=..., max_loss=0.1)

Validation data decides; test data is read at the end, if it is given. The model that was given stays as it is, and is
the dense network that the small one is compared with and learns from. With `checkpoint` the search can be killed at any
moment, and the same call goes on from its last whole round to the same bytes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from undertow.coding.entries import DTYPES
from undertow.errors import CallError, DataError, NotFinite
from undertow.hashing import hash_tensors
from undertow.kernels.compiler import HAS_NUMBA
from undertow.shrink.compressed import Compressed, make_objective
from undertow.shrink.retraining import Stopped, Trainer
from undertow.shrink.search import Search
from undertow.shrink.settings import OPTIMIZERS, Settings
from undertow.shrink.state import DONE, State, resume_state, save_state
from undertow.shrink.time_limit import TimeLimit
from undertow.train.diagnosis import are_finite
from undertow.train.evaluation import Evaluation, Evaluator, evaluating
from undertow.train.feeding import Feed
from undertow.train.interrupts import INTERRUPTED, Interrupts
from undertow.train.objective import Objective


@dataclass(frozen=True)
class Parts:
    """Loaders of batches. `test` may be None."""

    train: Iterable[Any]
    validation: Iterable[Any]
    test: Iterable[Any] | None


def compress(
    model: nn.Module,
    *,
    train: Iterable[Any],
    validation: Iterable[Any],
    test: Iterable[Any] | None = None,
    max_loss: float = 0.1,
    loss: Callable[..., Tensor] | str | None = None,
    coder: Any = "mixed",
    epochs: int = 4,
    lr: float = 1e-3,
    optimizer: str = "adam",
    distill: float = 0.0,
    seed: int = 0,
    numerics: str = "exact",
    budget: int | str | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
    time_limit_s: float = math.inf,
) -> Compressed:
    """Prune, retrain, share and code a trained model; the smallest result that loses at most `max_loss`.

    `train`, `validation` and `test` are loaders, or lists, of batches as `undertow train` reads them: pairs of inputs
    and targets, or dicts. `max_loss` is in percentage points of accuracy on the validation data; where there are no
    labels, in percent of the loss. `epochs` are those of each round. If the accuracy cannot be kept, the result is the
    best that could, and `is_accuracy_kept` is False. With `time_limit_s` the search ends with what it has found.
    """
    settings = Settings(max_loss, coder, epochs, lr, optimizer, distill, seed, numerics, budget)
    path = None if checkpoint is None else Path(checkpoint)
    parts, limit = Parts(train, validation, test), TimeLimit(time_limit_s)
    return shrink(model, parts, make_objective(loss), settings, path, {}, progress, limit)


def shrink(
    model: nn.Module,
    parts: Parts,
    objective: Objective,
    settings: Settings,
    path: Path | None,
    metadata: dict[str, Any],
    say: Callable[[str], None],
    limit: TimeLimit,
) -> Compressed:
    """The whole search. A signal raises Stopped, after the state was saved; Ctrl-C raises KeyboardInterrupt."""
    device = check_model(model)
    dense, small = Evaluator(model, objective, device), copy.deepcopy(model)
    for parameter in small.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    evaluator = Evaluator(small, objective, device)
    validation = Feed(parts.validation, settings.seed)
    weights = hash_tensors(model.state_dict())
    state = State(settings.to_dict(), weights) if path is None else resume_state(path, settings.to_dict(), weights)
    first = _first_batch(parts.train, settings.seed, objective).map_tensors(lambda tensor: tensor.to(device))
    is_classified = _has_classes(dense, objective, first)
    found = dense.evaluate(validation.batches(0, 0), "validation")
    state.dense_score = score_of(found)
    allowed = settings.max_loss if found.accuracy is not None else abs(found.loss) * settings.max_loss / 100
    say(f"the dense network: {found.line}")
    if state.history:
        say(f"going on after round {len(state.history)}")

    def run() -> Any:
        with evaluating(small):
            return small(*first.args, **first.kwargs)

    with Interrupts() as interrupts:
        trainer = Trainer(
            objective,
            Feed(parts.train, settings.seed),
            device,
            Evaluator(model, objective, device, settings.numerics) if is_classified else None,
            settings.distill,
            OPTIMIZERS[settings.optimizer],
            settings.numerics,
            settings.budget,
            lambda: interrupts.reason,
        )
        search = Search(
            small,
            trainer,
            settings,
            lambda: score_of(evaluator.evaluate(validation.batches(0, 0), "validation")),
            run,
            state.dense_score - allowed - 1e-9,
            metadata,
            say,
        )
        try:
            while True:
                limit.end_what_does_not_fit(state)
                if state.kind == DONE:
                    break
                with limit.timing(state.kind):
                    search.run_round(state)
                    if path is not None:
                        save_state(path, state)
        except Stopped:
            if interrupts.reason == INTERRUPTED and path is None:
                raise KeyboardInterrupt from None
            raise
    result = Compressed.of(
        state.best, small, "the compressed network", is_accuracy_kept=state.is_kept, history=state.history
    )
    result.accuracy = {"validation": state.score, "dense_validation": state.dense_score}
    small.eval()
    if parts.test is not None:
        test = Feed(parts.test, settings.seed)
        for name, judged in (("test", evaluator), ("dense_test", dense)):
            result.accuracy[name] = score_of(judged.evaluate(test.batches(0, 0), "test"))
    return result


def score_of(found: Evaluation) -> float:
    """Accuracy in percent, or minus the loss: higher is better."""
    return -found.loss if found.accuracy is None else 100 * found.accuracy


def check_model(model: nn.Module) -> torch.device:
    """Refuse a model that no file can hold; returns its device."""
    if not isinstance(model, nn.Module):
        raise CallError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not HAS_NUMBA:
        raise CallError("to compress a model Undertow needs Numba, which cannot be imported here: install numba")
    for name, item in model.state_dict(keep_vars=True).items():
        if not isinstance(item, Tensor):
            raise CallError(f"{name} is extra state of type {type(item).__name__}, and a .utz file holds tensors only")
        if item.dtype not in DTYPES or item.layout is not torch.strided:
            raise CallError(f"{name} has elements of {item.dtype}, {item.layout}, which a .utz file cannot hold")
    if not any(item.is_floating_point() and item.numel() for item in model.parameters()):
        raise CallError("the model has no parameters of floating-point numbers: there is nothing to compress")
    for name, parameter in model.named_parameters():
        if not are_finite([parameter.detach()]):
            raise NotFinite(
                f"parameter {name} holds numbers that are infinite or not a number: mend it, or train again"
            )
    return next(model.parameters()).device


def _first_batch(train: Iterable[Any], seed: int, objective: Objective) -> Any:
    raw = next(Feed(train, seed).batches(0, 0), None)
    if raw is None:
        raise DataError("there are no training batches")
    return objective.read(raw)


def _has_classes(dense: Evaluator, objective: Objective, batch: Any) -> bool:
    """Whether the outputs are scores of classes, towards which a small network can be taught."""
    if not batch.targets or not objective.is_of_classes:
        return False
    outputs = dense.predict(*batch.args, **batch.kwargs)
    return isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.dim() > 1
