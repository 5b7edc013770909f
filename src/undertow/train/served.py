"""A run whose workers push to a parameter server: the loop of a run, with epochs that other processes compute.

The process of the command has the run's folder. It evaluates, saves, and decides when the run ends. Between epochs, and
where a checkpoint is saved, no batch is under way: so a checkpoint is of one moment in all parts. It is an ordinary
one, with which the run can go on in one process or in step as well.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from undertow.errors import CallError, DataError, FolderError
from undertow.server.job import JobDescription
from undertow.server.messages import Push
from undertow.server.parts import cut, divide_parameters, paste
from undertow.server.rules import Rules
from undertow.server.service import NUM_CONTROLLERS, PartLost, Service, Size, new_namespace
from undertow.server.state import State
from undertow.server.tensors import PARAMETER, OptimizerSettings
from undertow.train.batches import Batch
from undertow.train.computing import Numbering, join_buffers, trained_parameters
from undertow.train.config import TrainConfig
from undertow.train.feeding import EpochOrder
from undertow.train.interrupts import Interrupts
from undertow.train.progress import StepView
from undertow.train.records import Records
from undertow.train.run import Run

SMALL_PART_BYTES = 1 << 20
PARTS_PER_SERVER = 2  # of large models: the first gradients leave while the others are computed
PUSHES = "pushes.jsonl"
RATE_S = 5.0  # pushes a second are counted over the last ones


def max_delay(config: TrainConfig) -> float:
    """The bound on the staleness of a push."""
    return math.inf if config.max_delay == "free" else float(config.max_delay)


def numbering_of(config: TrainConfig, num_batches: int) -> Numbering:
    """How the batches of a run are numbered. In step, batches that fill no update are left out."""
    is_synchronous = max_delay(config) == 0
    left_out = num_batches % config.workers if is_synchronous else 0
    return Numbering(num_batches - left_out, config.workers, is_synchronous)


def describe_job(config: TrainConfig, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> JobDescription:
    """What all processes of a run are told."""
    parameters = trained_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    per_server = PARTS_PER_SERVER if num_bytes >= SMALL_PART_BYTES * config.servers else 1
    controllers = tuple(f"controller-{index}" for index in range(NUM_CONTROLLERS))
    return JobDescription(
        new_namespace(),
        Rules(controllers, max_delay(config), config.workers),
        divide_parameters(parameters, config.servers * per_server),
        OptimizerSettings.of(optimizer, names),
        config.push_dtype,
    )


def read_values(job: JobDescription, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each part's parameters and optimizer state, from the model and the optimizer of this process."""
    parameters = trained_parameters(model)
    states = {name: optimizer.state.get(item, {}) for name, item in parameters.items()}
    keys = sorted({key for state in states.values() for key, item in state.items() if item is not None})
    values = []
    for part in job.parts:
        found = {PARAMETER: cut(parameters, part).numpy()}
        for key in keys:
            if key.endswith("step"):
                counts = [float(states[piece.name][key]) for piece in part.pieces]
                found[key] = torch.tensor(counts, dtype=torch.float32).numpy()
            else:
                found[key] = cut({name: state[key] for name, state in states.items()}, part).numpy()
        values.append(found)
    return values


def write_values(
    job: JobDescription, model: torch.nn.Module, optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]
) -> None:
    """The other way: the model and the optimizer of this process get what the servers have."""
    parameters = trained_parameters(model)
    for part, arrays in zip(job.parts, values, strict=True):
        for key, array in arrays.items():
            elements = torch.from_numpy(array.copy())
            if key == PARAMETER:
                paste(parameters, part, elements)
                continue
            for place, piece in enumerate(part.pieces):
                state = optimizer.state[parameters[piece.name]]
                if key.endswith("step"):
                    state[key] = elements[place].clone()
                elif key not in state:
                    state[key] = torch.zeros_like(parameters[piece.name])
            if not key.endswith("step"):
                paste(
                    {piece.name: optimizer.state[parameters[piece.name]][key] for piece in part.pieces}, part, elements
                )


class ServedRun(Run):
    """A run with a parameter server. `make` makes what a worker computes with, in its own process."""

    ray: Any
    make: Callable[[], Any]

    def serve_by(self, ray: Any, make: Callable[[Numbering], Callable[[], Any]]) -> None:
        """Use this cluster."""
        self.ray = ray
        self.numbering = numbering_of(self.config, len(self.feed))
        self.make = make(self.numbering)
        self.service: Service | None = None
        self._served = ""

    @cached_property
    def batches_per_epoch(self) -> int:
        """The batches that are used."""
        return self.numbering.batches_per_epoch

    @property
    def num_steps(self) -> int:
        """The number of updates of the whole run; with a delay, every batch is one."""
        total = self.numbering.step_of(self.batches_per_epoch) * self.config.epochs
        return total if self.config.max_steps is None else min(total, self.config.max_steps)

    def stop(self) -> None:
        """End all processes of the server."""
        if self.service is not None:
            self.service.stop()
            self.service = None

    # -- what a run does otherwise

    def _plan(self, batch: Batch) -> None:
        """Start the server and its workers, which plan; what they refuse is refused before the run's folder is made."""
        if not isinstance(getattr(self.feed.loader, "batch_sampler", None), EpochOrder):
            raise CallError(
                f"--parallel server hands out batches in any order, and the loaders of {self.config.data} have one "
                f"order; give --data that Undertow reads itself"
            )
        self._start(batch)

    def _start(self, batch: Batch | None) -> None:
        config = self.config
        start = time.perf_counter()
        self._job_description = describe_job(config, self.workload.model, self.optimizer)
        number = self.progress.epoch * self.batches_per_epoch + self.progress.batch
        version = self.progress.step if self.numbering.is_synchronous else 0
        size = Size(config.workers, config.servers, config.replicas)
        self.service = Service(self.ray, self._job_description, size, self.make, self.display.say, config.lost_after)
        num_nodes = sum(node["Alive"] for node in self.ray.nodes())
        if num_nodes < config.replicas:
            self.display.say(
                f"{config.replicas} replicas on {num_nodes} node{'s' if num_nodes > 1 else ''}: copies of a part share "
                f"a node, and are lost with it"
            )
        count = len(self._job_description.parts)
        values = read_values(self._job_description, self.workload.model, self.optimizer)
        self.service.start(values, [State(version=version, below=number)] * count)
        facts = self.service.wait_for_workers()
        for fact in facts[1:]:
            for name, value in fact["shared"].items():
                if value != facts[0]["shared"][name]:
                    raise DataError(f"a worker has other data than the first: {name} differs")
        self.progress.predicted_peak_bytes = max(fact["peak_bytes"] for fact in facts)
        self._logged = [version] * count
        self._to_log: list[dict[str, Any]] = [{"began": number, "version": version}]
        self._pushed: list[tuple[float, int]] = []
        if batch is not None:
            self._about |= {"call": batch.describe(), "budget_bytes": self.budget_bytes, "held_bytes": 0}
        self.display.say(
            f"{config.workers} workers, {config.servers} servers, {count} parts with {config.replicas} "
            f"cop{'ies' if config.replicas > 1 else 'y'} each; started in {time.perf_counter() - start:.1f} s"
        )

    def _train_epoch(self, interrupts: Interrupts) -> None:
        """Have batches computed to the end of the epoch or of the run, to the next checkpoint, or until a signal."""
        progress, config, service = self.progress, self.config, self.service
        assert service is not None
        step_of = self.numbering.step_of
        first = progress.epoch * self.batches_per_epoch + progress.batch
        end = (progress.epoch + 1) * self.batches_per_epoch
        scale = self.numbering.round_size if self.numbering.is_synchronous else 1
        end = min(end, self.num_steps * scale)
        if config.save_every is not None:
            end = min(end, first + config.save_every * scale)
        computed: list[int] = []

        def rates_of(number: int) -> tuple[float, ...]:
            return tuple(self.schedule.at(step_of(number), self.num_steps, progress.num_drops))

        def note(result: dict[str, Any]) -> bool:
            computed.append(result["number"])
            self._note_batch(result, rates_of(result["number"])[0])
            return not (interrupts.reason or self._is_called_off)

        start = time.perf_counter()
        try:
            found = service.train(range(first, end), rates_of, note)
            snapshots = service.snapshot()
            self._write_log()
        except PartLost as lost:
            self._go_back(lost)
            return
        progress.seconds += time.perf_counter() - start
        below = {snapshot["state"].below for snapshot in snapshots}
        if len(below) != 1 or any(snapshot["state"].beyond for snapshot in snapshots):
            raise DataError(f"the parts differ in which batches they have: all below {sorted(below)}")
        (number,) = below
        progress.batch = number - progress.epoch * self.batches_per_epoch
        progress.step = step_of(number)
        values = [snapshot["values"] for snapshot in snapshots]
        write_values(self._job_description, self.workload.model, self.optimizer, values)
        join_buffers(self.workload.model, [item["buffers"] for item in found])

    def _note_batch(self, result: dict[str, Any], rate: float) -> None:
        """Record a batch that was computed."""
        progress, service = self.progress, self.service
        assert service is not None and self._records is not None
        loss = result["loss"]
        step = self.numbering.step_of(result["number"]) + 1
        progress.loss_sum += loss / (self.numbering.round_size if self.numbering.is_synchronous else 1)
        progress.last_loss = loss
        progress.num_examples += result["examples"]
        now = time.monotonic()
        self._pushed = [item for item in [*self._pushed, (now, result["examples"])] if item[0] > now - RATE_S]
        per_s = len(self._pushed) / max(now - self._pushed[0][0], 1e-3) if len(self._pushed) > 1 else 0.0
        self._records.add(step, "train", loss=loss, lr=rate, epoch=progress.epoch)
        num_bytes = sum(worker.num_bytes for worker in service.workers.values())
        self._served = (
            f"{len(service.workers)} workers  {len(service.servers)} servers  {per_s:.0f} batches/s  "
            f"{num_bytes / 1e6:.0f} MB pushed  waited {result['waited_s'] * 1e3:.0f} ms"
        )
        view = (step, self.num_steps, progress.epoch, self.config.epochs, loss, result["examples"])
        self.display.show(StepView(*view, progress.predicted_peak_bytes, self.budget_bytes, self._served))
        self._call("on_step", {"step": step, "loss": loss, "lr": rate, "epoch": progress.epoch})

    def _write_log(self) -> None:
        """Add the updates that were applied to the run's log, and what they say about staleness to its records."""
        service, records = self.service, self._records
        assert service is not None and records is not None
        found = []
        lines, self._to_log = self._to_log, []
        for part in range(len(self._job_description.parts)):
            for version, pushes in service.read_log(part, self._logged[part]):
                lines.append({"part": part, "version": version, "pushes": [_plain(push) for push in pushes]})
                found += [version - 1 - push.versions[part] for push in pushes]
                self._logged[part] = version
        lines += service.events
        service.events.clear()
        try:
            with open(self.folder.path / PUSHES, "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as error:
            raise FolderError(f"{self.folder.path / PUSHES} cannot be written: {error.strerror}") from None
        if found:
            numbers = {"staleness": sum(found) / len(found), "most_staleness": max(found), "pushes": len(found)}
            records.add(self.progress.step, "server", None, **numbers, epoch=self.progress.epoch)

    def _go_back(self, lost: PartLost) -> None:
        """All copies of a part are gone: start again from the last checkpoint."""
        assert self.service is not None and self._records is not None
        self.display.say(f"{lost}; going back to the last checkpoint")
        self.service.stop()
        self.restore(self.folder.read_checkpoint())
        self._records.close()
        self._records = Records(self.folder, self.progress)
        with open(self.folder.path / PUSHES, "a") as file:
            file.write(json.dumps({"went_back_to_step": self.progress.step, "because": str(lost)}) + "\n")
        self._start(None)


def _plain(push: Push) -> list[Any]:
    return [push.worker, push.number, list(push.versions), list(push.rates)]
