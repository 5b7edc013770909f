"""The optimizer's state over the stages: each rank keeps that of the parameters that it updates.

In: an optimizer, and who updates which parameter. Out: the whole state, on all ranks of a row. Sizes that another rank
tells are compared with what is taken before memory is allocated.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from undertow.api.stage_tensors import StageTensors
from undertow.api.stage_updates import RESULT_TAGS, pass_round
from undertow.errors import CallError

STATE_TAG = RESULT_TAGS + (1 << 10)
MAX_HEADER_BYTES = 1 << 26
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)}


def drop_foreign_state(optimizer: torch.optim.Optimizer, tensors: StageTensors) -> None:
    """Drop the state of parameters that other ranks update: it is theirs from now on."""
    for name, parameter in tensors.model.named_parameters():
        if not tensors.is_own(name) and parameter in optimizer.state:
            del optimizer.state[parameter]


def gather_state(optimizer: torch.optim.Optimizer, tensors: StageTensors) -> None:
    """The whole state comes to this rank; all ranks of the row call this."""
    parameters = dict(tensors.model.named_parameters())
    for place in range(len(tensors.row)):
        own = {name: item for name, item in parameters.items() if tensors.readers.get(name, (-1,))[0] == place}
        for name, entries in _exchange(optimizer, tensors, place, own).items():
            optimizer.state[parameters[name]] = entries
    # In the same order on all ranks, since checkpoints are divided by it.
    found: dict[torch.Tensor, Any] = {
        item: optimizer.state[item] for item in parameters.values() if item in optimizer.state
    }
    optimizer.state.clear()
    optimizer.state.update(found)


def _exchange(
    optimizer: torch.optim.Optimizer, tensors: StageTensors, place: int, own: dict[str, torch.nn.Parameter]
) -> dict[str, dict[str, Any]]:
    """The entries of one rank's parameters, on all ranks."""
    is_own = place == tensors.place
    header: dict[str, dict[str, Any]] = {}
    if is_own:
        for name, parameter in own.items():
            if parameter in optimizer.state:
                header[name] = {key: _describe(item) for key, item in optimizer.state[parameter].items()}
    text = json.dumps(header).encode()
    size = torch.tensor([len(text)])
    pass_round(tensors.ranks, tensors.row, place, size, STATE_TAG)
    if not 0 <= int(size) <= MAX_HEADER_BYTES:
        raise CallError(f"rank {tensors.row[place]} wants to send {int(size)} bytes about the optimizer's state")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if is_own else torch.empty(int(size), dtype=torch.uint8)
    pass_round(tensors.ranks, tensors.row, place, data, STATE_TAG + 1)
    header = json.loads(data.numpy().tobytes())
    found: dict[str, dict[str, Any]] = {}
    for name, entries in header.items():
        if name not in own:
            raise CallError(
                f"rank {tensors.row[place]} sends the optimizer's state of {name}, which it does not update"
            )
        found[name] = {}
        for key, described in entries.items():
            if isinstance(described, list):
                dtype, shape = DTYPES[described[0]], tuple(map(int, described[1]))
                if torch.Size(shape).numel() > max(own[name].numel(), 1):
                    raise CallError(f"the optimizer's state of {name} is larger than the parameter")
                known = optimizer.state[own[name]][key] if is_own else None
                item = known if known is not None else torch.empty(shape, dtype=dtype)
                if not is_own and shape == tuple(own[name].shape):
                    item = torch.empty_strided(shape, tensors.kinds[name].strides, dtype=dtype)
                pass_round(tensors.ranks, tensors.row, place, item, STATE_TAG + 2)
                found[name][key] = item
            else:
                found[name][key] = optimizer.state[own[name]][key] if is_own else described
    return found


def _describe(item: Any) -> Any:
    return [str(item.dtype), list(item.shape)] if isinstance(item, torch.Tensor) else item
