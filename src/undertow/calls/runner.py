"""The runner: finds or makes the capture that fits a call, and runs it.

In: a Request and the arguments of a call. Out: what the model returns, with the derived backward pass attached. Calls
are told apart by everything that may change what is recorded: structure and types of the arguments, the state of the
model, and the values that branches found.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from undertow.calls.model_state import ModelState
from undertow.costs.usage import unwatched
from undertow.errors import CaptureError, TooManyOutcomes, UndertowError
from undertow.ir import Input, InputKind, Node, Plan
from undertow.ir.saving import SavedPlan
from undertow.ir.structure import fill_slots, list_tensors, structure_key, tensors_in
from undertow.ops.interpret import run_node
from undertow.ops.modes import below_autograd
from undertow.ops.own import GuardMiss
from undertow.pipeline import Request, count_workspaces, differentiable_outputs, expected_pattern, make_step, record
from undertow.record.capture import Captured
from undertow.record.origins import place_of
from undertow.record.python_state import state_put_back
from undertow.record.traced_tensor import TracedTensor
from undertow.runtime.step import Pattern, Run, Step, attach_backward, place_among_outputs
from undertow.torch_internals import has_saved_tensor_hooks

MAX_OUTCOMES = 64  # paths through a model's branches on tensor values
# Captures are kept as long as they fit into this much memory, and in any case so many: shapes, dtypes, modes. Their
# bytes are counted by nodes. Measured with tracemalloc, a node of a GPT takes 800 bytes and one of an LSTM 1,150, its
# share of the tables and of the compiled code included (tests/cpu/test_lengths.py).
CAPTURES_BYTES, LEAST_CAPTURES, NODE_BYTES = 512 << 20, 32, 1536
MANY_CAPTURES = 64  # then a warning says what helps
SLOW_PLANNING_S = 1.0  # to plan again for so long is announced
MAX_PREPARED = 4  # evaluations whose prepared weights are held at the same time
# Variants are tried by how often they were used. A use counts this much less after each later call: some twenty calls
# then tell the frequency of a random branch, and a dozen follow a branch that changes with the phase of training.
KEPT_SHARE = 0.95
MAX_OUTSIDE_STATES = 2  # of a place outside the model; one with more is ignored, and counts as it was when recorded
MAX_NEW_STATES = 8  # captures in a row that each leave the model in a new Python state
# One thread at a time: recording walks over all objects. If it meets a tuple that another thread is still building,
# Python raises a SystemError in that thread.
_PLANNING = threading.RLock()
_LOG = logging.getLogger("undertow")


class Variant:
    """One captured path through the model, ready to run with and without gradients."""

    def __init__(self, request: Request, captured: Captured, is_first: bool = True) -> None:
        self._request = request
        self.captured = captured
        self._is_first = is_first
        self.planning_s = 0.0
        self.differentiable = differentiable_outputs(captured.program)
        self.pattern = expected_pattern(request, captured)
        self.share = 0.0  # how many of the latest calls took this path
        self._steps: dict[Pattern, Step] = {}
        self._counted: dict[Step, Plan] = {}
        self.places: dict[Step, _Places] = {}

    def step(self) -> Step:
        """The step for the gradients that are expected."""
        return self.step_for(self.pattern)

    def step_for(self, pattern: Pattern, saved: SavedPlan | None = None) -> Step:
        """The step whose gradients come from the outputs marked in `pattern`; made by the saved plan, if it is new."""
        if pattern not in self._steps:
            with _PLANNING, unwatched():
                if pattern not in self._steps:  # another thread may have made it meanwhile
                    start_s = time.perf_counter()
                    self._steps[pattern] = make_step(self._request, self.captured, pattern, saved)
                    took_s = time.perf_counter() - start_s
                    self.planning_s += took_s
                    self._announce(took_s)
        return self._steps[pattern]

    def describe(self) -> Plan:
        """The plan of the step that is expected, with what its kernels take for themselves."""
        step = self.step()
        if step not in self._counted:
            with _PLANNING, unwatched():
                live = {**self.captured.live, **self._request.live}
                self._counted[step] = count_workspaces(self._request, step.plan, live)
        counted, notes = self._counted[step], step.describe().notes
        return counted if counted.notes == notes else replace(counted, notes=notes)

    def _announce(self, took_s: float) -> None:
        """Say that a step was planned; aloud where it was not the first one and took long."""
        is_slow = took_s > SLOW_PLANNING_S and not (self._is_first and len(self._steps) == 1)
        why = "arguments or a model of new types" if len(self._steps) == 1 else "gradients from other outputs"
        _LOG.log(
            logging.WARNING if is_slow else logging.INFO,
            "undertow planned a step in %.2f s: %s (%s)",
            took_s,
            why,
            describe_arguments(self.captured),
        )

    @property
    def num_bytes(self) -> int:
        """What the capture takes, counted by its nodes, and the constants that it holds."""
        plans = [step.plan for step in self._steps.values()]
        num_nodes = sum(len(plan.base.nodes) + len(plan.program.nodes) for plan in plans)
        constants = sum(tensor.nbytes for tensor in self.captured.constants.values())
        return NODE_BYTES * (len(self.captured.program.nodes) + num_nodes) + constants

    def forget_plans(self) -> None:
        """Plan again when a step is next asked for."""
        for step in self._steps.values():
            step.release_memory()
        self._steps.clear()
        self._counted.clear()
        self.places.clear()

    def remember(self, pattern: Pattern) -> None:
        """Expect the same gradients next time."""
        self.pattern = pattern


class _Followed:
    """A place outside the model's own attributes to which the forward pass assigned, such as a flag of a class."""

    def __init__(self, assignment: Any) -> None:
        self.place = assignment.place
        self._is_outside = assignment.is_outside
        self._found = {assignment.before}

    def see(self, assignment: Any) -> None:
        """Count another assignment, and what was there before."""
        self._found.add(assignment.before)

    @property
    def is_forgotten(self) -> bool:
        """Whether it changes at every call and does not belong to the model, as with a log."""
        return self._is_outside and len(self._found) > MAX_OUTSIDE_STATES

    def key(self) -> Any:
        """What is there."""
        return None if self.is_forgotten else self.place.key()


_PREPARED = object()  # stands for the prepared weights of a call


class _Places:
    """Where to find the inputs of a step at every call, as long as the model has these modules."""

    def __init__(self, captured: Any, step: Step, modules: dict[str, torch.nn.Module]) -> None:
        self.modules = modules
        place_of: Callable[[Input], Any] = lambda item: captured.place_of(item, modules)  # noqa: E731
        sources = step.preparation.inputs if step.preparation is not None else ()
        self._sources: list[tuple[Any, Any]] = [place_of(item) for item in sources]
        self._places: list[tuple[Any, Any]] = [
            (_PREPARED, item.value) if item.kind is InputKind.PREPARED else place_of(item)
            for item in step.program.inputs
        ]

    def find(self, step: Step, tensors: list[torch.Tensor]) -> list[Any]:
        """The inputs, of a call with these tensors."""
        if step.preparation is None:
            return [(tensors if holder is None else holder)[key] for holder, key in self._places]
        weights = [(tensors if holder is None else holder)[key] for holder, key in self._sources]
        prepared = step.preparation.values(weights)
        holders = ((prepared if holder is _PREPARED else holder, key) for holder, key in self._places)
        return [(tensors if holder is None else holder)[key] for holder, key in holders]


class Runner:
    """Finds or makes the capture that fits a call, and runs it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._variants: OrderedDict[Any, list[Variant]] = OrderedDict()
        self._last_lookup: tuple[Any, list[Variant]] = (), []  # comparing with it is cheaper than hashing
        self._last: Variant | None = None
        self._prepared: list[Step] = []  # steps that hold prepared weights, the last used at the end
        self._last_run: Step | None = None  # the only one that may hold an arena or a CUDA graph
        self._num_new_states = 0
        self._followed: list[_Followed] = []  # what forward was seen to assign beyond the model's attributes
        self._state = ModelState(request.model)
        self._num_captures, self._recording_s = 0, 0.0  # all so far, forgotten ones included
        self._has_warned = self._has_forgotten = False

    @property
    def plan(self) -> Plan:
        """The plan of the step that was last prepared or run; a call that was refused leaves it as it was."""
        assert self._last is not None
        return self._last.describe()

    @property
    def last_step(self) -> Step | None:
        """The step that was last prepared or run."""
        return None if self._last is None else self._last.step()

    def state_key(self) -> Any:
        """What of the model's state decides on the capture."""
        return self._state.key()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The model's parameters as the last call found them; asking the model itself takes longer."""
        return self._state.parameters()

    def forget(self) -> None:
        """Forget all captures: every call is captured and planned again."""
        self._variants.clear()
        self._last_lookup = (), []

    def forget_plans(self) -> None:
        """Plan every call again; what was captured stays."""
        for variants in self._variants.values():
            for variant in variants:
                variant.forget_plans()

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any], saved: SavedPlan | None = None) -> None:
        """Capture and plan the step for such a call, or take the plan that was saved; runs nothing."""
        variant = self.variant_for(args, kwargs)
        variant.step_for(variant.pattern, saved)
        self._last = variant

    def variant_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """The variant that was last used for such a call; captured now if there is none."""
        variants = self._lookup(args, kwargs, list_tensors(args, kwargs))
        return variants[-1] if variants else self._add(variants, args, kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = list_tensors(args, kwargs)
        if any(isinstance(tensor, TracedTensor) for tensor in tensors):
            return self.request.forward(*args, **kwargs)  # a model around this one is being captured
        _refuse_tangents(tensors)
        variants = self._lookup(args, kwargs, tensors)
        seen: tuple[Any, ...] = ()  # what this step's guards found so far
        while True:
            fitting = [variant for variant in variants if variant.captured.outcomes[: len(seen)] == seen]
            variant = _likeliest(fitting) if fitting else self._add(variants, args, kwargs)
            if variant.captured.newly_required:
                for place in variant.captured.newly_required:
                    tensors[place].requires_grad_()
                return self(*args, **kwargs)
            try:
                result = self._run(variant, tensors)
            except GuardMiss as miss:
                if not fitting:
                    raise CaptureError(
                        f"a branch on a tensor's value took another path when it was run than when it was captured "
                        f"(guard {miss.index} found {miss.found!r}): its operations do not repeat"
                    ) from None
                seen = (*variant.captured.outcomes[: miss.index], miss.found)
                continue
            if len(variants) > 1:
                variants.remove(variant)
                variants.append(variant)
                for item in variants:
                    item.share *= KEPT_SHARE
                variant.share += 1
            if fitting:
                self._num_new_states = 0
            self._last = variant
            return result

    def walk(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_run: Callable[[Node], bool]
    ) -> Iterator[tuple[Node, list[Any]]]:
        """Run the operations of a call one by one, giving each with its outputs; buffers are not updated."""
        variant = self.variant_for(args, kwargs)
        tensors = list_tensors(args, kwargs)
        step = variant.step()
        program = step.plan.base
        inputs = self._inputs(variant, step, tensors)
        environment = {item.value: tensor for item, tensor in zip(step.program.inputs, inputs, strict=True)}
        for node in filter(is_run, program.nodes):
            with below_autograd():
                run_node(node, environment, {**variant.captured.live, **self.request.live})
            yield node, [environment[value] for value in node.named_outputs]

    def _lookup(self, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> list[Variant]:
        followed = tuple([item.key() for item in self._followed])
        key = (structure_key(args), structure_key(kwargs), sharing(tensors), self._state.key(), followed)
        known, variants = self._last_lookup
        if key != known:
            variants = self._variants.setdefault(key, [])
            self._variants.move_to_end(key)
            if not variants:
                self._forget_oldest()
            self._last_lookup = key, variants
        return variants

    def _forget_oldest(self) -> None:
        """Make room for a new capture: what was not used for longest is recorded again when it is needed."""
        sizes = [sum(variant.num_bytes for variant in variants) for variants in self._variants.values()]
        num_bytes = sum(sizes)
        for size in sizes[: max(0, len(sizes) - LEAST_CAPTURES)]:
            if num_bytes <= CAPTURES_BYTES:
                break
            self._variants.popitem(last=False)
            self._has_forgotten, num_bytes = True, num_bytes - size

    def _warn_of_many(self, captured: Captured) -> None:
        """Say once that many types of arguments come, what that costs, and what helps."""
        if self._has_warned or not (self._num_captures >= MANY_CAPTURES or self._has_forgotten):
            return
        self._has_warned = True
        took_s = self._recording_s + sum(item.planning_s for items in self._variants.values() for item in items)
        forgotten = f"; more than {CAPTURES_BYTES >> 20} MiB of them are not kept" if self._has_forgotten else ""
        warnings.warn(
            f"{self._num_captures} different types of arguments were recorded and planned so far, which "
            f"took {took_s:.1f} s in all (the last: {describe_arguments(captured)}){forgotten}. Each new one is "
            f"recorded and planned at its first call. Pad to a few lengths to avoid that: see ut.buckets",
            stacklevel=2,
        )

    def _add(self, variants: list[Variant], args: Any, kwargs: Any) -> Variant:
        start_s = time.perf_counter()
        try:
            with _PLANNING, unwatched(), _without_hooks():
                captured = record(self.request, args, kwargs)
        except UndertowError:
            raise
        except Exception as error:
            self._fail_as_eager_does(args, kwargs)
            reason = str(error).strip().partition("\n")[0]
            raise CaptureError(
                f"the model runs, but recording it failed at {place_of(error)}: {reason}; "
                f"leave this part of the model unplanned (plan submodules instead)"
            ) from error
        if len(variants) >= MAX_OUTCOMES:
            guards = [node for node in captured.program.nodes if node.operation.is_guard]
            raise TooManyOutcomes(
                f"branches on tensor values, or numbers read from them, took more than {MAX_OUTCOMES} paths, the last "
                f"at {guards[-1].origin}: make the branch part of the computation (torch.where), move it out of the "
                f"model, or leave this part of the model unplanned; BatchNorm with momentum=None reads another number "
                f"at every step: give it a momentum"
            )
        self._refuse_ever_new_states(captured)
        self._follow(captured.assignments)
        variant = Variant(self.request, captured, is_first=self._num_captures == 0)
        variants.append(variant)
        self._num_captures += 1
        self._recording_s += time.perf_counter() - start_s
        self._warn_of_many(captured)
        return variant

    def _follow(self, assignments: tuple[Any, ...]) -> None:
        """Tell calls apart by what the forward pass assigns: another state is another capture."""
        if not assignments:
            return
        by_structure = [item.place for item in assignments if item.is_by_structure]
        self._state.mark_assigned((id(place.owner), place.name) for place in by_structure)
        for item in (item for item in assignments if not item.is_own):
            known = next((other for other in self._followed if other.place.is_at(item.place)), None)
            if known is not None:
                known.see(item)
                continue
            self._followed.append(_Followed(item))
            # Earlier captures were made for what was in the place before.
            self._variants = OrderedDict(
                ((*key[:-1], (*key[-1], item.before)), variants) for key, variants in self._variants.items()
            )
            self._last_lookup = (), []

    def _refuse_ever_new_states(self, captured: Any) -> None:
        """Raise if every call leaves a new state: a model that counts its calls would be captured at each of them."""
        names = [item.path for item in captured.assignments if not item.has_tensors and not item.is_outside]
        self._num_new_states = self._num_new_states + 1 if names else 0
        if self._num_new_states > MAX_NEW_STATES:
            raise CaptureError(
                f"the forward pass changes the Python attribute {', '.join(names)} at every call, and each value needs "
                f"a capture of its own; move the change out of forward, or keep it in a buffer"
            )

    def _fail_as_eager_does(self, args: Any, kwargs: Any) -> None:
        """Run the model itself, so that a wrong call gives eager's own error; generator and state are put back."""
        buffers = [(buffer, buffer.clone()) for buffer in self.request.model.buffers()]
        state = torch.get_rng_state()
        try:
            with torch.no_grad(), state_put_back(self.request.model, self.request.forward):
                self.request.forward(*args, **kwargs)
        finally:
            torch.set_rng_state(state)
            for buffer, before in buffers:
                buffer.data.copy_(before)

    def _inputs(self, variant: Variant, step: Step, tensors: list[torch.Tensor]) -> list[Any]:
        """The tensors that a step's inputs stand for, prepared weights included."""
        modules = self._state.modules
        if step not in variant.places or variant.places[step].modules is not modules:
            variant.places[step] = _Places(variant.captured, step, modules)
        return variant.places[step].find(step, tensors)

    def _run(self, variant: Variant, tensors: list[torch.Tensor]) -> Any:
        step = variant.step()
        needs_gradient = any(variant.pattern)
        self._release_others(step, needs_gradient)
        inputs = self._inputs(variant, step, tensors)
        states = [generator.get_state() for generator in step.generators if needs_gradient or step.has_guards]
        kept = {place: inputs[place].clone() for place in step.replayed_updates} if needs_gradient else {}
        try:
            outputs, slots = step.run_forward(inputs)
        except GuardMiss:
            for generator, state in zip(step.generators, states, strict=True):
                generator.set_state(state)
            raise
        for place, position in step.returned_inputs:
            outputs[place] = inputs[position]
        if needs_gradient:
            for place, old in kept.items():
                inputs[place] = old
            exposed = [outputs[place].detach() for place in step.exposed_outputs]
            run = Run(
                step=step,
                step_for=variant.step_for,
                inputs=inputs,
                versions=[tensor._version for tensor in inputs],
                slots=slots,
                exposed=[(tensor, tensor._version) for tensor in exposed],
                states=states,
                remember=variant.remember,
            )
            for slot in step.exposed_slots:
                slots[slot] = slots[slot].detach()
            attach_backward(run, outputs, variant.differentiable)
        for assignment in variant.captured.assignments:
            if not any(item.is_forgotten and item.place.is_at(assignment.place) for item in self._followed):
                assignment.apply(outputs)
        return fill_slots(variant.captured.skeleton, outputs)

    def expected_outputs(self, result: Any) -> list[torch.Tensor]:
        """The tensors from which the plan of the last call, which returned `result`, expects gradients."""
        assert self._last is not None
        assigned = [item.place.read() for item in self._last.captured.assignments if item.has_tensors]
        found = {id(tensor): tensor for _, tensor in tensors_in((result, assigned)) if tensor.requires_grad}
        places = [place_among_outputs(tensor) for tensor in found.values()]
        pattern = self._last.pattern
        # One of the user's hooks may have replaced an output.
        return [tensor for tensor, place in zip(found.values(), places, strict=True) if place is None or pattern[place]]

    def release_memory(self) -> None:
        """Free what the step that ran last holds between calls: its arena, its CUDA graph."""
        if self._last_run is not None:
            self._last_run.release_memory()

    def persistent_tensors(self) -> list[torch.Tensor]:
        """What is held between calls, apart from what the model holds."""
        return [block.memory for block in self.request.memory.free]

    def _release_others(self, step: Step, needs_gradient: bool) -> None:
        """Free other steps' arenas and CUDA graphs, and their prepared weights: all of these where gradients or a
        budget need the memory, else the oldest.
        """
        if self._last_run is not step:
            self.release_memory()
        self._last_run = step
        others = [item for item in self._prepared if item is not step]
        most = 0 if needs_gradient or step.plan.budget_bytes is not None else MAX_PREPARED - 1
        num_released = max(0, len(others) - most)
        for item in others[:num_released]:
            item.release_prepared()
        self._prepared = others[num_released:] + ([] if step.preparation is None else [step])


def describe_arguments(captured: Captured) -> str:
    """The names and types of a call's tensors."""
    given = [*captured.program.inputs, *captured.program.unread]
    return ", ".join(f"{item.path} {item.value.type}" for item in given if item.kind is InputKind.ARGUMENT)


def _likeliest(variants: list[Variant]) -> Variant:
    """The variant that most of the latest calls took; among equals, the one that was last used."""
    return variants[0] if len(variants) == 1 else max(reversed(variants), key=lambda variant: variant.share)


def _refuse_tangents(tensors: list[torch.Tensor]) -> None:
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(item).tangent is not None for item in tensors):
        raise UndertowError(
            "forward-mode differentiation through a planned module is not supported; call the module itself"
        )


def _without_hooks() -> AbstractContextManager[Any]:
    """Keep the user's hooks on saved tensors out, such as torch.utils.checkpoint's: they are for what runs."""
    if not has_saved_tensor_hooks():
        return nullcontext()
    # Without history: an operation that saves its own output would hold itself for ever.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)


def sharing(tensors: list[torch.Tensor]) -> Any:
    """Which arguments are the same tensor, and which lie in the same memory."""
    ids = [id(tensor) for tensor in tensors]
    if len(ids) < 2:
        return ()
    storages = [
        id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata for tensor in tensors
    ]
    return tuple(map(ids.index, ids)), tuple(map(storages.index, storages))
