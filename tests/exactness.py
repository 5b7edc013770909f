"""Comparing training steps bit for bit: loss, gradients, buffers, generator state, as eager PyTorch has them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import undertow as ut


def run_steps(model: Any, args: Any, kwargs: Any, loss_of: Any, num_steps: int, autocast: Any) -> list[dict[str, Any]]:
    """Train with SGD; everything observable after each step."""
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) if any(True for _ in model.parameters()) else None
    )
    torch.manual_seed(5)
    records = []
    for _ in range(num_steps):
        model.zero_grad()
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            loss = loss_of(model(*args, **kwargs))
        loss.backward()
        record: dict[str, Any] = {"loss": loss.detach().clone(), "generator": torch.get_rng_state()}
        for name, parameter in model.named_parameters():
            record[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.clone()
        record |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
        records.append(record)
        if optimizer is not None:
            optimizer.step()
    return records


@contextmanager
def skipping_what_eager_cannot() -> Iterator[None]:
    """Skip where oneDNN has no kernel for this processor, as for an LSTM in bfloat16 without AVX-512."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive descriptor" not in str(error):
            raise
        pytest.skip(f"eager has no kernel on this processor: {error}")


def differences(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """What differs, with the step it first differs at."""
    for number, (left, right) in enumerate(zip(expected, found, strict=True)):
        assert left.keys() == right.keys()
        wrong = [f"step {number}: {name}" for name in left if not same_bits(left[name], right[name])]
        if wrong:
            return wrong
    return []


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Equal bits; NaN equals NaN, and -0.0 differs from 0.0."""
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    left, right = left.detach().contiguous(), right.detach().contiguous()
    nan = left.isnan() if left.is_floating_point() else torch.zeros_like(left, dtype=torch.bool)
    if left.is_floating_point() and not torch.equal(nan, right.isnan()):
        return False
    return torch.equal(left[~nan].view(-1).view(torch.uint8), right[~nan].view(-1).view(torch.uint8))


def assert_same_steps(
    model: torch.nn.Module, args: Any, kwargs: Any, loss_of: Any, *, num_steps: int = 3, autocast: Any = None
) -> Any:
    """Train a copy eagerly and a planned copy; assert equal bits throughout. Returns the planned module."""
    eager, copied = copy.deepcopy(model), copy.deepcopy(model)
    with torch.autocast("cpu", autocast) if autocast else nullcontext():
        planned = ut.plan(copied, args, kwargs)
    with skipping_what_eager_cannot():
        expected = run_steps(eager, args, kwargs, loss_of, num_steps, autocast)
    found = run_steps(planned, args, kwargs, loss_of, num_steps, autocast)
    assert differences(expected, found) == []
    return planned
