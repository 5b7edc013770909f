"""Running a compiled step inside PyTorch's autograd, so that user loops, hooks and optimizers see nothing unusual.

The forward pass runs at once. The history of its outputs is a list of autograd nodes, one per segment of the backward
pass. The first runs when the user's loss is differentiated. Each hands its gradients to their parameters through
autograd's own accumulation, and passes a token to the next. So the hooks of parameters run as gradients are completed.

Values are freed at their last use in the backward pass. A second backward pass over the same forward pass
(`retain_graph=True`), or one from other outputs than expected, runs the forward pass again under the recorded
generator states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from undertow.errors import UndertowError
from undertow.ir import Plan, Value
from undertow.kernels.threads import survive_forks
from undertow.memory.lifetimes import find_lifetimes
from undertow.memory.replays import find_replayed_updates
from undertow.ops.interpret import generators_of
from undertow.ops.modes import below_autograd
from undertow.ops.own import bind
from undertow.runtime.allocator import keep_memory_mapped
from undertow.runtime.arena import Arena, ArenaMemory
from undertow.runtime.code import Segment, StepCode, compile_program
from undertow.runtime.cuda_graphs import GraphedStep
from undertow.runtime.prepared_weights import Preparation
from undertow.runtime.resident import rooms_of
from undertow.torch_internals import autograd_engine, foreach_copy_

Pattern = tuple[bool, ...]


# From PyTorch 2.13 on, a backward may be given its cotangents in a list, and free them while it runs.
TAKES_LISTS = hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed")


@dataclass(frozen=True)
class Part:
    """An autograd node of the backward pass: the segment it runs, if any, and the inputs whose gradients it returns."""

    segment: int | None
    owners: list[Value]
    places: list[int]  # positions of the owners among the step's inputs


class Step:
    """A Program ready to run, for a fixed set of outputs from which gradients come."""

    def __init__(
        self, plan: Plan, pattern: Pattern, live: Mapping[str, Any], memory: ArenaMemory | None = None
    ) -> None:
        keep_memory_mapped()
        survive_forks()
        self.plan = plan
        self.program = program = plan.program
        self.pattern = pattern
        self.arena = Arena(plan, memory or ArenaMemory())
        self.code: StepCode = compile_program(program, live, self.arena.values, rooms_of(plan))
        self.preparation = None if program.preparation is None else Preparation(program.preparation)
        self.generators = [bind(item, live) for item in generators_of(program.first_pass)]
        self.has_guards = any(node.operation.is_guard for node in program.first_pass)
        self.input_index = {item.value: position for position, item in enumerate(program.inputs)}
        self.update_inputs = {self.input_index[update.input] for update in program.updates}
        self.returned_inputs = [
            (place, self.input_index[value]) for place, value in enumerate(program.outputs) if value in self.input_index
        ]
        self.unreached = [gradient.input for gradient in program.gradients if gradient.value is None]
        self._update_groups = self._group_updates()
        self.replayed_updates = [self.input_index[value] for value in find_replayed_updates(program)]
        roots = find_lifetimes(program).root
        exposed = {roots[value] for value in program.outputs}
        # Slots in the memory of an output: the user could overwrite them before the backward pass.
        self.exposed_slots = [slot for value, slot in self.code.slots.items() if roots.get(value) in exposed]
        kept = {roots.get(value) for value in self.code.slots}
        is_on_gpu = any(item.value.tensor_type.device.type == "cuda" for item in program.inputs)
        self._graph = GraphedStep(plan, live, self._run_whole) if is_on_gpu else None
        self.parts = self._divide_backward()
        self.exposed_outputs = [place for place, value in enumerate(program.outputs) if roots[value] in kept]

    def _divide_backward(self) -> list[Part]:
        owners = [[item.input for item in segment.gradients] for segment in self.code.segments]
        owners = owners or [[]]  # without a segment, the output still has a history in eager
        # Inputs without a gradient in the expected pattern may have one in another; they go to the last segment.
        owners[-1] += self.unreached
        parts = [Part(index, row, [self.input_index[owner] for owner in row]) for index, row in enumerate(owners)]
        return parts if TAKES_LISTS else [Part(None, [], []), *parts]

    def describe(self) -> Plan:
        """The plan, with a note on whether it runs as a CUDA graph where it is for a GPU."""
        return self.plan if self._graph is None else replace(self.plan, notes=(*self.plan.notes, self._graph.note))

    def release_prepared(self) -> None:
        """Free prepared weights until the next run."""
        if self.preparation is not None:
            self.preparation.release()

    def release_memory(self) -> None:
        """Free the step's arena until the next run, and its CUDA graph until it has run a few times more."""
        self.arena.memory.release()
        if self._graph is not None:
            self._graph.release()

    def run_forward(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Outputs and slots. Updates reach the user's tensors only when the whole pass has succeeded."""
        if self._graph is not None and not self.program.cotangents:
            return self._graph.run(inputs), []
        slots: list[Any] = [None] * len(self.code.slots)
        if not self.arena.values:
            self.arena.memory.limit(self.arena.most_bytes)
            return self._run_pass(inputs, slots), slots
        block = self.arena.take()
        try:
            return self._run_pass(inputs, [*slots, *block.tensors[self.arena]]), slots
        finally:
            self.arena.memory.give_back(block)

    def _run_whole(self, inputs: Sequence[Any]) -> list[Any]:
        return self._run_pass(inputs, [None] * len(self.code.slots))

    def _run_pass(self, inputs: Sequence[Any], slots: list[Any]) -> list[Any]:
        with below_autograd():
            results = self.code.forward(inputs, slots)
            for positions, places in self._update_groups:
                targets = [inputs[position] for position in positions]
                foreach_copy_(targets, [results[place] for place in places])
                torch.autograd.graph.increment_version(targets)
        return list(results[: len(self.program.outputs)])

    def _group_updates(self) -> list[tuple[list[int], list[int]]]:
        """Positions among the inputs and among the results, grouped by the type of the update: on a GPU a group is one
        kernel.
        """
        groups: dict[Any, tuple[list[int], list[int]]] = {}
        for place, update in enumerate(self.program.updates, start=len(self.program.outputs)):
            positions, places = groups.setdefault(update.input.tensor_type.dtype, ([], []))
            positions.append(self.input_index[update.input])
            places.append(place)
        return list(groups.values())


@dataclass(eq=False)
class Run:
    """One forward pass waiting for its backward pass."""

    step: Step
    step_for: Callable[[Pattern], Step]
    inputs: list[Any]
    versions: list[int]
    slots: list[Any] | None
    exposed: list[tuple[torch.Tensor, int]]
    states: list[torch.Tensor]
    remember: Callable[[Pattern], None]
    done: list[Pattern] = field(default_factory=list)  # patterns of the backward passes so far
    finished: dict[Value, Any] | None = None  # all gradients, computed at once when the pattern is not the expected one

    def choose_step(self, cts: Sequence[Any]) -> Step:
        """The step for these cotangents: the expected one, or the one for this pattern.

        It must not be called below autograd: a step that is made there would hold operations such as `reshape`, which
        PyTorch takes apart on the way down.
        """
        pattern = tuple(ct is not None for ct in cts)
        return self.step if pattern == self.step.pattern else self.step_for(pattern)

    def start_backward(self, step: Step, cts: Sequence[Any]) -> None:
        """Prepare slots and cotangents for the first segment of the chosen step."""
        for tensor, version in self.exposed:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "an output of the planned module was changed before backward(); clone it first"
                )
        self.done.append(step.pattern)
        if step is not self.step:
            self.remember(step.pattern)
        self._hide_hooks(step)
        slots = self.slots if step is self.step and self.slots is not None else self._replay(step)
        # A ZeroTensor has no memory, but the last operation that reads a cotangent may write over it.
        slots[: step.code.num_cotangents] = [ct.clone() if ct._is_zerotensor() else ct for ct in cts if ct is not None]
        self.slots, self.finished = slots, None
        if step is not self.step:
            self.slots, self.finished = None, {}
            for segment in step.code.segments:
                owners = (gradient.input for gradient in segment.gradients)
                self.finished.update(zip(owners, self._run(segment, slots), strict=True))

    def _hide_hooks(self, step: Step) -> None:
        """Hide the hooks of leaves that this backward pass does not reach: autograd would call them with None."""
        hidden = []
        for owner in step.unreached:
            leaf = self.inputs[self.step.input_index[owner]]
            if leaf._backward_hooks:
                hidden.append((leaf, leaf._backward_hooks))
                leaf._backward_hooks = None

        def restore() -> None:
            for leaf, hooks in hidden:
                leaf._backward_hooks = hooks

        if hidden:
            autograd_engine.queue_callback(restore)

    def is_untouched(self, cts: Sequence[Any]) -> bool:
        """Whether no earlier backward pass read what this one reads: eager then allows it without retain_graph."""
        wanted = self._kept_for(tuple(ct is not None for ct in cts))
        return all(wanted.isdisjoint(self._kept_for(pattern)) for pattern in self.done)

    def _kept_for(self, pattern: Pattern) -> set[Value]:
        program = self.step_for(pattern).program
        made = {value for node in program.first_pass for value in node.outputs}
        return {value for node in program.second_pass for value in node.inputs if value in made}

    def gradients_of(self, part: Part) -> list[Any]:
        """The gradients that a part of the expected step's backward pass hands over."""
        if self.finished is not None:
            # After pop, only autograd holds the tensor, so that it need not copy it.
            return [self.finished.pop(owner, None) for owner in part.owners]
        if part.segment is None or not self.step.code.segments:
            return [None] * len(part.owners)
        assert self.slots is not None
        found = self._run(self.step.code.segments[part.segment], self.slots)
        if part is self.step.parts[-1]:
            self.slots = None
        return [*found, *([None] * (len(part.owners) - len(found)))]

    def _run(self, segment: Segment, slots: list[Any]) -> tuple[Any, ...]:
        self._check_versions(segment.read_inputs)
        if not self.step.plan.repeats:
            return segment.run(self.inputs, slots)
        # A second run must use the same kernels as the first: some ask whether gradients are enabled.
        with torch.enable_grad():
            return segment.run(self.inputs, slots)

    def _replay(self, step: Step) -> list[Any]:
        self._check_versions(range(len(self.inputs)))
        before = [generator.get_state() for generator in step.generators]
        for generator, state in zip(step.generators, self.states, strict=True):
            generator.set_state(state)
        slots: list[Any] = [None] * len(step.code.slots)
        with torch.enable_grad():
            step.code.forward(self.inputs, slots)
        for generator, state in zip(step.generators, before, strict=True):
            generator.set_state(state)
        return slots

    def _check_versions(self, positions: Iterable[int]) -> None:
        for position in positions:
            if self.inputs[position]._version != self.versions[position] and position not in self.step.update_inputs:
                item = self.step.program.inputs[position]
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{item.kind.value} {item.path} changed between the planned forward pass and backward()"
                )


class _Entry(torch.autograd.Function):
    """Holds the outputs. Its backward receives the cotangents, and runs a segment if it can free them meanwhile."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, run: Run, outputs: Sequence[Any], part: Part, sentinel: Any, token: Any, *leaves: Any) -> Any:
        ctx.run, ctx.part, ctx.has_next = run, part, token is not None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sentinel)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        cts = given[0] if TAKES_LISTS else list(given)
        try:
            ctx.saved_tensors  # noqa: B018  raises eager's own error when the graph was freed
        except RuntimeError:
            if not ctx.run.is_untouched(cts):
                raise
        if torch.is_grad_enabled():
            raise UndertowError(
                "create_graph=True through a planned module is not supported; use ut.hvp or ut.hessian, "
                "or call the original module for this step"
            )
        step = ctx.run.choose_step(cts)
        with below_autograd():
            ctx.run.start_backward(step, cts)
            cts.clear()
            gradients = ctx.run.gradients_of(ctx.part)
        return None, None, None, None, _token(ctx), *gradients


class _SegmentNode(torch.autograd.Function):
    """A further segment of the backward pass as an autograd node."""

    @staticmethod
    def forward(ctx: Any, run: Run, part: Part, token: Any, *leaves: Any) -> Any:
        ctx.run, ctx.part, ctx.has_next = run, part, token is not None
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        with below_autograd():
            gradients = ctx.run.gradients_of(ctx.part)
        return None, None, _token(ctx), *gradients


def _token(ctx: Any) -> torch.Tensor | None:
    """What makes the node of the next segment run, if there is one."""
    return torch.empty(0) if ctx.has_next else None


def attach_backward(run: Run, outputs: list[Any], differentiable: Sequence[int]) -> None:
    """Make the run's backward pass the history of the outputs at `differentiable` positions."""
    inputs, (first, *others) = run.inputs, run.step.parts
    token = None
    for part in reversed(others):
        token = _SegmentNode.apply(run, part, token, *[inputs[place] for place in part.places])
    carried = [outputs[place] for place in differentiable]
    leaves = [inputs[place] for place in first.places]
    for place, tensor in zip(
        differentiable, _Entry.apply(run, carried, first, torch.empty(0), token, *leaves), strict=True
    ):
        outputs[place] = tensor


def place_among_outputs(tensor: torch.Tensor) -> int | None:
    """The tensor's index among the differentiable outputs of a planned forward pass; None where it is none of them."""
    return tensor.output_nr if isinstance(tensor.grad_fn, _Entry._backward_cls) else None
