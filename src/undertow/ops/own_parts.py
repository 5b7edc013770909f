"""What a step knows of the parts that ranks own: which elements each rank updates, and what is on its way.

Each rank owns a part of every bucket of gradients. It gets the sum of that part alone, updates that part of the
parameters, keeps the optimizer's state of that part alone, and sends the updated elements to the others. An update that
treats every element by itself has the same bits for a part as for the whole.

Parameters may still be on their way when a call returns. Then the next call waits for each of them where it is first
read. Transfers write into the parameters themselves; only small pieces, which travel together, take a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from undertow.ops.clipping import BLOCK, in_memory_order
from undertow.ops.divided_parameters import DividedParameters
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.messages import Messages
from undertow.ranks.pieces import Piece, cut_pieces
from undertow.ranks.ranks import Ranks
from undertow.ranks.reduction import cut_bucket, is_packed, spread

PARAMETER_TAGS = 1 << 19  # of a bucket's parameters: so much more than the bucket's own tag


@dataclass(eq=False)
class OwnParts:
    """Which elements each rank updates, by bucket; and what is on its way.

    `sums` are gradients of own parts that are added up from call to call. With `is_late` parameters may be on their way
    when a call returns. Where a call only adds gradients up, it has no new parameters.
    """

    model: torch.nn.Module
    is_late: bool
    ranks: Ranks = field(init=False)  # joined when the step is made
    parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # in the model's order, each once
    pieces: dict[int, tuple[tuple[Piece, ...], ...]] = field(default_factory=dict)
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    has_new_parameters: bool = True
    divided: DividedParameters = field(default_factory=DividedParameters)
    divided_buckets: tuple[int, ...] = ()  # whose parameters are divided
    _bucket_of: dict[str, int] = field(default_factory=dict)
    _transfers: dict[int, Transfer] = field(default_factory=dict)

    def divide(self, bucket: int, names: Sequence[str], sizes: Sequence[int], cuts: Sequence[int]) -> None:
        """A bucket holds these parameters, and the parts of the ranks lie between these cuts."""
        self.parameters = dict(self.model.named_parameters())
        self.pieces[bucket] = cut_pieces(self.names_of(names), sizes, cuts)
        self._bucket_of.update(dict.fromkeys(names, bucket))

    def forget_buckets(self) -> None:
        """Other buckets will be found; until then nothing is divided."""
        self.pieces.clear()
        self._bucket_of.clear()
        self.divide_buckets(())

    def divide_all(self, buckets: Sequence[Sequence[str]]) -> None:
        """All buckets, by the names of their parameters."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for bucket, names in enumerate(buckets):
            sizes = [parameters[name].numel() for name in names]
            self.divide(bucket, names, sizes, cut_bucket(sizes, self.ranks.size, BLOCK))

    def names_of(self, names: Sequence[str]) -> list[str]:
        """The first name of each of these parameters; a parameter that is used in two places has two."""
        aliases = dict(self.model.named_parameters(remove_duplicate=False))
        known = {id(parameter): name for name, parameter in self.parameters.items()}
        return [known[id(aliases[name])] for name in names]

    def of_rank(self, rank: int) -> list[Piece]:
        """The pieces of a rank, bucket by bucket."""
        return [piece for bucket in sorted(self.pieces) for piece in self.pieces[bucket][rank]]

    def of_all(self) -> list[Piece]:
        """The pieces of all ranks, rank by rank."""
        return [piece for rank in range(self.ranks.size) for piece in self.of_rank(rank)]

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return next(iter(self.parameters.values())).device

    @property
    def own(self) -> list[Piece]:
        """This rank's pieces."""
        return self.of_rank(self.ranks.rank)

    def own_elements(self) -> dict[int, int]:
        """How many elements of each parameter this rank updates, by the parameter's id."""
        found = dict.fromkeys(map(id, self.parameters.values()), 0)
        found.update({id(self.parameters[piece.name]): piece.num_elements for piece in self.own})
        return found

    def divide_buckets(self, buckets: Sequence[int]) -> None:
        """From the next call on each rank keeps of these buckets its own elements alone, where that saves memory."""
        self.divided_buckets = tuple(sorted(buckets))
        self.divided.pieces = {
            name: pieces for bucket in self.divided_buckets for name, pieces in self.find_divisible(bucket).items()
        }

    def find_divisible(self, bucket: int) -> dict[str, tuple[Piece | None, ...]]:
        """The parameters of a bucket that can be divided, with the piece of each rank; the order is that of the names.

        Small ones stay whole: asking for them would take longer than sending them. So does what shares its memory.
        """
        of_ranks = [{piece.name: piece for piece in pieces} for pieces in self.pieces[bucket]]
        tensors = (*self.parameters.values(), *self.model.buffers())
        uses = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
        found = {}
        for name in sorted({name for pieces in of_ranks for name in pieces}):
            parameter = self.parameters[name]
            storage = parameter.untyped_storage()
            is_alone = uses[storage.data_ptr()] == 1 and storage.nbytes() == parameter.nbytes
            is_divisible = parameter.device.type == "cpu" and not is_packed(parameter.nbytes)
            if name in self.divided.own or (is_divisible and is_alone):
                found[name] = tuple(pieces.get(name) for pieces in of_ranks)
        return found

    def bucket_bytes(self, bucket: int) -> int:
        """What the parameters of a bucket take where they are whole."""
        return sum(map(self._bytes_of, (piece for pieces in self.pieces[bucket] for piece in pieces)))

    def sent_bytes(self, name: str) -> int:
        """What the rank sends that sends most while all gather a divided parameter."""
        return max(map(self._bytes_of, self.divided.pieces[name])) * (self.ranks.size - 1)

    def divisible_bytes(self, bucket: int) -> int:
        """What this rank need not keep if a bucket's parameters are divided."""
        pieces = {name: found[self.ranks.rank] for name, found in self.find_divisible(bucket).items()}
        return sum(self.parameters[name].nbytes - self._bytes_of(piece) for name, piece in pieces.items())

    def parameter_bytes(self) -> int:
        """What all parameters of the model take here: whole ones, and the own elements of those that are divided."""
        held: dict[int, int] = {}
        for name, parameter in self.model.named_parameters():
            if name in self.divided.pieces:
                held[id(parameter)] = self._bytes_of(self.divided.pieces[name][self.ranks.rank])
            elif name in self.divided.own:  # until the next call
                held[id(parameter)] = parameter.nbytes
            else:
                held[parameter.untyped_storage().data_ptr()] = parameter.untyped_storage().nbytes()
        return sum(held.values())

    def _bytes_of(self, piece: Piece | None) -> int:
        return 0 if piece is None else self.parameters[piece.name].element_size() * piece.num_elements

    def own_bytes(self) -> int:
        """What the elements that this rank updates take."""
        return sum(map(self._bytes_of, self.own))

    def packed_bytes(self) -> int:
        """The most that copies of small pieces take while parameters are on their way."""
        sizes = (self._bytes_of(piece) for piece in self.of_all() if piece.name not in self.divided.pieces)
        return sum(size for size in sizes if is_packed(size))

    def parts_of(self, sums: Mapping[int, torch.Tensor]) -> list[tuple[Piece, torch.Tensor]]:
        """This rank's pieces, each with its part of its bucket's sum."""
        found: list[tuple[Piece, torch.Tensor]] = []
        for bucket, total in sorted(sums.items(), key=lambda item: item[0]):
            pieces = self.pieces[bucket][self.ranks.rank]
            found += zip(pieces, total.split([piece.num_elements for piece in pieces]), strict=True) if pieces else ()
        return found

    def empty_norms(self) -> list[torch.Tensor]:
        """For each rank, memory for the norms of the blocks of its pieces."""
        dtype = reduce(torch.promote_types, (self.parameters[piece.name].dtype.to_real() for piece in self.of_all()))
        counts = [sum(map(count_blocks, self.of_rank(rank))) for rank in range(self.ranks.size)]
        return [torch.empty(count, dtype=dtype, device=self.device) for count in counts]

    def in_order(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norms of blocks, which the ranks found for their pieces, in the order of the model's parameters."""
        found: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for rank, part in enumerate(norms):
            pieces = self.of_rank(rank)
            for piece, item in zip(pieces, part.split(list(map(count_blocks, pieces))), strict=True):
                found.setdefault(piece.name, []).append((piece.first, item))
        ordered = [sorted(found[name], key=lambda pair: pair[0]) for name in self.parameters if name in found]
        return torch.cat([item for items in ordered for _, item in items])

    def start(self, bucket: int, urgency: int) -> None:
        """Send this rank's elements of a bucket to the others, and receive theirs."""
        self._finish(bucket)  # of a call before, if nothing has read these parameters since
        memory = [
            [memory_of(self.parameters[piece.name], piece) for piece in own if piece.name not in self.divided.own]
            for own in self.pieces[bucket]
        ]
        owned = memory[self.ranks.rank]
        others = [item for rank, items in enumerate(memory) for item in items if rank != self.ranks.rank]

        def exchange(messages: Messages, at: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
            return spread(messages, [list(map(at, items)) for items in memory], PARAMETER_TAGS + bucket, (urgency,))

        about = f"the parameters of bucket {bucket}"
        self._transfers[bucket] = self.ranks.start(about, exchange, self.device, owned, others)

    def arrive(self, name: str) -> None:
        """Wait for a parameter, if it is on its way."""
        if self._transfers:
            self._finish(self._bucket_of[name])

    def wait(self) -> None:
        """Wait for all parameters that are on their way."""
        for bucket in tuple(self._transfers):
            self._finish(bucket)

    def settle(self) -> None:
        """All parameters are there and whole. Where some are divided, all ranks call it."""
        self.wait()
        self.divided.settle()

    def _finish(self, bucket: int) -> None:
        transfer = self._transfers.pop(bucket, None)
        if transfer is not None:
            self.ranks.finish(transfer)
            changed = {piece.name for parts in self.pieces[bucket] for piece in parts} - self.divided.own.keys()
            torch.autograd.graph.increment_version([self.parameters[name] for name in changed])


def memory_of(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of a piece, in the memory of the parameter."""
    return in_memory_order(parameter.detach())[piece.first : piece.end]


def count_blocks(piece: Piece) -> int:
    """How many blocks have a norm."""
    return -(-piece.num_elements // BLOCK)
