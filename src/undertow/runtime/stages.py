"""Running the stages of one rank: pieces of many shards in turns, as a schedule says.

In: the plan of each stage and kind of shard, and the rank's list of pieces. Each stage's Program is compiled to a
generator: it pauses where a piece ends, and its variables hold what the shard keeps. What other stages send is asked
for one piece ahead. A shard whose last piece is done waits until its cotangents were sent; nobody waits for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from undertow.ir import Plan
from undertow.kernels.threads import survive_forks
from undertow.ops.modes import below_autograd
from undertow.ops.stages import StageLink
from undertow.runtime.allocator import keep_memory_mapped
from undertow.runtime.code import compile_program
from undertow.runtime.resident import rooms_of
from undertow.stages.arrivals import Ask
from undertow.stages.schedules import Pass, Piece

Running = Generator[None, None, tuple[torch.Tensor, ...]]


class StageProgram:
    """A plan of one stage for one kind of shard, ready to run."""

    def __init__(self, plan: Plan, live: Mapping[str, Any]) -> None:
        keep_memory_mapped()
        survive_forks()
        self.plan = plan
        self._code = compile_program(plan.program, live, (), rooms_of(plan))

    def start(self, inputs: Sequence[Any]) -> Running:
        """The pieces of a shard; each `next` runs one."""
        running: Running = self._code.forward(inputs, [None] * len(self._code.slots))  # type: ignore[assignment]
        return running


@dataclass(frozen=True)
class Turn:
    """A piece of a rank's list, with what is asked for before it begins."""

    piece: Piece
    asks: Sequence[Ask]
    is_last: bool  # of its shard on this stage


def list_turns(pieces: Sequence[Piece], asks: Sequence[Sequence[Ask]]) -> list[Turn]:
    """The turns of a rank."""
    last = Pass.WEIGHT if any(piece.which is Pass.WEIGHT for piece in pieces) else Pass.BACKWARD
    return [Turn(piece, item, piece.which is last) for piece, item in zip(pieces, asks, strict=True)]


class StageRunner:
    """Runs the turns of a step."""

    def __init__(
        self,
        turns: Sequence[Turn],
        link: StageLink,
        ask: Callable[[Ask], None],
        begin: Callable[[Piece], None],
        start: Callable[[Piece], Running],
    ) -> None:
        self._turns, self._link, self._ask, self._begin, self._start = turns, link, ask, begin, start
        self._running: dict[tuple[int, int], Running] = {}
        self._ending: list[tuple[int, int]] = []
        self.busy_ns = 0  # in pieces, without what they waited for
        self._last_shard = max(turn.piece.shard for turn in turns)
        self.results: dict[int, tuple[torch.Tensor, ...]] = {}  # of each stage's last shard

    def run(self) -> None:
        """All turns; the results of the last shard of each stage are there afterwards."""
        for turn in self._turns:
            for ask in turn.asks:
                self._ask(ask)
            piece = turn.piece
            key = piece.stage, piece.shard
            self._begin(piece)
            if piece.which is Pass.FORWARD:
                self._running[key] = self._start(piece)
            self._resume(key)
            if turn.is_last:
                self._ending.append(key)
            self._end_those_sent()
        for key in self._ending:
            self._finish(key)

    def _resume(self, key: tuple[int, int]) -> None:
        start_ns = time.perf_counter_ns() - self._link.waited_ns
        try:
            with below_autograd():
                next(self._running[key])
        finally:
            self.busy_ns += time.perf_counter_ns() - self._link.waited_ns - start_ns

    def _end_those_sent(self) -> None:
        still = [key for key in self._ending if not self._link.has_sent(*key)]
        for key in self._ending:
            if key not in still:
                self._finish(key)
        self._ending = still

    def _finish(self, key: tuple[int, int]) -> None:
        try:
            self._resume(key)
        except StopIteration as end:
            stage, shard = key
            if shard == self._last_shard:  # shards end in the order in which what they sent has left
                self.results[stage] = end.value
        del self._running[key]
