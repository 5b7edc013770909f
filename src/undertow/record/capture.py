"""Capture: a module or function and example arguments in, the forward pass as a Program out.

The code is run once on tensors without data. Nothing of the user's is changed. While the code runs, traced twins
replace parameters and buffers. Afterwards these and the attributes that the code assigned are put back. Generators keep
their state. Not captured: Python side effects other than assigned attributes; where they are noticed, they are refused.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir import Input, InputKind, Node, Program, Update, Value, check_program
from undertow.ir.cleaning import remove_unused
from undertow.ir.pytorch import operation_of
from undertow.ir.structure import ATOMS, Slot, fill_slots, keep_objects, replace_tensors, structure_key, tensors_in
from undertow.record.functions import opaque_functions
from undertow.record.lazy_modules import refuse_lazy
from undertow.record.loss_branches import eager_losses
from undertow.record.python_state import Change, Place, Reach, key_of
from undertow.record.recorder import CaptureRecorder
from undertow.record.side_effects import AttributeWatch, GeneratorWatch, PythonRandomness, has_traced, no_seeding
from undertow.torch_internals import FAKE_TENSOR_LOGGER, disable_current_modes

# Recording replaces functions of PyTorch and attributes of the model while it runs: one thread at a time.
_RECORDING = threading.RLock()
_NUM_RECORDED: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Assignment:
    """What the forward pass assigns: an attribute, a hook, a flag of a class. `before` is the key of what was there."""

    path: str
    place: Place
    before: Any
    skeleton: Any
    reach: Reach
    has_tensors: bool  # whether outputs of the step are put into the skeleton

    def apply(self, outputs: list[Any]) -> None:
        """Assign it, with the outputs of a step."""
        self.place.write(fill_slots(self.skeleton, outputs))

    @property
    def is_own(self) -> bool:
        """Whether it is an attribute, a parameter, a buffer, a submodule or a hook of a module."""
        return self.reach is Reach.OWN

    @property
    def is_outside(self) -> bool:
        """Whether it does not belong to the model: an attribute of a class, a global."""
        return self.reach is Reach.FAR

    @property
    def is_by_structure(self) -> bool:
        """Whether calls are told apart by the structure of what is assigned, and not by its identity."""
        return self.is_own and (self.has_tensors or isinstance(self.skeleton, ATOMS))


def _make_assignment(change: Change, slot: Callable[[torch.Tensor], Slot]) -> Assignment:
    has_tensors = has_traced(change.after)
    skeleton = replace_tensors(change.after, slot) if has_tensors else keep_objects(change.after)
    return Assignment(change.path, change.place, key_of(change.before), skeleton, change.reach, has_tensors)


@dataclass(frozen=True, eq=False)
class Captured:
    """A forward pass, the structure of what it returns, and the tensors that it found outside its arguments.

    The Program's outputs are the tensors of the result in order, then the tensors of the assignments. Where the result
    holds a tensor, a skeleton holds a Slot with the number of the output.
    """

    program: Program
    skeleton: Any
    assignments: tuple[Assignment, ...]
    constants: dict[Value, torch.Tensor]
    arguments: dict[Value, int]  # which of the call's tensors an argument is, counted through args, then kwargs
    live: dict[str, Any]  # generators and custom Functions that the Program names
    outcomes: tuple[Any, ...]  # what the guards saw, in order
    newly_required: tuple[int, ...]  # arguments on which the code called requires_grad_()

    def tensor_behind(self, item: Input, tensors: list[torch.Tensor], modules: dict[str, torch.nn.Module]) -> Any:
        """The tensor that an input stands for: one of the call's `tensors`, or what a module holds at this call."""
        holder, key = self.place_of(item, modules)
        return (tensors if holder is None else holder)[key]

    def place_of(self, item: Input, modules: dict[str, torch.nn.Module]) -> tuple[Any, Any]:
        """The holder of the tensor that an input stands for, and its key there; no holder for tensors of the call."""
        if item.kind is InputKind.ARGUMENT:
            return None, self.arguments[item.value]
        if item.kind is InputKind.CONSTANT:
            return self.constants, item.value
        owner, _, name = item.path.rpartition(".")
        module = modules[owner]
        groups: dict[InputKind, Any] = {InputKind.PARAMETER: module._parameters, InputKind.BUFFER: module._buffers}
        return groups.get(item.kind, module.__dict__), name


def capture(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], module: Any = None
) -> Captured:
    """Record `function(*args, **kwargs)`; `module` is the module whose parameters and buffers are inputs."""
    modules = dict(module.named_modules()) if module is not None else {}
    _refuse_unrecordable(modules)
    with _RECORDING:
        randomness = PythonRandomness(is_thorough=module is not None and _is_due(module))
        captured = _capture(function, args, kwargs, modules)
        if randomness.was_drawn_from():
            line = randomness.find_draw(lambda: _capture(function, args, kwargs, modules))
            raise CaptureError(
                f"{line} draws from Python's or NumPy's random generator: a recorded step would repeat the same "
                f"number; draw it with torch (torch.rand(())), or pass it in as an argument"
            )
    return captured


def _is_due(module: Any) -> bool:
    """Whether all of Python's objects are searched for generators: at the recordings 1, 2, 4, 8, ... of a module."""
    count = _NUM_RECORDED[module] = _NUM_RECORDED.get(module, 0) + 1
    return count & (count - 1) == 0


def _capture(function: Callable[..., Any], args: Any, kwargs: Any, modules: dict[str, torch.nn.Module]) -> Captured:
    recorder = CaptureRecorder({id(module): path for path, module in modules.items()})
    # An outer capture must not see what this one does.
    with (
        disable_current_modes(),
        _traced_parameters(recorder, modules),
        _fresh_autocast_cache(),
        _quiet_fake_tensors(),
    ):
        watch = AttributeWatch(modules, function, recorder)
        generators = GeneratorWatch(modules, (args, kwargs))
        arguments = _trace_arguments(recorder, function, args, kwargs)
        traced = replace_tensors((args, kwargs), recorder.lift)
        before = _contents(traced)
        try:
            with (
                opaque_functions(recorder),
                eager_losses(recorder),
                no_seeding(recorder),
                _outside_inference_mode(),
                recorder,
            ):
                result = function(*traced[0], **traced[1])
        finally:
            changes, refused = watch.undo()
    if _contents(traced) != before:
        raise CaptureError(
            "the forward pass changes an object that it was given (a dict, a list, a cache): a recorded step would "
            "not change it again; return the new tensors instead"
        )
    if refused:
        raise CaptureError(
            f"the forward pass changes Python state that a recorded step would not change again: "
            f"{', '.join(refused)}; move the change out of forward, or keep it in a buffer; if only the first call "
            f"makes it, call the model once before planning"
        )
    generators.refuse_changes()
    captured = _finish(recorder, result, changes, arguments)
    recorder.release()
    return captured


def _contents(arguments: Any) -> Any:
    """Which tensor is where in the arguments, and the plain values among them."""
    without_tensors = replace_tensors(arguments, lambda tensor: None)
    return [(path, id(tensor)) for path, tensor in tensors_in(arguments)], structure_key(without_tensors)


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    # PyTorch logs a traceback when a call is wrong; the error itself already says so.
    logger = logging.getLogger(FAKE_TENSOR_LOGGER)
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


@contextmanager
def _outside_inference_mode() -> Iterator[None]:
    # In inference mode PyTorch skips dispatch keys that a recorder needs to see the parts of composite operations.
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def _fresh_autocast_cache() -> Iterator[None]:
    # Cached casts of real weights must not get into the Program, nor casts of twins into the user's autocast region.
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def _traced_parameters(recorder: CaptureRecorder, modules: dict[str, torch.nn.Module]) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, module in modules.items():
            groups: list[tuple[InputKind, dict[str, Any]]] = [
                (InputKind.PARAMETER, module._parameters),
                (InputKind.BUFFER, module._buffers),
            ]
            for kind, tensors in groups:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        replaced.append((tensors, name, tensor))
                        tensors[name] = recorder.add_input(tensor, kind, f"{path}.{name}".lstrip("."))
        recorder.exchanged += [(tensors, name, tensor, tensors[name]) for tensors, name, tensor in replaced]
        for path, module in modules.items():
            for name, item in module.__dict__.items():
                if isinstance(item, torch.Tensor):
                    replaced.append((module.__dict__, name, item))
                    place = f"{path}.{name}".lstrip(".")
                    module.__dict__[name] = recorder.add_input(item, InputKind.ATTRIBUTE, place)
                elif type(item) is list and any(recorder.find_twin(part) is not None for part in item):
                    replaced.append((module.__dict__, name, item))
                    module.__dict__[name] = [_twin_or_self(recorder, part) for part in item]
        yield
    finally:
        for tensors, name, tensor in replaced:
            tensors[name] = tensor
        recorder.exchanged.clear()


def _twin_or_self(recorder: CaptureRecorder, item: Any) -> Any:
    """Recurrent layers hold their weights, and weak references to them, a second time in plain lists."""
    twin = recorder.find_twin(item)
    if twin is None:
        return item
    return weakref.ref(twin) if isinstance(item, weakref.ref) else twin


def _trace_arguments(recorder: CaptureRecorder, function: Any, args: Any, kwargs: Any) -> dict[Value, int]:
    names = _positional_names(function, len(args))
    places: dict[Value, int] = {}
    items = [*zip(names, args, strict=True), *kwargs.items()]
    for place, (path, tensor) in enumerate(found for name, item in items for found in tensors_in(item, name)):
        places.setdefault(recorder.value_of(recorder.add_input(tensor, InputKind.ARGUMENT, path)), place)
    return places


def _positional_names(function: Any, count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # functions written in C, such as torch.maximum, have none
        parameters = []
    names = [item.name for item in parameters if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]
    return [names[index] if index < len(names) else f"args[{index}]" for index in range(count)]


def _finish(recorder: CaptureRecorder, result: Any, changes: list[Change], arguments: dict[Value, int]) -> Captured:
    outputs: list[Value] = []

    def slot(tensor: torch.Tensor) -> Slot:
        value = recorder.value_of(tensor)
        if value not in outputs:
            outputs.append(value)
        return Slot(outputs.index(value))

    skeleton = replace_tensors(result, slot)
    assignments = tuple(_make_assignment(change, slot) for change in changes)
    updates = []
    for item in recorder.inputs:
        storage = recorder.tensors[item.value].alias.storage if item.value in recorder.tensors else None
        if storage is not None and storage.version > 0:
            updates.append(Update(item.value, storage.value))
    _refuse_shared_updates(recorder, updates)
    inputs, nodes = tuple(recorder.inputs), tuple(recorder.nodes)
    program = Program(
        inputs=inputs,
        nodes=tuple(_without_false_detach(recorder, node) for node in nodes),
        outputs=tuple(outputs),
        updates=tuple(updates),
        differentiable=recorder.differentiable_values([item.value for item in inputs]),
        boundary=len(nodes),
    )
    program = check_program(remove_unused(program))
    _refuse_lost_history(recorder, program)
    constants = {item.value: recorder.reals[item.value] for item in program.inputs if item.kind is InputKind.CONSTANT}
    newly_required = tuple(
        place
        for value, place in arguments.items()
        if not recorder.reals[value].requires_grad and any(twin.requires_grad for twin in recorder.holders(value))
    )
    return Captured(
        program,
        skeleton,
        assignments,
        constants,
        arguments,
        dict(recorder.live),
        tuple(recorder.outcomes),
        newly_required,
    )


def _without_false_detach(recorder: CaptureRecorder, node: Node) -> Node:
    """Autograd detaches an output that it saves, and connects it again when it is read: the history goes on."""
    if node.target is not torch.ops.aten.detach.default or node.outputs[0] is None:
        return node
    return (
        replace(node, operation=operation_of(torch.ops.aten.alias.default))
        if _has_history(recorder, node.outputs[0])
        else node
    )


def _has_history(recorder: CaptureRecorder, value: Value) -> bool:
    # For a view of a tensor that was written in place, asking for the history runs view operations.
    with recorder:
        return any(tensor.grad_fn is not None for tensor in recorder.holders(value))


def _refuse_lost_history(recorder: CaptureRecorder, program: Program) -> None:
    """Raise if autograd carries a gradient along a path that was not recorded (TorchScript has its own)."""
    for node in program.nodes:
        for value in node.named_outputs:
            is_unexplained = not any(item in program.differentiable for item in node.inputs)
            if value in program.differentiable and is_unexplained and _has_history(recorder, value):
                raise CaptureError(
                    f"the gradient that reaches {node.name} ({node.origin}) takes a path that cannot be recorded, "
                    f"such as through a TorchScript function; use the Python function it was made from"
                )


def _refuse_shared_updates(recorder: CaptureRecorder, updates: list[Update]) -> None:
    for update in updates:
        memory = recorder.reals[update.input].untyped_storage().data_ptr()
        for value, real in recorder.reals.items():
            if value is not update.input and memory and real.untyped_storage().data_ptr() == memory:
                raise CaptureError(
                    f"{update.input} is written in place and shares memory with {value}; clone one of them"
                )


def _refuse_unrecordable(modules: dict[str, torch.nn.Module]) -> None:
    refuse_lazy(modules)
    for path, module in modules.items():
        if path and (module._backward_hooks or module._backward_pre_hooks):
            raise CaptureError(
                f"module {path} has a backward hook, which would not run in a planned step; "
                f"hook a parameter instead, or remove it before planning"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {path or 'given'} is a TorchScript module; plan the Python module it was made from"
            )
