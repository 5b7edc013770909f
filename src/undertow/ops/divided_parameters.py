"""Parameters of which a rank keeps its own elements alone, and reads the others' elements when the step needs them.

In: which parameters, and the piece of each that each rank owns. Out: whole tensors, made as often as a step asks for
them, which it frees like any other value. This is what FSDP2 and ZeRO-3 do (Rajbhandari et al., SC 2020).

A divided parameter is the same object as before, without memory. Whatever would read or write it raises one clear
UndertowError: without that, kernels would read an address that is not there. What is about it, such as its shape, can
be asked for.

A version counts how often the elements have changed on all ranks together. Who reads asks for a version, and its owner
answers when it has that one. An owner is never ahead: it updates a parameter when it has the gradients of all ranks,
and each sends them when it reads that parameter no more (`END_GATHERING`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.errors import UndertowError
from undertow.ops.clipping import in_memory_order
from undertow.ranks.lane import Steps, Transfer
from undertow.ranks.pieces import Piece
from undertow.ranks.ranks import Ranks

MOST_AT_ONCE = 2  # parameters on their way while all are made whole

_PROPERTIES = ("shape", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "ndim", "nbytes")
_STATES = ("is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "is_nested", "itemsize", "output_nr")
_MARKS = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad")
_SIZES = ("size", "stride", "numel", "nelement", "dim", "element_size", "storage_offset", "__len__")
_KINDS = (
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_inference",
    "requires_grad_",
    "new_empty",
    "new_zeros",
)
_FUNCTIONS = [torch.numel, torch.is_floating_point, torch.is_complex, torch.empty_like, torch.zeros_like]
_Tensor: Any = torch.Tensor  # its properties are descriptors, which its types do not say
# What is about a tensor, and what makes a tensor like it: none of these touches its elements.
_HARMLESS = frozenset(
    [getattr(_Tensor, name).__get__ for name in (*_PROPERTIES, *_STATES, *_MARKS)]
    + [_Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.requires_grad.__set__]
    + [getattr(_Tensor, name) for name in (*_SIZES, *_KINDS)]
    + _FUNCTIONS
)


class DividedParameter(torch.nn.Parameter):
    """The class of a parameter while it has no memory: it refuses what would touch its elements."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UndertowError(
            f"{getattr(func, '__name__', func)} would touch a parameter that is divided over the ranks between calls "
            f"of its step: each rank has only a part of it; call step.settle() on all ranks first, which makes all "
            f"parameters whole until the next call"
        )


@dataclass(eq=False)
class DividedParameters:
    """The parameters that are divided. `pieces` are those that the plan divides: of each, the piece of each rank.

    In memory they become so when the next call begins. `own` has this rank's elements of those that are divided now.
    """

    pieces: dict[str, tuple[Piece | None, ...]] = field(default_factory=dict)
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    _parameters: dict[str, torch.nn.Parameter] = field(default_factory=dict)  # those that are divided now
    _ranks: Ranks | None = None
    _offer: int = 0
    _version: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _num_open: int = 0  # contexts that are open
    _under_way: dict[str, list[Transfer]] = field(default_factory=dict)

    def elements_of(self, parameter: torch.nn.Parameter, piece: Piece) -> torch.Tensor:
        """This rank's elements of a parameter, which are flat, wherever they are."""
        if piece.name in self.own:
            return self.own[piece.name]
        return in_memory_order(parameter.detach())[piece.first : piece.end]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, the step itself may handle parameters that are divided."""
        self._num_open += 1
        for parameter in self._parameters.values():
            parameter.__class__ = torch.nn.Parameter
        try:
            yield
        finally:
            self._num_open -= 1
            for parameter in self._parameters.values() if not self._num_open else ():
                parameter.__class__ = DividedParameter

    def divide(self, parameters: Mapping[str, torch.nn.Parameter], ranks: Ranks) -> None:
        """Keep this rank's elements alone of the parameters that the plan divides. All ranks call it, inside `opened`.

        What is whole now counts, so that weights which were loaded meanwhile are taken.
        """
        self._stop(list(self._under_way))  # what a call that failed has left
        if self._parameters.keys() == self.pieces.keys():
            return
        self.settle()
        if self._ranks is None:
            self._ranks, self._offer = ranks, ranks.reading.offer(self._find)
        for name, pieces in self.pieces.items():
            parameter, piece = parameters[name], pieces[ranks.rank]
            flat = in_memory_order(parameter.detach())
            self.own[name] = flat[piece.first : piece.end].clone() if piece is not None else flat.new_empty(0)
            _take_memory(parameter)
            self._parameters[name] = parameter
        self._change()

    def note_update(self) -> None:
        """All own elements have their values of after a step."""
        if self._parameters:
            self._change()

    def start(self, name: str) -> tuple[torch.Tensor, Transfer]:
        """Start to make a parameter whole: the tensor that is filled, and the transfer."""
        assert self._ranks is not None
        parameter = self._parameters[name]
        whole = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype)
        flat, into = in_memory_order(whole), {}
        for rank, piece in enumerate(self.pieces[name]):
            if piece is not None and rank == self._ranks.rank:
                flat[piece.first : piece.end].copy_(self.own[name])
            elif piece is not None:
                into[rank] = flat[piece.first : piece.end]
        transfer = self._ranks.lane.start(f"parameter {name}", self._read(name, into))
        self._under_way.setdefault(name, []).append(transfer)
        return whole, transfer

    def finish(self, name: str, transfer: Transfer) -> None:
        """Wait until a parameter is whole; it may have been waited for before."""
        assert self._ranks is not None
        self._ranks.finish(transfer)
        if transfer in self._under_way.get(name, ()):
            self._under_way[name].remove(transfer)

    def end(self, names: Sequence[str]) -> None:
        """These parameters are read no more before they are updated: wait for what was started."""
        self._stop(names)

    def settle(self) -> None:
        """Make all parameters whole again. All ranks call it, since none may change anything before all have read."""
        if not self._parameters:
            return
        assert self._ranks is not None
        with self.opened():
            started: list[tuple[str, torch.Tensor, Transfer]] = []
            for name in self._parameters:
                started.append((name, *self.start(name)))
                if len(started) > MOST_AT_ONCE:
                    self._give_back(*started.pop(0))
            for item in started:
                self._give_back(*item)
            self._ranks.gather_texts("whole")
            self.own.clear()
            self._parameters.clear()

    def _give_back(self, name: str, whole: torch.Tensor, transfer: Transfer) -> None:
        self.finish(name, transfer)
        parameter = self._parameters[name]
        parameter.data = whole
        torch.autograd.graph.increment_version(parameter)

    def _stop(self, names: Sequence[str]) -> None:
        for name in names:
            for transfer in tuple(self._under_way.get(name, ())):
                self.finish(name, transfer)

    def _change(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _read(self, name: str, into: Mapping[int, torch.Tensor]) -> Steps:
        assert self._ranks is not None
        yield self._ranks.reading.ask(self._offer, list(self._parameters).index(name), self._version, into)

    def _find(self, item: int, version: int) -> torch.Tensor:
        """What another rank asks for."""
        with self._changed:
            self._changed.wait_for(lambda: self._version >= version)
        return self.own[list(self._parameters)[item]]


def _take_memory(parameter: torch.nn.Parameter) -> None:
    """Leave a parameter its shape and nothing else."""
    kind = parameter.dtype, parameter.shape, parameter.stride()
    parameter.data = torch.empty(0, dtype=kind[0])  # its memory is free before the next line asks for as much
    bare = torch.empty_strided(kind[1], kind[2], dtype=kind[0])
    bare.untyped_storage().resize_(0)
    parameter.data = bare
