"""The state of a divided optimizer in pieces: what a rank keeps, and the whole from the pieces of all ranks.

A piece is some elements of one parameter, as they lie in memory, with the entries of the optimizer's state for them. An
entry of elements is flat; the count of steps is of the whole parameter, so each of its pieces has it. Pieces of one
division can be given to ranks of another: `take_pieces` takes from them what a rank owns. A checkpoint that each rank
writes its pieces to loads on any number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.errors import CallError
from undertow.hashing import as_bytes
from undertow.ops.clipping import in_memory_order
from undertow.ops.own_parts import OwnParts
from undertow.ops.own_updates import COUNTS
from undertow.ranks.pieces import Piece

DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, eq=False)
class StatePiece:
    """Elements of a parameter with the optimizer's state of them: tensors of one dimension, or of none for a count."""

    piece: Piece
    entries: Mapping[str, torch.Tensor]


def own_pieces(optimizer: torch.optim.Optimizer, own: OwnParts) -> list[StatePiece]:
    """The pieces that this rank keeps; the tensors are the optimizer's own."""
    return [StatePiece(piece, optimizer.state.get(own.parameters[piece.name], {})) for piece in own.own]


def cut_whole_state(optimizer: torch.optim.Optimizer, own: OwnParts) -> None:
    """Leave of a state of whole parameters what belongs to this rank's pieces; what was cut before stays."""
    pieces = {piece.name: piece for piece in own.own}
    for name, parameter in own.parameters.items():
        state = optimizer.state.get(parameter)
        if state and name not in pieces:
            del optimizer.state[parameter]
        elif state:
            optimizer.state[parameter] = {
                key: _cut(item, parameter, pieces[name]) if key != COUNTS else item
                for key, item in state.items()
                if item is not None  # older checkpoints of SGD have such entries
            }


def _cut(item: torch.Tensor, parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    if item.shape == (piece.num_elements,):
        return item
    if item.shape != parameter.shape:
        raise CallError(
            f"the optimizer's state of {piece.name} has the shape {list(item.shape)}: neither that of the parameter "
            f"nor that of this rank's {piece.num_elements} elements of it"
        )
    laid_out = torch.empty_like(parameter, dtype=item.dtype).copy_(item)  # its elements lie as the parameter's
    return in_memory_order(laid_out)[piece.first : piece.end].clone()


def take_pieces(optimizer: torch.optim.Optimizer, own: OwnParts, given: Iterable[StatePiece]) -> None:
    """Make the state of this rank's pieces from pieces of any division; raises CallError where elements are missing."""
    wanted = {piece.name: piece for piece in own.own}
    found: dict[str, list[StatePiece]] = {name: [] for name in wanted}
    for item in given:
        if item.piece.name in found:
            found[item.piece.name].append(item)
    joined = {name: _join(wanted[name], items) for name, items in found.items()}  # before anything is changed
    for name, parameter in own.parameters.items():
        optimizer.state.pop(parameter, None)
        if joined.get(name):
            counts_there = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            optimizer.state[parameter] = {
                key: item.to(parameter.device) if key != COUNTS or counts_there else item
                for key, item in joined[name].items()
            }


def join_pieces(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], given: Iterable[StatePiece]
) -> dict[str, Any]:
    """The whole state from the pieces of all ranks, in the form of `optimizer.state_dict()`."""
    packed = optimizer.state_dict()
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    number_of = {id(parameter): number for parameter, number in zip(held, numbers, strict=True)}
    found: dict[str, list[StatePiece]] = {}
    for item in given:
        found.setdefault(item.piece.name, []).append(item)
    packed["state"] = {}
    for name, items in found.items():
        parameter = parameters[name]
        entries = _join(Piece(name, 0, parameter.numel()), items)
        if entries:
            packed["state"][number_of[id(parameter)]] = {
                key: item if key == COUNTS else _as_whole(item, parameter) for key, item in entries.items()
            }
    packed["state"] = dict(sorted(packed["state"].items()))
    return packed


def _as_whole(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Elements as they lie in memory, in the shape of the parameter."""
    whole = torch.empty_like(parameter, dtype=flat.dtype, requires_grad=False)
    in_memory_order(whole).copy_(flat)
    return whole


def _join(wanted: Piece, given: Sequence[StatePiece]) -> dict[str, torch.Tensor]:
    """The entries of a piece from those of pieces that cover it."""
    given = sorted((item for item in given if item.piece.num_elements), key=lambda item: item.piece.first)
    keys = {tuple(item.entries) for item in given}
    if len(keys) > 1:
        raise CallError(f"pieces of the optimizer's state of {wanted.name} have different entries: {sorted(keys)}")
    made: dict[str, torch.Tensor] = {}
    for key in next(iter(keys), ()):
        if key == COUNTS:
            made[key] = given[0].entries[key].clone()
            continue
        made[key] = torch.empty(wanted.num_elements, dtype=given[0].entries[key].dtype)
        at = wanted.first
        for piece, entries in ((item.piece, item.entries[key]) for item in given):
            if piece.first > at:
                break
            end = min(piece.end, wanted.end)
            if end > at:
                made[key][at - wanted.first : end - wanted.first].copy_(entries[at - piece.first : end - piece.first])
                at = end
        if at < wanted.end:
            raise CallError(f"the optimizer's state of {wanted.name} lacks the elements from {at} to {wanted.end - 1}")
    return made


def gather_pieces(own: OwnParts, given: Sequence[StatePiece]) -> list[StatePiece]:
    """The pieces of all ranks, on every rank. All ranks call it."""
    unknown = sorted({str(item.dtype) for piece in given for item in piece.entries.values()} - DTYPES.keys())
    if unknown:
        raise CallError(f"the optimizer's state has entries of {', '.join(unknown)}, which are not sent")
    described = [[*piece.piece, [[key, str(item.dtype)] for key, item in piece.entries.items()]] for piece in given]
    rows = [as_bytes(item) for piece in given for item in piece.entries.values()]
    content = torch.cat([torch.empty(0, dtype=torch.uint8), *rows])
    read = [_read_head(own, rank, text) for rank, text in enumerate(own.ranks.gather_texts(json.dumps(described)))]
    received = [torch.empty(sum(map(_num_bytes, items)), dtype=torch.uint8) for items in read]
    own.ranks.gather(content, received)
    return [item for items, data in zip(read, received, strict=True) for item in _unpack(items, data)]


@dataclass(frozen=True)
class _Head:
    """What a rank says of one of its pieces."""

    piece: Piece
    entries: tuple[tuple[str, torch.dtype], ...]

    def sizes(self) -> list[int]:
        """The bytes of each entry."""
        return [dtype.itemsize * (1 if key == COUNTS else self.piece.num_elements) for key, dtype in self.entries]


def _num_bytes(head: _Head) -> int:
    return sum(head.sizes())


def _read_head(own: OwnParts, rank: int, text: str) -> list[_Head]:
    """What a rank sent about its pieces, which have to be those that it owns; raises CallError."""
    try:
        heads = [
            _Head(Piece(name, first, end), tuple((str(key), DTYPES[dtype]) for key, dtype in entries))
            for name, first, end, entries in json.loads(text)
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise CallError(f"what rank {rank} sent is no state of an optimizer ({error})") from None
    if [head.piece for head in heads] != own.of_rank(rank):
        raise CallError(f"rank {rank} sent a state of other elements than it owns")
    return heads


def _unpack(heads: Sequence[_Head], data: torch.Tensor) -> list[StatePiece]:
    found, first = [], 0
    for head in heads:
        entries: dict[str, torch.Tensor] = {}
        for (key, dtype), size in zip(head.entries, head.sizes(), strict=True):
            item = data[first : first + size].clone().view(dtype)
            entries[key] = item.view(()) if key == COUNTS else item
            first += size
        found.append(StatePiece(head.piece, entries))
    return found
