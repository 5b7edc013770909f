"""A compressed network: its bytes, its table, and the model with the same weights, which can be trained on.

In: the bytes of a `.utz` file, and a model of the same names and shapes. Out: a Compressed. What is trained are the
shared values; masks and codes stay, and the file does not grow. The file is the truth: the model's weights are those
that it decodes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from undertow.coding.entries import Kind
from undertow.coding.payloads import Coder, encode_tensor
from undertow.coding.small_file import DEFAULT_MAX_OUTPUT_BYTES, SmallFile, open_small_file
from undertow.coding.table import Row, make_table
from undertow.coding.tensors import CodedTensor
from undertow.durable import write_durably
from undertow.errors import CallError
from undertow.shrink.network import SharedNetwork, write_back
from undertow.shrink.retraining import Trainer
from undertow.shrink.search import pack_model
from undertow.shrink.settings import OPTIMIZERS, Settings
from undertow.shrink.sharing import CODEBOOK_BITS
from undertow.train.checkpoint import check_weights, load_weights
from undertow.train.feeding import Feed
from undertow.train.objective import Objective

FLOAT_BYTES = 4


@dataclass(eq=False)
class Compressed:
    """`history` has a record for each round of the search; scores are in percent of accuracy, or minus the loss."""

    model: nn.Module
    file: SmallFile
    data: bytes
    is_accuracy_kept: bool = True
    history: list[dict[str, Any]] = field(default_factory=list)
    accuracy: dict[str, float | None] = field(default_factory=dict)  # by what was evaluated, on which data

    @staticmethod
    def of(data: bytes, model: nn.Module, where: str, **about: Any) -> Compressed:
        """From the bytes of a file; the model gets its weights."""
        file = SmallFile(data, where)
        load_file(file, model)
        return Compressed(model, file, data, **about)

    @staticmethod
    def open(path: str | Path, model: nn.Module) -> Compressed:
        """From a file; the model gets its weights, and can be trained on with `train`."""
        file = open_small_file(Path(path))
        load_file(file, model)
        return Compressed(model, file, file.data)

    @property
    def num_bytes(self) -> int:
        """The bytes of the file."""
        return len(self.data)

    @property
    def ratio(self) -> float:
        """The float32 bytes of all parameters and buffers over the bytes of the file."""
        return float_bytes(self.file) / len(self.data)

    def save(self, path: str | Path) -> int:
        """Write the file; returns its bytes."""
        write_durably(Path(path), lambda file: file.write(self.data))
        return len(self.data)

    def table(self) -> list[Row]:
        """The table of the literature: a row per tensor."""
        return make_table(self.file)

    def train(
        self,
        train: Iterable[Any],
        *,
        epochs: int = 1,
        loss: Callable[..., torch.Tensor] | str | None = None,
        lr: float = 1e-3,
        optimizer: str = "adam",
        seed: int = 0,
        numerics: str = "exact",
        budget: int | str | None = None,
    ) -> Compressed:
        """Train the shared values; the file keeps its size or gets smaller. Returns itself, its model in `eval()`."""
        coded = {
            name: item
            for name in dict(self.model.named_parameters())
            if isinstance(item := self.file.read(name), CodedTensor)
        }
        if not any(tensor.num_kept for tensor in coded.values()):
            raise CallError(f"{self.file.where} has no shared values, so there is nothing to train")
        settings = Settings(epochs=epochs, lr=lr, optimizer=optimizer, seed=seed, numerics=numerics, budget=budget)
        device = next(self.model.parameters()).device
        network = SharedNetwork(self.model, coded).to(device)
        trainer = Trainer(
            make_objective(loss),
            Feed(train, seed),
            device,
            None,
            optimizer=OPTIMIZERS[settings.optimizer],
            numerics=numerics,
            budget=budget,
        )
        flags = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        try:
            for parameter, _ in flags:
                parameter.requires_grad_(False)
            trainer.train(network, list(network.codebooks), first_epoch=0, num_epochs=epochs, lr=lr)
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            self.model.eval()
        write_back(self.model, coded)  # so that what is not coded is packed as it is in the file
        self.data = self._pack_no_larger(coded, network)
        self.file = SmallFile(self.data, self.file.where)
        load_file(self.file, self.model)
        return self

    def _pack_no_larger(self, before: dict[str, CodedTensor], network: SharedNetwork) -> bytes:
        """The bytes with the trained values: rounded as ever, or a bit coarser; else some codebooks stay untrained.

        Which bytes a codebook takes depends on its values. Those that grew most are left as they were, until it fits.
        """
        coder: Coder = "huffman" if any(item.kind is Kind.HUFFMAN for item in self.file.entries.values()) else "mixed"

        def pack(coded: dict[str, CodedTensor]) -> bytes:
            return pack_model(self.model, coded, self.file.metadata, coder)

        for num_bits in (CODEBOOK_BITS, CODEBOOK_BITS - 1):
            if len(data := pack(network.coded(num_bits))) <= len(self.data):
                return data
        coded = network.coded()
        growth = {
            name: len(encode_tensor(name, coded[name], coder)[1]) - len(encode_tensor(name, item, coder)[1])
            for name, item in before.items()
        }
        for name in sorted(growth, key=lambda name: -growth[name]):
            coded[name] = before[name]
            if len(data := pack(coded)) <= len(self.data):
                return data
        return self.data

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "bytes": self.num_bytes,
            "float32_bytes": float_bytes(self.file),
            "ratio": self.ratio,
            "is_accuracy_kept": self.is_accuracy_kept,
            "accuracy": self.accuracy,
            "history": self.history,
        }

    def __str__(self) -> str:
        return f"{self.num_bytes:,} bytes, {self.ratio:.1f} times less than {float_bytes(self.file):,} in float32"


def make_objective(loss: Callable[..., torch.Tensor] | str | None) -> Objective:
    """The loss that a caller gave: a name of torch.nn.functional, a function, or None: batches decide."""
    return Objective(function=loss) if callable(loss) else Objective(loss)


def float_bytes(file: SmallFile) -> int:
    """The float32 bytes of everything in a file; what it holds once counts once."""
    return sum(FLOAT_BYTES * entry.num_weights for entry in file.entries.values() if entry.alias_of is None)


def load_compressed(path: str | Path, model: nn.Module, max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES) -> nn.Module:
    """The model with the weights of a `.utz` file; raises DataError where names, shapes or types differ."""
    load_file(open_small_file(Path(path), max_output_bytes), model)
    return model


def load_file(file: SmallFile, model: nn.Module) -> None:
    """Give the model the weights of an open file."""
    claimed = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in file.entries.items()}
    check_weights(model, claimed, file.where)  # before anything is decoded
    load_weights(model, {name: _dense(item) for name, item in file.read_all().items()}, file.where)


def _dense(tensor: torch.Tensor | CodedTensor) -> torch.Tensor:
    return tensor.dense() if isinstance(tensor, CodedTensor) else tensor
