"""The mesh: how the ranks of a job are arranged.

`Mesh(data=4)` are four ranks that divide the shards of a batch. `Mesh(data=2, stages=3)` are six: the shards are
divided over two rows of three ranks, and each rank of a row has a part of the layers. A row's ranks follow each other.
`Mesh(hogwild=4)` are four workers of one machine that share parameters and update them without waiting for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from undertow.errors import CallError


@dataclass(frozen=True)
class Mesh:
    """The number of ranks along each axis."""

    data: int = 1  # ranks that divide the shards of a batch
    stages: int = 1  # ranks that divide the layers of the model
    hogwild: int = 1  # workers that update the same memory

    def __post_init__(self) -> None:
        """Refuse what is no number of ranks."""
        for item in fields(self):
            number = getattr(self, item.name)
            if type(number) is not int or number < 1:
                raise CallError(f"a mesh has a whole number of ranks along each axis, got {item.name}={number!r}")
        if self.data * self.stages > 1 and self.hogwild > 1:
            raise CallError(f"hogwild={self.hogwild} does not compute in step, as data and stages do: give one of them")

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.data * self.stages * self.hogwild

    def with_ranks(self, num_ranks: int) -> Mesh:
        """A mesh of the same kind with so many ranks."""
        if self.hogwild > 1:
            return Mesh(hogwild=num_ranks)
        whole_rows, rest = divmod(num_ranks, self.stages)
        return Mesh(data=num_ranks) if rest else Mesh(data=whole_rows, stages=self.stages)

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the other layers for the same shards, in the order of the stages."""
        first = rank // self.stages * self.stages
        return tuple(range(first, first + self.stages))

    def column_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same layers for other shards, in the order of the shards."""
        return tuple(range(rank % self.stages, self.num_ranks, self.stages))

    def __str__(self) -> str:
        sizes = {item.name: getattr(self, item.name) for item in fields(self)}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"


def parse_mesh(text: str, where: str) -> Mesh:
    """The mesh that `data=4` says; raises CallError."""
    names = [item.name for item in fields(Mesh)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in names or name in sizes or not number.isdecimal():
            raise CallError(
                f"{where}: parallel is written as {' or '.join(f'{name}=4' for name in names)}, or as data=2,stages=2; "
                f"got {text!r}"
            )
        sizes[name] = int(number)
    return Mesh(**sizes)
