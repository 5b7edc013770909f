"""`left_untouched`: what is run to answer a question leaves no trace.

In: a model, and the training of its step if there is one. Inside the block gradients are absent; afterwards parameters,
buffers, gradients, the optimizer's state and settings, and the generators of random numbers are as they were, bit for
bit. The tensors stay the same objects, so that whoever holds them sees nothing either.

The copies lie in the memory of the CPU: on a GPU they would count as memory that the step needs. They take as much as
the parameters, buffers and the optimizer's state together. Not put back: Python attributes that the model's forward
pass assigns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch

from undertow.api.stage_tensors import is_set_aside
from undertow.ops.updates import LATER_STEP
from undertow.passes.training import Training


@contextmanager
def left_untouched(model: torch.nn.Module, training: Training | None = None) -> Iterator[None]:
    """Put everything of the user's back after the block."""
    optimizer = None if training is None else training.optimizer
    trained = () if training is None else training.trained()
    parameters = list(dict.fromkeys((*model.parameters(), *trained)))
    if training is not None and training.own is not None:
        training.own.settle()  # what is still on its way would be copied half
    with ExitStack() as undo:
        for parameter in parameters:
            undo.callback(_set_aside(parameter))
        for tensor in (*parameters, *dict.fromkeys(model.buffers())):
            undo.callback(_copy(tensor))
        if training is not None and optimizer is not None:
            undo.callback(_copy_optimizer(optimizer))
            later = training.live[LATER_STEP.name]
            undo.callback(setattr, later, "num_calls", later.num_calls)
        if training is not None and training.own is not None:
            own = training.own
            undo.callback(setattr, own, "sums", {bucket: total.clone() for bucket, total in own.sums.items()})
            undo.callback(own.settle)
        if training is not None and training.shards is not None:
            shards = training.shards.shards
            undo.callback(setattr, shards, "num_calls", shards.num_calls)
        held = (item for module in model.modules() for item in vars(module).values())
        undo.enter_context(generators_put_back([item for item in held if isinstance(item, torch.Generator)]))
        yield


@contextmanager
def generators_put_back(others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Put the states of PyTorch's, Python's and NumPy's own generators back after the block, and those of `others`."""
    is_on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    generators = [torch.default_generator, *(torch.cuda.default_generators if is_on_gpu else ()), *others]
    states = [(generator, generator.get_state()) for generator in generators]
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def _set_aside(parameter: torch.nn.Parameter) -> Callable[[], None]:
    """Take the gradient from its parameter. A function that gives it back."""
    gradient = parameter.grad
    parameter.grad = None
    if gradient is None or not gradient.is_cuda:
        return lambda: setattr(parameter, "grad", gradient)
    storage = gradient.untyped_storage()
    num_bytes, content = storage.nbytes(), storage.cpu()
    storage.resize_(0)  # it would count as memory of the step

    def give_back() -> None:
        storage.resize_(num_bytes)
        storage.copy_(content)
        parameter.grad = gradient

    return give_back


def _copy(tensor: torch.Tensor) -> Callable[[], Any]:
    """Copy a tensor. A function that writes the copy back, which autograd does not count as a change."""
    copied = tensor.detach().to("cpu", copy=True)

    def write_back() -> None:
        if not is_set_aside(tensor):
            tensor.data.copy_(copied)

    return write_back


def _copy_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Copy what an optimizer's step changes. A function that puts it back: what the step added is removed."""
    state = {parameter: _copy_entries(entries) for parameter, entries in optimizer.state.items()}
    groups = [_copy_entries(group) for group in optimizer.param_groups]
    was_called = vars(optimizer).get("_opt_called")  # learning-rate schedules ask for it

    def put_back() -> None:
        for parameter in list(optimizer.state):
            if parameter not in state:
                del optimizer.state[parameter]
        for parameter, restore in state.items():
            restore(optimizer.state[parameter])
        for group, restore in zip(optimizer.param_groups, groups, strict=True):
            restore(group)
        if was_called is None:
            vars(optimizer).pop("_opt_called", None)
        else:
            optimizer._opt_called = was_called  # type: ignore[attr-defined]

    return put_back


def _copy_entries(entries: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    before = dict(entries)
    undo = [_copy(item) for item in before.values() if isinstance(item, torch.Tensor)]

    def restore(now: dict[str, Any]) -> None:
        now.clear()
        now.update(before)
        for write in undo:
            write()

    return restore
