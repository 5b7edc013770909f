"""Why a loss became infinite or not a number: the first operation that made such a value out of finite ones.

The step that showed it has already updated the weights. So the run goes back to its last good checkpoint and repeats
its steps, with the same bits, to the first one after which anything is not finite. That step then runs once more, one
operation at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from undertow.errors import NotFinite
from undertow.ir import Node, Value
from undertow.ir.structure import tensors_in
from undertow.train.batches import Batch
from undertow.train.checkpoint import Checkpoint


def explain_not_finite(run: Any, bad_step: int, what: str) -> NotFinite:
    """The error for a run whose step `bad_step`, counted from 1, showed that `what` is not finite.

    It repeats steps and so changes the run's progress.
    """
    good = run.folder.read_checkpoint()
    if run.job.mesh is not None and run.job.mesh.stages > 1:
        return NotFinite(
            f"{what} not finite; the last good checkpoint, of step {good.progress.step}, is in "
            f"{run.folder.checkpoint_path}. Resume it with --parallel data=1, which names the operation"
        )
    first_bad = _find_first_bad_step(run, good, bad_step)
    run.restore(good)
    groups = _groups(run)
    while run.progress.step < first_bad - 1:
        run.run_batches(next(groups))
    group = next(groups)
    found = next(
        (node for batch in group if (node := find_first_bad(run.step.walk(*batch.call, **batch.kwargs)))), None
    )
    # A rank runs the shards that it holds; the first value may be in another one's.
    where = "" if found is None else f"{found.name} ({str(found.origin) or 'the loss'})"
    cause, advice = "the update made weights that are not finite", "Lower --lr, or give --clip-norm"
    if places := [place for number, batch in enumerate(group) if (place := _find_bad_number(batch, number))]:
        cause = f"the data itself holds numbers that are not finite, first in {places[0]} of the step"
        advice = "Mend or leave out that example; no setting of the run helps"
    elif named := next(filter(None, run.job.gather(where)), ""):
        cause = f"{named} made the first value that is not finite"
    return NotFinite(
        f"{what} not finite: in step {first_bad} {cause}; the last good checkpoint, of step "
        f"{good.progress.step}, is in {run.folder.checkpoint_path}. {advice}"
    )


def _find_bad_number(batch: Batch, number: int) -> str:
    """The first number of a batch that is not finite, in words; empty if there is none."""
    parts = (("inputs", (batch.args, batch.kwargs)), ("targets", batch.targets))
    for name, part in parts:
        found = [(path, tensor) for path, tensor in tensors_in(part) if not are_finite([tensor])]
        if not found:
            continue
        path, tensor = found[0]
        example, *index = (~tensor.isfinite()).nonzero()[0].tolist()
        value = float(tensor[(example, *index)])
        column = f", column {','.join(map(str, index))}" if index else ""
        # The first of several, or one with a name, is told by its path.
        which = f" {path}" if len(list(tensors_in(part))) > 1 else ""
        return f"{name}{which} of batch {number + 1}, example {example}{column} ({value})"
    return ""


def _find_first_bad_step(run: Any, good: Checkpoint, bad_step: int) -> int:
    """The first step that went wrong: weights may turn bad a step before the loss shows it."""
    run.restore(good)
    for group in _groups(run):
        loss = run.run_batches(group)
        run.step.settle()
        if not math.isfinite(loss) or not has_finite_weights(run.workload.model):
            return run.progress.step
    return bad_step


def _groups(run: Any) -> Iterator[list[Batch]]:
    """The batches of each update, from the run's progress to the end of the epoch."""
    batches = run.batches(run.progress.epoch, run.progress.batch)
    while group := list(itertools.islice(batches, run.config.accumulate)):
        yield group


def find_first_bad(walk: Iterable[tuple[Node, list[Any]]]) -> Node | None:
    """The first operation that makes an infinity or a NaN from finite numbers, else the first that makes a NaN.

    An infinity that the model itself writes, as in a mask, is intended.
    """
    not_finite: set[Value] = set()
    not_numbers: set[Value] = set()
    first_nan = None
    for node, outputs in walk:
        pairs = list(zip(node.named_outputs, outputs, strict=True))
        if any(has_nan(item) for _, item in pairs) and not_numbers.isdisjoint(node.inputs):
            first_nan = first_nan or node
        if not are_finite(outputs) and not_finite.isdisjoint(node.inputs) and not _writes_infinity(node):
            return node
        not_finite.update(value for value, item in pairs if not are_finite([item]))
        not_numbers.update(value for value, item in pairs if has_nan(item))
    return first_nan


def _writes_infinity(node: Node) -> bool:
    return any(isinstance(item, float) and math.isinf(item) for item in (*node.args, *node.kwargs.values()))


def has_nan(value: Any) -> bool:
    """Whether it is a tensor with a NaN in it."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


def check_first_weights(model: torch.nn.Module) -> None:
    """Raise NotFinite if a parameter is not finite before the first update."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not are_finite([parameter.detach()]):
            raise NotFinite(f"parameter {name} holds numbers that are not finite before the first step")


def has_finite_weights(model: torch.nn.Module) -> bool:
    """Whether every trained parameter is finite; buffers may be masks of infinities."""
    return are_finite(parameter.detach() for parameter in model.parameters() if parameter.requires_grad)


def are_finite(values: Iterable[Any]) -> bool:
    """Whether every number in every tensor is finite."""
    return all(
        bool(value.isfinite().all())
        for value in values
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    )
