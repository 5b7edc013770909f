"""What a step holds from its start to its end, in bytes, by what it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from undertow.costs.optimizer_state import count_optimizer_state
from undertow.ir import InputKind, Program
from undertow.memory.replays import find_replayed_updates
from undertow.ops.interpret import generator_of, state_type_of
from undertow.runtime.cuda_graphs import workspace_bytes

# Of what is held throughout, this is there before the step starts.
THERE_BEFORE = ("parameters", "buffers", "batch", "other shards of the batch", "constants")


def held_bytes(
    model: torch.nn.Module,
    program: Program,
    optimizer: torch.optim.Optimizer | None = None,
    in_shards: bool = False,
) -> dict[str, int]:
    """Bytes by what they are; each storage counts once. `in_shards`: the Program is of one shard of a batch."""
    held = {
        "parameters": _storage_bytes(model.parameters()),
        "buffers": _storage_bytes(model.buffers()),
        "batch": _input_bytes(program, InputKind.ARGUMENT),
        "constants": _input_bytes(program, InputKind.CONSTANT, InputKind.ATTRIBUTE),
        "prepared weights": _input_bytes(program, InputKind.PREPARED),
    }
    if program.cotangents:
        held["earlier buffers"] = sum(value.type.allocated_bytes for value in find_replayed_updates(program))
    # Saved with every forward pass, so that it can run again: for a second backward pass, or after a guard.
    is_saved = bool(program.cotangents) or any(node.operation.is_guard for node in program.first_pass)
    # A shard has a generator of its own, and the user's is put back after it.
    if num_copies := int(is_saved) + int(in_shards):
        drawing = {generator_of(node): node for node in program.first_pass if node.operation.is_random}
        held["generator states"] = num_copies * sum(state_type_of(node).num_bytes for node in drawing.values())
    if optimizer is not None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        held["optimizer state"] = count_optimizer_state(optimizer, trained).num_bytes or 0
    device = next((item.value.tensor_type.device for item in program.inputs), torch.device("cpu"))
    if device.type == "cuda":  # for the stream of captures too; autograd runs a backward pass in a thread of its own
        held["cuBLAS workspaces"] = workspace_bytes(device) * (3 if program.cotangents else 2)
    return {name: size for name, size in held.items() if size}


def _input_bytes(program: Program, *kinds: InputKind) -> int:
    given = (*program.inputs, *program.unread)
    return sum(item.value.type.allocated_bytes for item in given if item.kind in kinds)


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What storages take; on CUDA the allocator's blocks, which may be up to a MiB larger."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    blocks: dict[int, int] = {}
    if any(storage.device.type == "cuda" for storage in storages.values()):
        segments = torch.cuda.memory_snapshot()
        blocks = {block["address"]: block["size"] for segment in segments for block in segment["blocks"]}
    return sum(blocks.get(address, storage.nbytes()) for address, storage in storages.items())
