"""`list_zoo`: the models of the zoo with their sizes. They are made on PyTorch's meta device, which holds no data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from undertow.cli.loading import Subject
from undertow.ir import format_bytes
from undertow.models import ZOO, ZooModel
from undertow.report.columns import align


@dataclass(frozen=True)
class ListedModel:
    """A model of the zoo: its parameters, and an input of one example."""

    name: str
    num_parameters: int
    parameter_bytes: int
    example_input: str

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)


@dataclass(frozen=True)
class ZooList:
    """All models, as a table."""

    models: tuple[ListedModel, ...]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("model", "parameters", "size", "input")]
        rows += [
            (item.name, f"{item.num_parameters:,}", format_bytes(item.parameter_bytes), item.example_input)
            for item in self.models
        ]
        return align(rows, "<>><")


def list_zoo() -> ZooList:
    """Every model of the zoo at its published size."""
    return ZooList(tuple(map(_measure, ZOO.values())))


def _measure(entry: ZooModel) -> ListedModel:
    with torch.device("meta"):
        subject = Subject(entry.build(), entry.example_inputs(1), {})
    parameters = list(subject.model.parameters())
    return ListedModel(
        entry.name,
        sum(item.numel() for item in parameters),
        sum(item.numel() * item.element_size() for item in parameters),
        subject.describe_inputs(),
    )
