"""The ranks of a job, as one of them sees it: who it is, messages, the lane, the watch.

In: a mesh, and what torchrun or `undertow train` put into the environment; or the process group that the user's own
code made. Out: `Ranks`, by which a step is bound to the others. Everything listens on the address by which the store is
reached: on one machine that is the loopback.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore

from undertow.errors import CallError, RankLost
from undertow.ranks.carriers import Carrier, HostCarrier, MakeSteps, StagedCarrier
from undertow.ranks.lane import LOOK_AROUND_S, Lane, Steps, Transfer
from undertow.ranks.link_speed import measure_link
from undertow.ranks.mesh import Mesh
from undertow.ranks.messages import BrokenConnection, GlooMessages
from undertow.ranks.reading import Reading
from undertow.ranks.reduction import gather
from undertow.ranks.started import NAMESPACE, is_launched, is_rank
from undertow.ranks.watch import Report, Reports, Watch, first_line
from undertow.torch_internals import default_store

BOUND_S = 60.0  # a rank that does not move for so long is lost
JOINING = timedelta(seconds=120)
LEAVING_S = 5.0  # for the others to hear that this rank leaves; a rank that is gone never does
MAX_SENT_BYTES = 1 << 30  # of one package of bytes from another rank
PACKAGE_TAGS = 1 << 20  # transfers of steps have smaller tags

_JOINED: list[Ranks] = []


class Late(Protocol):
    """Something that a step may have left on its way."""

    def settle(self) -> None:
        """Wait for it."""


class Ranks:
    """This process among the others."""

    def __init__(self, store: Store, rank: int, size: int, address: str, bound_s: float = BOUND_S) -> None:
        self.rank, self.size, self.address = rank, size, address
        self._store = PrefixStore(NAMESPACE, store)
        _wait_for_all(self._store, rank, size)
        self.watch = Watch(self._store, rank, size, bound_s)
        self.watch.start()
        self.messages = GlooMessages(self._store, rank, size, address)
        self.lane = Lane(self.watch.check)
        self.reading = Reading(self.messages, self.watch.report_own)
        self._carriers: dict[torch.device, Carrier] = {torch.device("cpu"): HostCarrier(self.messages)}
        self.late: Late | None = None  # of the step that ran last
        self._num_packages = 0
        self._link_times: dict[torch.device, dict[int, int]] = {}

    @contextmanager
    def reporting(self, doing: str) -> Iterator[None]:
        """What goes wrong inside is told to the other ranks, which then end as well."""
        before, self.watch.doing = self.watch.doing, doing
        try:
            yield
        except RankLost:
            raise
        except BaseException as error:
            self.watch.report_own(error)
            raise
        self.watch.doing = before

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say to the other ranks what is done inside, where that takes long: at once, and at the end again."""
        before = self.watch.doing
        self.watch.say(what)
        yield
        self.watch.say(before)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Inside, this rank may stand still as long as it beats: planning waits for processes that measure."""
        self.watch.num_patient += 1
        try:
            yield
        finally:
            self.watch.num_patient -= 1

    def link_times(self, device: torch.device) -> dict[int, int]:
        """Nanoseconds that a transfer occupies the link, by bytes; measured once in a job, by all ranks together."""
        if device not in self._link_times:
            self._link_times[device] = measure_link(self, device)
        return self._link_times[device]

    def use_device(self, device: torch.device) -> None:
        """Make ready to carry tensors of this device. All ranks call it, with devices of one kind."""
        if device not in self._carriers:
            own = json.dumps([socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)])
            is_alone = len(set(self.gather_texts(own))) == self.size
            if is_alone and distributed.is_nccl_available():
                from undertow.ranks.nccl import NcclCarrier

                self._carriers[device] = NcclCarrier(self._store, self.rank, self.size, device)
            else:
                self._carriers[device] = StagedCarrier(self.messages, device)

    def start(
        self,
        about: str,
        make: MakeSteps,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> Transfer:
        """Start a transfer of tensors of a device: `reads` and `writes` are all that it is given."""
        return self.lane.start(about, self._carriers[device].carry(make, reads, writes))

    def finish(self, transfer: Transfer) -> None:
        """Wait for a transfer; raises RankLost."""
        try:
            self.lane.finish(transfer)
        except BrokenConnection as error:
            raise self.watch.explain(error, error.peer) from error

    def send_bytes(self, data: bytes | None) -> bytes:
        """The bytes that rank 0 gives, on every rank; the others give None."""
        size = torch.tensor([0 if data is None else len(data)])
        self._pass_on(size)
        if not 0 <= int(size) <= MAX_SENT_BYTES:
            raise CallError(f"rank 0 wants to send {int(size)} bytes; at most {MAX_SENT_BYTES} are taken")
        content = torch.empty(int(size), dtype=torch.uint8)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._pass_on(content)
        return content.numpy().tobytes()

    def send_number(self, number: int) -> int:
        """The number that rank 0 gives, on every rank; those of the others count for nothing."""
        message = torch.tensor([number])
        self._pass_on(message)
        return int(message)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise CallError on every rank if they do not know the same facts; the message says who differs in what."""
        found = self.gather_texts(json.dumps(facts, sort_keys=True))
        read = [json.loads(text) for text in found]
        for name in facts:
            values = [item.get(name) if isinstance(item, dict) else None for item in read]
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                raise CallError(
                    f"the ranks differ in {name}: rank 0 has {_show(values[0])}, rank {others[0]} has "
                    f"{_show(values[others[0]])}; all ranks must be started with the same model, data, options and "
                    f"versions"
                )

    def gather_texts(self, text: str) -> list[str]:
        """A text of every rank, in the order of the ranks."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.gather(torch.tensor([len(data)]), sizes)
        if max(map(int, sizes)) > MAX_SENT_BYTES or min(map(int, sizes)) < 0:
            raise CallError("a rank wants to send more than is taken")
        texts = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        self.gather(data, texts)
        return [item.numpy().tobytes().decode(errors="replace") for item in texts]

    def gather(self, own: torch.Tensor, into: list[torch.Tensor]) -> None:
        """A flat tensor of every rank, into tensors of the right sizes."""
        self.finish(self.lane.start("a package", gather(self.messages, self._next_tag(), own, into)))

    def close(self) -> None:
        """Leave the job; whoever has left is not missed."""
        self.lane.settle()
        self.reading.close(LEAVING_S)
        for carrier in self._carriers.values():
            carrier.close()
        self.messages.close(LOOK_AROUND_S)
        self.lane.close(LOOK_AROUND_S)
        self.watch.stop()
        if self in _JOINED:
            _JOINED.remove(self)
            atexit.unregister(self.close)

    def _pass_on(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor, to all."""
        tag = self._next_tag()

        def pass_on() -> Steps:
            if self.rank:
                yield self.messages.receive(tensor, 0, tag, 0)
            else:
                yield [item for other in range(1, self.size) for item in self.messages.send(tensor, other, tag, 0)]

        self.finish(self.lane.start("a package", pass_on()))

    def _next_tag(self) -> int:
        self._num_packages += 1
        return PACKAGE_TAGS + self._num_packages % 1024


def join(mesh: Mesh, bound_s: float = BOUND_S) -> Ranks:
    """This process's place in the job; the same object at every call."""
    if _JOINED:
        ranks = _JOINED[0]
    else:
        ranks = _join(bound_s)
        _JOINED.append(ranks)
        atexit.register(ranks.close)  # a thread that is still in gloo when the process ends would abort it
    if ranks.size != mesh.num_ranks:
        raise CallError(
            f"the mesh {mesh} has {mesh.num_ranks} ranks, and {ranks.size} processes were started; start as many, or "
            f"give another mesh"
        )
    return ranks


def _join(bound_s: float) -> Ranks:
    if distributed.is_initialized():
        store, rank, size = default_store(), distributed.get_rank(), distributed.get_world_size()
    elif is_rank():
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        store = _connect(rank)
    else:
        raise CallError(
            "parallel= needs several processes: start them with torchrun, or with undertow train --parallel"
        )
    return Ranks(store, rank, size, _own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")), bound_s)


def _connect(rank: int) -> Store:
    """The store that the launcher has, or torchrun, or rank 0 if neither has started it."""
    try:
        if is_launched():
            return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, JOINING)
        return next(distributed.rendezvous("env://", timeout=JOINING))[0]
    except (RuntimeError, ValueError, KeyError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise CallError(
            f"rank {rank} cannot join the others by MASTER_ADDR and MASTER_PORT, {where}: {first_line(error)}"
        ) from None


def _wait_for_all(store: Store, rank: int, size: int) -> None:
    """Wait until every rank is here; raises RankLost that names one that did not come."""
    keys = [f"here {other}" for other in range(size)]
    store.set(keys[rank], "")
    try:
        store.wait(keys, JOINING)
    except RuntimeError:
        missing = next(other for other, key in enumerate(keys) if not store.check([key]))
        cause = f"did not come within {JOINING.total_seconds():.0f} s, and {size} ranks were to be started"
        report = Reports(store).add(Report(missing, "", cause))
        raise RankLost(str(report), missing) from None


def _own_address(master: str) -> str:
    """The address of this machine by which it reaches the one with the store; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))
        except OSError as error:
            raise CallError(f"MASTER_ADDR is {master}, which cannot be reached: {error.strerror}") from None
        return str(probe.getsockname()[0])


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
