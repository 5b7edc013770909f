"""What a `.utz` file holds, as the table of the literature: in the terminal, as plain data, and for the page.

In: an open file. Out: a Report. P is pruning, Q sharing, H coding. The literature's rates leave out codebooks' gaps and
what is not a weight; the honest ratio is the float32 bytes of all parameters and buffers over the bytes of the file.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from undertow.coding.small_file import SmallFile
from undertow.coding.table import Row, make_table
from undertow.report.columns import align, wrap
from undertow.shrink.compressed import FLOAT_BYTES, float_bytes

HEADS = ("tensor", "weights", "kept", "P+Q", "P+Q+H", "index", "coded", "rate PQ", "rate PQH")


@dataclass(frozen=True)
class Report:
    """A file and its rows. Bits are those of a kept weight; rates are shares of float32 bytes."""

    title: str
    file: SmallFile
    rows: tuple[Row, ...]

    @property
    def float_bytes(self) -> int:
        """The float32 bytes of everything."""
        return float_bytes(self.file)

    @property
    def ratio(self) -> float:
        """How many times smaller the file is."""
        return self.float_bytes / self.file.num_bytes

    @property
    def header_bytes(self) -> int:
        """Bytes of the file that belong to no tensor: names, shapes, metadata, sums."""
        return self.file.num_bytes - sum(row.file_bytes for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "file": self.title,
            "bytes": self.file.num_bytes,
            "header_bytes": self.header_bytes,
            "float32_bytes": self.float_bytes,
            "ratio": self.ratio,
            "total": self.total(),
            "tensors": [asdict(row) | {"rate_pq": rate_pq(row), "rate_pqh": rate_pqh(row)} for row in self.rows],
        }

    def total(self) -> dict[str, Any]:
        """All coded tensors together, as the literature adds them up."""
        coded = [row for row in self.rows if row.shared_bytes is not None]
        num_kept = sum(row.num_kept for row in coded)
        num_weights = sum(row.num_weights for row in self.rows if row.alias_of is None)
        stored = [row for row in self.rows if row.alias_of is None]
        shared = sum(row.tensor_bytes if row.shared_bytes is None else row.shared_bytes for row in stored)
        return {
            "num_weights": num_weights,
            "num_kept": sum(row.num_kept for row in stored),
            "code_bits": _mean(coded, num_kept, "code_bits"),
            "coded_code_bits": _mean(coded, num_kept, "coded_code_bits"),
            "gap_bits": _mean(coded, num_kept, "gap_bits"),
            "coded_gap_bits": _mean(coded, num_kept, "coded_gap_bits"),
            "rate_pq": shared / (FLOAT_BYTES * num_weights) if num_weights else None,
            "rate_pqh": self.file.num_bytes / (FLOAT_BYTES * num_weights) if num_weights else None,
        }

    def cells(self) -> list[tuple[str, ...]]:
        """The rows of the table as text; the last is the total."""
        found = [
            _cells(
                row.name,
                row.num_weights,
                row.num_kept,
                (row.code_bits, row.coded_code_bits, row.gap_bits, row.coded_gap_bits),
                rate_pq(row),
                rate_pqh(row),
            )
            if row.alias_of is None
            else (row.name, f"as {row.alias_of}", *("-",) * 7)
            for row in self.rows
        ]
        total = self.total()
        bits = tuple(total[name] for name in ("code_bits", "coded_code_bits", "gap_bits", "coded_gap_bits"))
        last = _cells("total", total["num_weights"], total["num_kept"], bits, total["rate_pq"], total["rate_pqh"])
        return [*found, last]

    def __str__(self) -> str:
        table = align([HEADS, *self.cells()], "<" + ">" * (len(HEADS) - 1))
        legend = (
            "bits per kept weight: P+Q before coding, P+Q+H after; index: of its place, before and after coding; "
            "rates: share of float32 bytes. P pruning, Q sharing, H coding"
        )
        verdict = (
            f"{self.title}: {self.file.num_bytes:,} bytes, {self.header_bytes:,} of them names, shapes and sums; "
            f"{self.ratio:.1f} times less than the {self.float_bytes:,} bytes of all parameters and buffers in float32"
        )
        return "\n".join([table, wrap(legend), wrap(verdict)])


def make_report(title: str, file: SmallFile) -> Report:
    """Decodes every coded tensor once."""
    return Report(title, file, tuple(make_table(file)))


def rate_pq(row: Row) -> float | None:
    """The share of float32 bytes that pruning and sharing leave."""
    return None if row.shared_bytes is None else row.shared_bytes / (FLOAT_BYTES * row.num_weights)


def rate_pqh(row: Row) -> float | None:
    """The share of float32 bytes in the file."""
    return row.file_bytes / (FLOAT_BYTES * row.num_weights) if row.num_weights and row.alias_of is None else None


def _mean(rows: list[Row], num_kept: int, name: str) -> float | None:
    return sum(getattr(row, name) * row.num_kept for row in rows) / num_kept if num_kept else None


def _cells(
    name: str,
    num_weights: int,
    num_kept: int,
    bits: tuple[float | None, ...],
    shared: float | None,
    coded: float | None,
) -> tuple[str, ...]:
    kept = f"{num_kept / num_weights:.1%}" if num_weights else "-"
    shown = tuple("-" if item is None else f"{item:.3g}" for item in bits)
    rates = tuple("-" if item is None else f"{item:.2%}" for item in (shared, coded))
    return (name, f"{num_weights:,}", kept, *shown, *rates)
