"""Parameters divided into parts of about the same bytes. A large parameter is divided inside.

In: the trained parameters of a model, in its order. Out: the pieces of each part. A piece is a range of the elements of
one parameter. The parts follow the model's order, so a backward pass completes the last part first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from undertow.errors import CallError


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements from `first` to before `end` of a parameter."""

    name: str
    first: int
    end: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class Part:
    """Some pieces, which have one version. They lie one after the other in what is sent."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """How many elements it has."""
        return sum(piece.size for piece in self.pieces)


def divide_parameters(parameters: Mapping[str, torch.nn.Parameter], num_parts: int) -> tuple[Part, ...]:
    """The parts, each with an equal share of the elements; raises CallError where that cannot be."""
    for name, parameter in parameters.items():
        if parameter.dtype is not torch.float32 or not parameter.is_contiguous():
            raise CallError(
                f"parameter {name} is {parameter.dtype}{'' if parameter.is_contiguous() else ' and not contiguous'}; "
                f"a parameter server holds contiguous parameters of float32"
            )
    total = sum(parameter.numel() for parameter in parameters.values())
    if total < num_parts:
        raise CallError(
            f"{num_parts} parts for {total} trained numbers: each part needs one; give fewer --servers, or a larger "
            f"model"
        )
    ends = [total * (index + 1) // num_parts for index in range(num_parts)]
    parts: list[list[Piece]] = [[] for _ in ends]
    place = part = 0
    for name, parameter in parameters.items():
        first = 0
        while first < parameter.numel():
            end = min(parameter.numel(), first + ends[part] - place)
            parts[part].append(Piece(name, first, end))
            place += end - first
            first = end
            part += place == ends[part]
    return tuple(Part(tuple(pieces)) for pieces in parts)


def cut(tensors: Mapping[str, torch.Tensor], part: Part) -> torch.Tensor:
    """The elements of a part, copied one after the other."""
    with torch.no_grad():
        return torch.cat([tensors[piece.name].reshape(-1)[piece.first : piece.end] for piece in part.pieces])


def paste(tensors: Mapping[str, torch.Tensor], part: Part, elements: torch.Tensor) -> None:
    """Write the elements of a part to where they belong; the tensors are contiguous."""
    with torch.no_grad():
        place = 0
        for piece in part.pieces:
            tensors[piece.name].view(-1)[piece.first : piece.end] = elements[place : place + piece.size]
            place += piece.size


def name_element(parts: Sequence[Part], part: int, place: int) -> str:
    """The parameter that an element of a part belongs to."""
    for piece in parts[part].pieces:
        if place < piece.size:
            return piece.name
        place -= piece.size
    raise IndexError(place)
