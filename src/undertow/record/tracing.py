"""Recording tensor code as nodes.

In: ordinary tensor code, run under a `Recorder`. Out: the nodes it consists of, functional and single-assignment.

The code runs on `TracedTensor`s, which have no data. Recording happens below autograd, so a Program holds exactly the
operations for which eager PyTorch makes a node of its own graph, autocast's casts included.

In-place operations become functional ones. A storage has a current value, and a view is a chain of view operations
from it. A write computes a new value of the storage, and the other views are read again from it when they are next
used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from undertow.errors import CaptureError
from undertow.ir import Live, Node, Operation, Origin, Phase, TensorType, Value
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import (
    bind_arguments,
    flatten_outputs,
    functional_of,
    is_mutated,
    is_type_found_by_running,
    schema_of,
)
from undertow.ops.modes import below_autograd
from undertow.ops.own import (
    REPLACE_VALUE,
    RESTRIDE,
    WRITE_VIEW,
    default_generator,
    default_generator_of,
    functional,
)
from undertow.record.outlines import Made, Outline, find_outlines
from undertow.record.traced_tensor import Alias, Storage, TracedTensor
from undertow.record.views import ViewStep, take_part, write_through
from undertow.rules.registry import find_op
from undertow.torch_internals import (
    DisableTorchDispatch,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    disable_current_modes,
    dispatcher_files,
    load_dynamo,
)

load_dynamo()  # PyTorch would import it at the first recording, and register types of its own then

aten = torch.ops.aten

_FAKE_LOG = logging.getLogger(FakeTensorMode.__module__)
_GENERATOR = type(torch.default_generator)  # while a model is recorded, torch.Generator is a stand-in
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_WITHOUT_TENSORS = frozenset((int, float, bool, str, type(None), torch.Size, torch.dtype, torch.device))
_QUERIES = {aten.is_pinned.default, aten.sym_size.default, aten.sym_stride.default, aten.sym_numel.default}


class Recorder(TorchDispatchMode):
    """Records every operation run under it. Subclasses say where operations come from and what may be read."""

    takes_parts = True  # a backward pass writes only into its own new tensors, and need not
    phase = Phase.FORWARD

    def __init__(self, fake_mode: FakeTensorMode, names: Namer) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.names = names
        self.nodes: list[Node] = []
        self.tensors: dict[Value, TracedTensor] = {}
        self.second_tensors: dict[Value, list[TracedTensor]] = {}
        self.settled_requires_grad: dict[Value, bool] = {}
        self.live: dict[str, Any] = {}

    def origin(self) -> Origin:
        """Where the operation being recorded comes from."""
        raise NotImplementedError

    def lift(self, tensor: torch.Tensor) -> TracedTensor:
        """The traced twin of a real tensor that the code found outside its arguments."""
        raise NotImplementedError

    def real_after_capture(self, tensor: TracedTensor) -> torch.Tensor:
        """The real tensor behind one that outlived its capture."""
        raise CaptureError(f"{self.origin()}: a tensor of another capture is used here")

    def read_scalar(self, tensor: TracedTensor) -> Any:
        """The number in a tensor that the code branches on."""
        raise NotImplementedError

    def run_for_types(self, func: OpOverload, args: Any, kwargs: Any, error: Exception) -> Any:
        """The fake result of an operation that failed on fake tensors, perhaps because its shape depends on values."""
        raise error

    def refuse(self, what: str, way_out: str) -> Any:
        """Raise a CaptureError that names the line."""
        raise CaptureError(f"{what} cannot be recorded: {self.origin()}; {way_out}")

    def refuse_layouts(self, func: OpOverload, arguments: Any, result: Any) -> None:
        """Raise a CaptureError if an operation returned a tensor that is not dense and strided."""
        layouts = [unusual_layout(tensor) for tensor in flatten_outputs(result) if tensor is not None]
        # The fake kernels of quantization return float32.
        layouts += ["quantized" for item in arguments if isinstance(item, torch.dtype) and item in _QUANTIZED]
        if any(layouts):
            self.refuse(
                f"{operation_of(func)}, which makes a tensor of layout {max(layouts)},",
                "only dense strided tensors can be planned: keep it dense, or leave this part unplanned",
            )

    @contextmanager
    def on_fakes(self) -> Iterator[None]:
        """Run what is inside on fake tensors, unrecorded."""
        # PyTorch would print the traceback of a failure before the caller has tried another way.
        was_disabled, _FAKE_LOG.disabled = _FAKE_LOG.disabled, True
        try:
            with disable_current_modes(), self.fake_mode:
                yield
        finally:
            _FAKE_LOG.disabled = was_disabled

    def new_tensor(self, value: Value) -> TracedTensor:
        """A traced tensor for a value that exists already."""
        return self.adopt(Outline(self.fake_mode, value.tensor_type), value)

    def outline_of(self, fake: torch.Tensor | Outline) -> Outline:
        """The outline of a FakeTensor."""
        return fake if isinstance(fake, Outline) else Outline.of_fake(self.fake_mode, fake)

    def adopt(self, fake: torch.Tensor | Outline, value: Value, alias: Alias | None = None) -> TracedTensor:
        """A traced tensor with the outline of `fake`, holding `value`."""
        outline = self.outline_of(fake)
        tensor = TracedTensor(outline, self)
        tensor.alias = alias or Alias(Storage(value, outline), (), value, 0)
        tensor.alias.storage.tensors.append(tensor)
        self.tensors.setdefault(value, tensor)
        return tensor

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The current value of a tensor, reading it again from its storage if that was written since."""
        if type(tensor) is not TracedTensor or tensor.recorder is not self:
            tensor = self.traced(tensor)
        alias = tensor.alias
        if alias.version != alias.storage.version:
            value, fake = alias.storage.value, alias.storage.fake
            for step in alias.steps:
                value, fake = self.emit_view(step, value, fake)
            alias.value, alias.version = value, alias.storage.version
            self.tensors.setdefault(value, tensor)
        return alias.value

    def traced(self, tensor: torch.Tensor) -> TracedTensor:
        """`tensor` itself if it is traced, else its lifted twin."""
        if isinstance(tensor, TracedTensor):
            return tensor if tensor.recorder is self else self.lift(tensor.recorder.real_after_capture(tensor))
        return self.lift(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, args, kwargs or {})

    def dispatch(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record one operation; PyTorch wraps `__torch_dispatch__` itself, of every subclass, in two more calls."""
        if func.namespace == "prim" or func in _QUERIES:
            fake_args, fake_kwargs = self.fakes_of((args, kwargs))
            return func(*fake_args, **fake_kwargs)
        if func is aten._local_scalar_dense.default:
            return self.read_scalar(self.traced(args[0]))
        if func is aten.detach.default and not args[0].requires_grad:
            # Autograd detaches what it saves, factories what they make: a second name for the same value.
            source = self.traced(args[0])
            value = self.value_of(source)
            second = self.adopt(source.outline, value, replace(source.alias))
            self.second_tensors.setdefault(value, []).append(second)
            return second
        if schema_of(func).mutated and is_mutated(func, bind_arguments(func, args, kwargs)):
            return self._record_mutation(func, args, kwargs)
        made = self._find_outlines(func, args, kwargs)
        if made is not None:
            return self._record(func, args, kwargs, *made)
        fake_args, fake_kwargs = self.fakes_of((args, kwargs))
        try:
            result = self._run_on_fakes(func, fake_args, fake_kwargs)
        except Exception as error:
            result = self.run_for_types(func, args, kwargs, error)
            if not isinstance(result, torch.Tensor | tuple | list):
                return result
        self.refuse_layouts(func, (*args, *kwargs.values()), result)
        outlines = [None if fake is None else self.outline_of(fake) for fake in flatten_outputs(result)]
        return self._record(func, args, kwargs, outlines if result is not None else [], result)

    def _find_outlines(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Made | None:
        """What an operation gives, where no FakeTensor is needed to tell."""
        outlines = map_tensors(args, self._outline_of)
        return find_outlines(self.fake_mode, func, outlines, map_tensors(kwargs, self._outline_of) if kwargs else {})

    def _outline_of(self, tensor: torch.Tensor) -> Outline:
        return self.traced(tensor).outline

    def _run_on_fakes(self, func: OpOverload, fake_args: Any, fake_kwargs: dict[str, Any]) -> Any:
        """Fakes with the types that the real kernel gives."""
        with self.on_fakes():
            result = func(*fake_args, **fake_kwargs)
        is_view = schema_of(func).is_view
        arguments = flatten_outputs((fake_args, tuple(fake_kwargs.values())))
        tensors = [tensor for tensor in arguments if tensor is not None and (is_view or tensor.device.type == "cpu")]
        if not is_type_found_by_running(func, tensors, flatten_outputs(result)):
            return result
        if is_view:
            with disable_current_modes():
                found = func(*map_tensors(fake_args, _meta_like), **fake_kwargs)
            with self.on_fakes():
                return result.as_strided(found.shape, found.stride())
        return self.run_on_zeros(func, fake_args, fake_kwargs, result)

    def run_on_zeros(self, function: Any, fake_args: Any, fake_kwargs: dict[str, Any], otherwise: Any) -> Any:
        """Fakes of what kernels give on zeros; `otherwise` where one refuses zeros, as the inverse of a matrix does."""
        generators = [item for item in (*fake_args, *fake_kwargs.values()) if isinstance(item, torch.Generator)]
        states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
        fakes: dict[int, torch.Tensor] = {}  # of the arguments, for operations that return one

        def make_zeros(fake: torch.Tensor) -> torch.Tensor:
            zeros = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device).zero_()
            fakes[id(zeros)] = fake
            return zeros

        try:
            with disable_current_modes(), below_autograd():
                args, kwargs = map_tensors((fake_args, fake_kwargs), make_zeros)
                result = function(*args, **kwargs)
                return map_tensors(result, lambda t: fakes[id(t)] if id(t) in fakes else self.fake_like(t))
        except RuntimeError:
            return otherwise
        finally:
            for generator, state in states:
                generator.set_state(state)

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor with the type of a real one."""
        with self.on_fakes():
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return fake.requires_grad_(tensor.requires_grad)

    def emit(
        self, target: Any, args: Any, kwargs: dict[str, Any], fakes: Sequence[torch.Tensor | Outline | None]
    ) -> list[Any]:
        """Append a node whose outputs have the types of `fakes`; returns its output Values."""
        operation = operation_of(target)
        outputs = tuple([None if fake is None else self.names.value(operation, _type_of(fake)) for fake in fakes])
        self.nodes.append(Node(operation, args, kwargs, outputs, self.origin(), self.phase))
        return list(outputs)

    def emit_view(self, step: ViewStep, value: Value, fake: torch.Tensor) -> tuple[Value, Any]:
        """Append the view `step` of `value`."""
        outputs = flatten_outputs(self._run_on_fakes(step.target, (fake, *step.args), dict(step.kwargs)))
        values = self.emit(step.target, (value, *step.args), dict(step.kwargs), outputs)
        return values[step.output_index], outputs[step.output_index]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> tuple[Value, torch.Tensor]:
        """Append `target(*args)` where tensor arguments are (value, fake) pairs; for the recorder's own insertions."""
        with self.on_fakes():
            fake = target(*(arg[1] if _is_pair(arg) else arg for arg in args), **kwargs)
        (value,) = self.emit(target, tuple(arg[0] if _is_pair(arg) else arg for arg in args), kwargs, [fake])
        return value, fake

    def _record(self, func: OpOverload, args: Any, kwargs: Any, made: list[Outline | None], result: Any) -> Any:
        """Append a call and return what it gives; `result` is what it gave, or the kind of sequence that it gives."""
        schema = schema_of(func)
        value_args, value_kwargs = self.values_of(args), {name: self.values_of(item) for name, item in kwargs.items()}
        value_kwargs = _explicit_factory_options(func, value_kwargs, made)
        values = self.emit(func, value_args, value_kwargs, made)
        if len(made) == 1 and not schema.is_view and made[0] is not None and schema.returns_single:
            return self.adopt(made[0], values[0])
        source = self.traced(args[0]).alias if schema.is_view and isinstance(args[0], torch.Tensor) else None
        tensors: list[TracedTensor | None] = []
        for index, (value, outline) in enumerate(zip(values, made, strict=True)):
            if value is None or outline is None:
                tensors.append(None)
                continue
            alias = None
            if source is not None:
                step = ViewStep(func, tuple(value_args[1:]), value_kwargs, index)
                alias = Alias(source.storage, (*source.steps, step), value, source.storage.version)
            tensors.append(self.adopt(outline, value, alias))
        if isinstance(result, type):
            return result(tensors)
        if not isinstance(result, tuple | list):
            return tensors[0] if tensors else None
        numbers = iter(tensors)
        rebuilt = [next(numbers) if isinstance(item, torch.Tensor) else _skip(item, numbers) for item in result]
        return rebuilt if isinstance(result, list) else tuple(rebuilt)

    def _record_mutation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        if func is aten.set_.source_Storage and _is_called_by(torch.nn.modules.rnn.__file__):
            return args[0]  # it asks whether its weights share one storage; if they do not, it packs them itself
        if torch.Tag.inplace_view in func.tags and functional_of(func) is not None and func.namespace == "aten":
            if func.overloadpacket is aten.set_:
                self.refuse("giving a tensor another storage (set_)", "make a new tensor instead")
            return self._record_inplace_view(func, args, kwargs)
        is_known = schema_of(func).is_inplace and not schema_of(func).is_random
        out_of_place = functional_of(func) if is_known else None
        if out_of_place is None or find_op(func) is not None:
            return self._record_generic_mutation(func, args, kwargs)
        target = self.traced(args[0])
        self.take_part(target)
        found = self._find_outlines(out_of_place, args, kwargs)
        if found is not None and found[0][0] is not None and found[0][0].type == target.outline.type:
            return self._record_write(target, out_of_place, args, kwargs, found[0][0])
        fake_args, fake_kwargs = self.fakes_of((args, kwargs))
        fake = self._run_on_fakes(out_of_place, fake_args, fake_kwargs)
        if fake.stride() != target.fake.stride() or fake.dtype != target.fake.dtype:
            # Kernels choose vectorised or scalar code by strides, and the two differ in the last bit for exp, tanh
            # and others. So what eager computes in a strided view must have the same strides here.
            return self._record_generic_mutation(func, args, kwargs)
        with self.fake_mode:
            func(*fake_args, **fake_kwargs)
        return self._record_write(target, out_of_place, args, kwargs, fake)

    def _record_write(
        self, target: TracedTensor, computing: Any, args: Any, kwargs: Any, fake: torch.Tensor | Outline
    ) -> Any:
        """Append the operation that computes what is written over the first argument, `target`."""
        value_args, value_kwargs = self.values_of(args), {name: self.values_of(item) for name, item in kwargs.items()}
        (value,) = self.emit(computing, value_args, value_kwargs, [fake])
        self.write(target, value, fake)
        return args[0]

    def _record_inplace_view(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Operations such as `x.t_()`: the same memory with another shape."""
        target, out_of_place = self.traced(args[0]), functional_of(func)
        assert out_of_place is not None
        self._settle(target)
        step = ViewStep(out_of_place, map_tensors(tuple(args[1:]), self.value_of), kwargs, 0)
        value, fake = self.emit_view(step, self.value_of(target), target.fake)
        target.outline = self.outline_of(fake)
        target.alias = Alias(target.alias.storage, (*target.alias.steps, step), value, target.alias.storage.version)
        self.tensors[value] = target
        if func is not aten.detach_.default:
            with DisableTorchDispatch():
                func(*args, **kwargs)
        return args[0]

    def _record_generic_mutation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        bound = bind_arguments(func, args, kwargs)
        mutated = [bound[name] for name in schema_of(func).mutated]
        if not all(isinstance(item, torch.Tensor | None) for item in mutated):
            self.refuse(f"the in-place operation {operation_of(func)} on a list of tensors", "write it per tensor")
        targets = [self.traced(item) for item in mutated if item is not None]
        if len(targets) == 1:
            self.take_part(targets[0])
        if schema_of(func).is_inplace and schema_of(func).is_random and len(tensors_of((args, kwargs))) == 1:
            # A fill with random numbers keeps the type of what it fills.
            return self._record_write(targets[0], functional(operation_of(func)), args, kwargs, targets[0].outline)
        value_args, value_kwargs = self.values_of(args), {name: self.values_of(item) for name, item in kwargs.items()}
        fake_args, fake_kwargs = self.fakes_of((args, kwargs))
        shapes = [target.fake.shape for target in targets]
        result = self._run_on_fakes(func, fake_args, fake_kwargs)
        if any(target.fake.shape != shape for target, shape in zip(targets, shapes, strict=True)):
            self.refuse(f"{operation_of(func)}, which changes a tensor's size in place", "make a new tensor instead")
        fakes = flatten_outputs(result) if result is not None else []
        fresh = [fake for fake in fakes if not any(fake is target.fake for target in targets)]
        made = [*fresh, *(target.fake for target in targets)]
        values = self.emit(functional(operation_of(func)), value_args, value_kwargs, made)
        for target, value in zip(targets, values[len(fresh) :], strict=True):
            self.write(target, value, target.fake)
        tensors = [
            None if fake is None else self.adopt(fake, value) for fake, value in zip(fresh, values, strict=False)
        ]
        if not fresh:
            return mutated[0]
        return tensors[0] if schema_of(func).returns_single else tuple(tensors)

    def take_part(self, target: TracedTensor) -> None:
        """Before a write through a view: read the part and the rest of the storage by one node."""
        self.value_of(target)
        alias, storage = target.alias, target.alias.storage
        if not alias.steps or not self.takes_parts or any(step.target is aten.detach.default for step in alias.steps):
            return
        taken = take_part(*(step.as_data() for step in alias.steps))
        with self.on_fakes():
            part = taken(storage.fake)[0]
        alias.value, storage.value = self.emit(taken, (storage.value,), {}, [part, storage.fake])

    def write(self, target: TracedTensor, value: Value, made: torch.Tensor | Outline) -> None:
        """Let `target` hold `value`, which looks like `made`, and with it everything that shares its storage."""
        old_value, alias = self.value_of(target), target.alias
        for tensor in alias.storage.tensors:
            self._settle(tensor)
        if target.requires_grad and not torch.is_grad_enabled():
            value, made = self.call(REPLACE_VALUE, (old_value, target.fake), (value, self.outline_of(made).fake))
        storage, new_value = alias.storage, value
        if alias.steps:
            fake = self.outline_of(made).fake
            if not alias.steps[-1].is_part and torch.is_grad_enabled():
                value, fake = self.call(WRITE_VIEW, (value, fake))
            new_value, new_fake = write_through(self, storage.value, storage.fake, alias.steps, value, fake)
            if new_fake.stride() != storage.fake.stride():
                new_value, new_fake = self.call(RESTRIDE, (new_value, new_fake), tuple(storage.fake.stride()))
        storage.value, storage.version = new_value, storage.version + 1
        alias.value, alias.version = value, storage.version
        self.tensors[value] = target

    def differentiable_values(self, inputs: Sequence[Value]) -> frozenset[Value]:
        """The values through which eager would carry a gradient, from the tensors' own `requires_grad`."""
        differentiable = {value for value in inputs if self.requires_grad(value)}
        for node in self.nodes:
            depends = any(value in differentiable for value in node.inputs)
            for value in node.outputs:
                if value is None or not value.type.is_differentiable:
                    continue
                known = self.requires_grad(value)
                if known or (known is None and depends):
                    differentiable.add(value)
        return frozenset(differentiable)

    def release(self) -> None:
        """Drop the traced tensors: their histories are in C++, where the garbage collector does not look for cycles."""
        for tensor in {id(item): item for value in self.tensors for item in self.holders(value)}.values():
            value = tensor.alias.value
            tensor.alias.storage.tensors.clear()
            vars(tensor).clear()
            tensor.recorder, tensor.value_at_end = self, value
        self.tensors.clear()
        self.second_tensors.clear()

    def requires_grad(self, value: Value) -> bool | None:
        """Whether eager carries a gradient through the tensor that holds `value`; None if no tensor does."""
        if value in self.settled_requires_grad:
            return self.settled_requires_grad[value]
        holders = self.holders(value)
        return any(tensor.requires_grad for tensor in holders) if holders else None

    def holders(self, value: Value) -> list[TracedTensor]:
        """The tensors that hold `value`."""
        return ([self.tensors[value]] if value in self.tensors else []) + self.second_tensors.get(value, [])

    def _settle(self, tensor: TracedTensor) -> None:
        # A write may give the tensor a history: whether the old value had one must be asked before.
        self.settled_requires_grad.setdefault(tensor.alias.value, tensor.requires_grad)

    def values_of(self, arguments: Any) -> Any:
        """`arguments` with every tensor replaced by its current value, and every generator by its name."""
        kind = type(arguments)
        if kind in _WITHOUT_TENSORS:
            return arguments
        if isinstance(arguments, torch.Tensor):
            return self.value_of(arguments)
        if isinstance(arguments, tuple | list):
            return tuple([self.values_of(item) for item in arguments])
        if isinstance(arguments, _GENERATOR):
            return self.name_live("generator", arguments)
        return map_tensors(arguments, self.value_of)

    def name_live(self, kind: str, item: Any) -> Live:
        """The name under which a step will find a live thing."""
        if isinstance(item, torch.Generator) and item is default_generator(item.device):
            return default_generator_of(item.device)
        known = next((name for name, other in self.live.items() if other is item), None)
        name = known or f"{kind} {len(self.live)}"
        self.live[name] = item
        return Live(name)

    def fakes_of(self, arguments: Any) -> Any:
        """`arguments` with every tensor replaced by its fake."""
        return map_tensors(arguments, lambda tensor: self.traced(tensor).fake)


class Namer:
    """Gives values unique, readable names: the operation's, with a count."""

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._counts: dict[str, int] = {}
        self._taken = set(taken)

    def value(self, operation: Operation, value_type: Any) -> Value:
        """A new Value for an output of `operation`."""
        return Value(self.unique(operation.name.partition(".")[0].strip("_")), value_type)

    def unique(self, stem: str) -> str:
        """`stem_1`, `stem_2`, ..."""
        while True:
            self._counts[stem] = self._counts.get(stem, 0) + 1
            name = f"{stem}_{self._counts[stem]}"
            if name not in self._taken:
                return name


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def unusual_layout(tensor: torch.Tensor) -> str:
    """The layout of a tensor that is not dense and strided; empty for one that is."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    return "quantized" if tensor.is_quantized else ""


def map_tensors(arguments: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Nested arguments with every tensor t replaced by `change(t)`; lists become tuples."""
    if isinstance(arguments, torch.Tensor):
        return change(arguments)
    if type(arguments) in _WITHOUT_TENSORS:
        return arguments
    if isinstance(arguments, dict):
        return {name: map_tensors(item, change) for name, item in arguments.items()}
    if isinstance(arguments, tuple | list) and not isinstance(arguments, torch.Size):
        return tuple([map_tensors(item, change) for item in arguments])
    return arguments


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """The tensors in nested arguments."""
    found: list[torch.Tensor] = []
    map_tensors(arguments, found.append)
    return found


def _type_of(fake: torch.Tensor | Outline) -> TensorType:
    return fake.type if isinstance(fake, Outline) else TensorType.of(fake)


def _skip(item: Any, numbers: Iterator[Any]) -> Any:
    """An output that is no tensor (a count, a flag), unchanged."""
    next(numbers)
    return item


def _is_called_by(file: str) -> bool:
    """Whether the innermost Python code outside this module and PyTorch's dispatcher lies in `file`."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        if frame.f_code.co_filename not in (__file__, *dispatcher_files()):
            return False
        frame = frame.f_back
    return frame is not None


def _is_pair(argument: Any) -> bool:
    return isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[0], Value)


@cache
def _factory_options(func: OpOverload) -> tuple[frozenset[str], tuple[str, ...]]:
    """The arguments that have a default, and the options that a factory may take from global settings."""
    arguments = func._schema.arguments
    defaults = frozenset(argument.name for argument in arguments if argument.has_default_value())
    names = {argument.name for argument in arguments}
    takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
    return defaults, () if takes_tensor else tuple(name for name in ("dtype", "device") if name in names)


def _explicit_factory_options(func: OpOverload, kwargs: dict[str, Any], made: list[Outline | None]) -> dict[str, Any]:
    """The options a factory took from global settings (default dtype and device), written out."""
    defaults, options = _factory_options(func)
    kwargs = {
        name: item
        for name, item in kwargs.items()
        if name not in defaults or (item not in (None, torch.strided) and not (name == "pin_memory" and not item))
    }
    if made and made[0] is not None:
        kwargs.update({name: getattr(made[0].type, name) for name in options})
    return kwargs
