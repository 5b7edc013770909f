"""Operations that write into given memory: they write the same bits, and allocate no outputs."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import numpy
import pytest
import torch
from operation_samples import OPS, PRECISIONS, map_tensors, rebuild, samples
from torch.utils._python_dispatch import TorchDispatchMode

from undertow.ir.operation import Destination, Operation
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import flatten_outputs, inplace_of
from undertow.ops.own import functional

EMPTY = torch.ops.aten.empty_like.default  # its output has no defined content


def destinations() -> list[Any]:
    """Every operation of the registry that can write into given memory, and its in-place form made functional."""
    found = {}
    for op in OPS:
        in_place = inplace_of(op.target)
        made_functional = [] if in_place is None else [functional(operation_of(in_place))]
        for operation in (operation_of(op.target), *made_functional):
            destination = operation.destination
            if destination is not None and operation.key is not EMPTY:
                found[operation.name] = pytest.param(op, operation, destination, id=operation.name)
    return list(found.values())


def call_into(destination: Destination, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> Any:
    names = destination.names
    given = {"out": tuple(outputs)} if names is None else dict(zip(names, outputs, strict=True))
    return destination.call(*args, **kwargs, **given)


def used_memory(like: torch.Tensor) -> torch.Tensor:
    """Memory as in an arena: with old content, and of a fixed size."""
    if not like.numel():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    memory = torch.from_numpy(numpy.full(like.untyped_storage().nbytes(), 0x77, numpy.uint8))
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def run_both(operation: Operation, destination: Destination, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """The outputs that the operation allocates, and those that it writes into given memory."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = flatten_outputs(operation(*args, **kwargs))
        outputs = [used_memory(item) for item in expected]
        torch.manual_seed(0)
        call_into(destination, args, kwargs, outputs)
    return expected, outputs


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("op", "operation", "destination"), destinations())
def test_the_same_bits(op, operation, destination, precision):
    dtypes = PRECISIONS[precision]
    num_run = 0
    for case in samples(op):
        args = map_tensors(case.args, lambda tensor: rebuild(tensor, dtypes))
        kwargs = {name: map_tensors(item, lambda tensor: rebuild(tensor, dtypes)) for name, item in case.kwargs.items()}
        kwargs = {
            name: dtypes.get(item, item) if isinstance(item, torch.dtype) else item for name, item in kwargs.items()
        }
        try:
            operation(*copy.deepcopy(args), **kwargs)
        except (RuntimeError, NotImplementedError):
            continue  # no kernel for this precision
        expected, found = run_both(operation, destination, args, kwargs)
        num_run += 1
        for left, right in zip(expected, found, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape
            assert bits(left) == bits(right)
    if not num_run:
        pytest.skip("no kernel for this precision")


class CompareAll(TorchDispatchMode):
    """Runs each operation that can write into given memory a second time that way, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        destination = operation_of(func).destination
        expected = [] if destination is None else flatten_outputs(result)
        is_undefined = torch.Tag.nondeterministic_seeded in func.tags or func is EMPTY
        if expected and not is_undefined and all(item is not None and not item.is_complex() for item in expected):
            outputs = list(map(used_memory, expected))
            try:
                call_into(destination, args, kwargs or {}, outputs)
            except RuntimeError as error:
                raise AssertionError(f"{func} cannot write into given memory") from error
            assert list(map(bits, outputs)) == list(map(bits, expected)), func
            self.compared.add(func._schema.name.removeprefix("aten::"))
        return result


def test_what_autograd_calls():
    mode = CompareAll()
    for op in (op for op in OPS if op.vjps):
        for case in samples(op):
            leaves: list[torch.Tensor] = []

            def as_leaf(tensor: torch.Tensor, leaves: list[torch.Tensor] = leaves) -> torch.Tensor:
                tensor = rebuild(tensor.detach(), PRECISIONS["float32"])
                if tensor.is_floating_point():
                    leaves.append(tensor.requires_grad_())
                return tensor

            args = map_tensors(case.args, as_leaf)
            try:
                outputs = [item for item in flatten_outputs(op.target(*args, **case.kwargs)) if item is not None]
            except RuntimeError:
                continue  # no kernel for this precision
            carriers = [item for item in outputs if item.requires_grad and item.is_floating_point()]
            if carriers and leaves:
                # A few operations have no derivative in autograd itself.
                with mode, suppress(RuntimeError):
                    torch.autograd.grad(carriers, leaves, list(map(torch.ones_like, carriers)), allow_unused=True)
    wanted = {"threshold_backward", "gelu_backward", "_softmax_backward_data", "max_pool2d_with_indices_backward"}
    assert wanted <= mode.compared and len(mode.compared) > 40, mode.compared
