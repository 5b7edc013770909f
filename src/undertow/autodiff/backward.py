"""Autodiff. In: a forward pass as a Program. Out: the same Program, followed by its backward pass.

Reverse-mode differentiation over a list of operations (Griewank and Walther, Evaluating Derivatives, 2008). Nodes are
visited in reverse order, and a value's cotangents are added in the order in which they are made. Eager PyTorch's engine
runs and adds in the same order, so the sums have the same bits. This module knows no derivative of any operation: rules
come from the registry and are recorded like any other tensor code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from undertow.autodiff.repeats import Repeat, RuleCall
from undertow.errors import CaptureError, MissingRule
from undertow.ir import (
    Gradient,
    Input,
    InputKind,
    Node,
    OpaqueType,
    Operation,
    Origin,
    Phase,
    Program,
    Task,
    TensorType,
    Value,
    check_program,
    map_values,
    values_in,
)
from undertow.ir.cleaning import remove_unused
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import bind_arguments, flatten_outputs, functional_of
from undertow.ops.interpret import generator_of, state_type_of, without_live
from undertow.ops.opaque import (
    applied_function,
    custom_function_backward,
    gradients_given,
    gradients_of,
    gradients_through_autograd,
    through_autograd,
)
from undertow.ops.own import GENERATOR_STATE
from undertow.ops.row_gradients import (
    ADD_ROWS,
    ADD_ROWS_TO_DENSE,
    Reading,
    find_reading,
    row_gradient,
    type_of_rows,
    type_of_sum,
)
from undertow.record.origins import origin_at
from undertow.record.traced_tensor import Storage, TracedTensor
from undertow.record.tracing import Namer, Recorder
from undertow.rules.registry import Call, Vjp, find_op
from undertow.torch_internals import DisableAutocast, DynamicOutputShapeException, FakeTensorMode, disable_current_modes

aten = torch.ops.aten

# PyTorch does not compute these where an argument is a ZeroTensor: a tensor without memory that it knows to be zero.
# Its product with a negative or an infinite number is zero as well.
_STAY_ZERO = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor)


def differentiate(
    program: Program,
    outputs: Sequence[Value],
    wanted: Sequence[Value],
    *,
    is_composed: bool = False,
    is_strict: bool = False,
    takes_rows: bool = False,
) -> Program:
    """The Program with the cotangents of `wanted` inputs, given cotangents of `outputs`.

    `is_composed` takes the formulations that can be differentiated again instead of those with eager's bits.
    `takes_rows`: the gradients of inputs may be in rows, as sparse tensors; else that is refused.
    """
    return _Backward(program, is_composed, is_strict, takes_rows).build(outputs, wanted)


def differentiate_everywhere(
    program: Program, outputs: Sequence[Value], wanted: Sequence[Value]
) -> tuple[Program, dict[Value, Value]]:
    """As `differentiate`, with the cotangent of every value in between, which the Program has as outputs."""
    backward = _Backward(program, is_composed=False, is_strict=False)
    joint = backward.build(outputs, wanted, is_cleaned=False)
    cotangents = backward.complete | {item.input: item.value for item in joint.gradients if item.value is not None}
    return joint, cotangents


def backward_as_forward(program: Program, outputs: Sequence[Value]) -> Program:
    """A Program whose forward pass is all of `program`, with cotangents as arguments: to differentiate it again."""
    return replace(
        program,
        inputs=program.inputs + program.cotangents,
        outputs=tuple(outputs),
        boundary=len(program.nodes),
        cotangents=(),
        gradients=(),
    )


class _Backward(Recorder):
    takes_parts = False
    phase = Phase.BACKWARD

    def __init__(self, program: Program, is_composed: bool, is_strict: bool, takes_rows: bool = False) -> None:
        super().__init__(FakeTensorMode(), Namer(taken=_names(program)))
        self.takes_rows = takes_rows
        self.rows: dict[Value, Value] = {}  # of inputs, cotangents in rows so far
        self.program = program
        self.is_composed = is_composed
        self.is_strict = is_strict
        self.node: Node | None = None
        self.cotangents: dict[Value, torch.Tensor] = {}
        self.num_in_storage: Counter[Storage] = Counter()  # how many of the cotangents lie in each
        self.pending: list[tuple[Value, torch.Tensor]] = []  # of the node being visited, not yet added
        self.forward = {*program.makers, *(item.value for item in program.inputs)}
        self.complete: dict[Value, Value] = {}
        self.generator_states: dict[Node, Node] = {}
        self.repeats: dict[Any, Repeat] = {}  # what rules recorded
        self.active: set[Value] = set()
        self.zeros: set[Value] = set()  # ZeroTensors in eager: the derivative of sgn, and what is computed from it

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten._efficientzerotensor.default:
            return self._make_zeros(*args, **kwargs)
        if not self.zeros:
            return super().dispatch(func, args, kwargs)
        is_zero = [isinstance(item, TracedTensor) and self.value_of(item) in self.zeros for item in args[:2]]
        if any(is_zero) and (stays := self._stay_zero(func, args, is_zero)) is not None:
            return stays
        result = super().dispatch(func, args, kwargs)
        if any(is_zero) and operation_of(func).is_view:
            self.zeros.update(self.value_of(item) for item in flatten_outputs(result) if item is not None)
        return result

    def _stay_zero(self, func: Any, args: Any, is_zero: list[bool]) -> torch.Tensor | None:
        """What eager makes of ZeroTensors without computing; None if it computes."""
        other = args[1] if func is aten.add.Tensor and is_zero[0] else None
        if isinstance(other, torch.Tensor) and TensorType.of(args[0]) == TensorType.of(other):
            return other
        if func not in _STAY_ZERO or (func is aten.div.Tensor and not is_zero[0]):
            return None
        with self.on_fakes():
            found = func(*self.fakes_of(args))
        return self._make_zeros(found.shape, dtype=found.dtype, device=found.device)

    def _make_zeros(self, shape: Sequence[int], **options: Any) -> torch.Tensor:
        made: torch.Tensor = super().dispatch(aten.zeros.default, (list(shape),), options)
        self.zeros.add(self.value_of(made))
        return made

    def origin(self) -> Origin:
        if self.node is None:
            return Origin()
        first = next((value.name for value in self.node.outputs if value is not None), "")
        origin = self.node.origin
        return origin_at(origin.module_path, origin.file, origin.line, first)

    def build(self, outputs: Sequence[Value], wanted: Sequence[Value], is_cleaned: bool = True) -> Program:
        """The joint Program; `is_cleaned` removes what the gradients do not depend on."""
        self.active = self._find_active(wanted)
        seeds = []
        with disable_current_modes(), DisableAutocast(), torch.enable_grad(), self:
            for value in outputs:
                if value in self.active:
                    kind = value.tensor_type.packed  # a loss makes a new tensor for the cotangent of a view
                    seed = Input(Value(self.names.unique(f"ct_{value.name}"), kind), InputKind.COTANGENT, value.name)
                    seeds.append(seed)
                    self._accumulate(value, self.tensor(seed.value))
            for node in reversed(self.program.first_pass):
                self._visit(node)
            self.node = None
            gradients = [Gradient(value, self._gradient_of(value)) for value in wanted]
        nodes = self._forward_nodes() + tuple(self.nodes)
        differentiable = self.program.differentiable | {seed.value for seed in seeds}
        joint = replace(
            self.program,
            nodes=nodes,
            boundary=len(nodes) - len(self.nodes),
            cotangents=tuple(seeds),
            gradients=tuple(gradients),
            differentiable=self._extend(differentiable),
        )
        self.cotangents.clear()
        self.repeats.clear()
        self.release()
        return check_program(remove_unused(joint) if is_cleaned else joint)

    def _gradient_of(self, value: Value) -> Value | None:
        if value in self.cotangents:
            return self.value_of(self.cotangents[value])
        return self.rows.get(value)

    def tensor(self, value: Value) -> TracedTensor:
        """The traced tensor that stands for a value of the forward pass."""
        return self.tensors[value] if value in self.tensors else self.new_tensor(value)

    def _find_active(self, wanted: Sequence[Value]) -> set[Value]:
        """The values that carry a gradient and depend on what is wanted."""
        active = {value for value in wanted if value in self.program.differentiable}
        for node in self.program.first_pass:
            if any(value in active for value in node.inputs):
                active.update(value for value in node.outputs if value in self.program.differentiable)
        return active

    def _visit(self, node: Node) -> None:
        cts = [None if value is None else self.cotangents.get(value) for value in node.outputs]
        if all(ct is None for ct in cts) or not any(value in self.active for value in node.inputs):
            return
        self.node = node
        reading = None if self.is_composed else find_reading(node)  # formulations for a second derivative are dense
        if reading is not None:
            self._visit_reading(node, reading, cts[0])
            return
        self.pending = [pair for argument, ct in self._pull_back(node, cts) for pair in self._spread(argument, ct)]
        self._complete(node)
        while self.pending:
            self._accumulate(*self.pending[0])
            del self.pending[0]

    def _complete(self, node: Node) -> None:
        """Its outputs' cotangents are used up."""
        for value in node.outputs:
            if value in self.cotangents:
                ct = self.cotangents.pop(value)
                self.num_in_storage[self.traced(ct).alias.storage] -= 1
                self.complete[value] = self.value_of(ct)

    def _visit_reading(self, node: Node, reading: Reading, ct: torch.Tensor | None) -> None:
        """A node that reads rows of a table whose gradient is to be a sparse tensor."""
        weights = node.inputs[-1] if reading.kind == "embedding_bag" and len(node.inputs) > 3 else None
        if weights is not None and weights in self.active:
            raise CaptureError(
                f"{node.name} ({node.origin}) has per_sample_weights that require a gradient, and sparse=True: that "
                f"is not planned together; make it with sparse=False"
            )
        is_input = any(item.value is reading.table for item in self.program.inputs)
        if not self.takes_rows or not is_input:
            why = (
                "here gradients are dense" if is_input else "its table is computed in the forward pass (max_norm, ...)"
            )
            raise CaptureError(
                f"{node.name} ({node.origin}) makes a sparse gradient, and {why}; make it with sparse=False"
            )
        assert ct is not None
        operation, args = row_gradient(reading.kind), (self.value_of(ct), *reading.args)
        made = self._emit_rows(operation, args, type_of_rows(reading))
        self._complete(node)
        self._accumulate_rows(reading.table, made)

    def _emit_rows(self, operation: Operation, args: tuple[Any, ...], kind: OpaqueType) -> Value:
        value = self.names.value(operation, kind)
        self.nodes.append(Node(operation, args, {}, (value,), self.origin(), self.phase))
        return value

    def _accumulate_rows(self, table: Value, rows: Value) -> None:
        """Eager adds sparse gradients to each other, and to a dense one, which stays dense."""
        before = self.rows.get(table)
        if table in self.cotangents:
            self._add_to_dense(table, self.cotangents[table], rows)
        elif before is None:
            self.rows[table] = rows
        else:
            assert isinstance(before.type, OpaqueType) and isinstance(rows.type, OpaqueType)
            self.rows[table] = self._emit_rows(ADD_ROWS, (before, rows), type_of_sum(before.type, rows.type))

    def _add_to_dense(self, table: Value, dense: torch.Tensor, rows: Value) -> None:
        value = self.value_of(dense)
        with self.on_fakes():
            fake = torch.empty_like(self.traced(dense).fake)
        ((_, total),) = self._emit(ADD_ROWS_TO_DENSE, (value, rows), [table], [fake])
        if table in self.cotangents:
            self.num_in_storage[self.traced(dense).alias.storage] -= 1
        self.cotangents[table] = total
        self.num_in_storage[self.traced(total).alias.storage] += 1

    def _pull_back(self, node: Node, cts: list[Any]) -> list[tuple[Any, Any]]:
        """Pairs of an argument (a Value or a tuple of them) and its cotangents."""
        operation = node.operation
        if operation.runs_user_code:
            return self._pull_back_function(node, cts)
        if operation.gradient is not None:
            return list(zip(node.args, operation.gradient(node.args, *cts), strict=True))
        base = run = operation.overload
        mutating = operation.functional_of
        if mutating is not None:
            run = mutating.overload
            assert run is not None
            has_own_rule = find_op(run) is not None or not mutating.writes_over
            base = run if has_own_rule else functional_of(run) or run
        op = find_op(base)
        if op is None or (_is_complex(node) and self._is_differentiable_by_autograd(node)):
            return self._pull_back_through_autograd(node, cts)
        if not op.vjps:
            return []
        vjp = op.composed_vjp if self.is_composed else op.exact_vjp
        if vjp is None:
            return self._pull_back_through_autograd(node, cts)
        # Defaults are taken from the operation that runs: its functional form may have none.
        assert base is not None and run is not None
        bound = bind_arguments(run, node.args, node.kwargs)
        kwargs = dict(list(bound.items())[len(node.args) :])
        wanted = {name for name in vjp.arguments if any(value in self.active for value in values_in(bound[name]))}
        outs = [None if value is None else self.tensor(value) for value in node.outputs]
        call = Call(base, map_values(node.args, self.tensor), map_values_of(kwargs, self.tensor), outs, wanted)
        try:
            found = self._apply(vjp, call, cts if mutating is None else cts[: len(base._schema.returns)])
        except DynamicOutputShapeException:  # a boolean mask selects how many elements only at run time
            return self._pull_back_through_autograd(node, cts)
        return [(bound[name], found[name]) for name in vjp.arguments if name in wanted and name in found]

    def _apply(self, vjp: Vjp, call: Call, cts: Sequence[Any]) -> Mapping[str, Any]:
        """The cotangents of a call by a rule: run, or recorded again as for an earlier call that is alike."""
        seen = None if self.zeros else RuleCall.of(id(vjp), *call.as_data(), tuple(cts))
        if seen is None:
            return vjp.cotangents(call, cts)
        repeat = self.repeats.get(seen.key)
        if repeat is not None:
            return repeat.record(self, seen)
        start = len(self.nodes)
        found = vjp.cotangents(call, cts)
        repeat = None if self.zeros else Repeat.of(seen, self.nodes[start:], found)
        if repeat is not None:
            self.repeats[seen.key] = repeat
        return found

    def _pull_back_function(self, node: Node, cts: list[Any]) -> list[tuple[Any, Any]]:
        if self.is_composed:  # its context holds one derivative; for two it runs again
            name, _, _, autocast, is_dirty = node.operation.parameters
            again = replace(node, operation=applied_function(name, autocast, is_dirty), outputs=node.outputs[:-1])
            return self._pull_back_through_autograd(again, cts[:-1])
        _, *arguments = node.args
        positions = tuple(
            index
            for index, (argument, has_gradient) in enumerate(
                zip(arguments, gradients_given(node.operation), strict=True)
            )
            if has_gradient and isinstance(argument, Value) and argument in self.active
        )
        if not positions:
            return []
        context = node.outputs[-1]
        values = tuple(None if ct is None else self.value_of(ct) for ct in cts[:-1])
        inputs = [arguments[index] for index in positions]
        # Its backward may only run on real tensors; contiguous is the usual layout, and nothing relies on it.
        with self.on_fakes():
            fakes = [_empty_like(value) for value in inputs]
        return self._emit(custom_function_backward(node.name, positions), (context, *values), inputs, fakes)

    def _pull_back_through_autograd(self, node: Node, cts: list[Any]) -> list[tuple[Any, Any]]:
        if self.is_strict:
            where = f" ({node.origin})" if str(node.origin) else ""
            raise MissingRule(f"{node.name}{where} has no derivative rule; strict=True allows none")
        inputs = list(node.inputs)
        positions = tuple(index for index, value in enumerate(inputs) if value in self.active)
        values = tuple(None if ct is None else self.value_of(ct) for ct in cts)
        args: Any = (node.args, tuple(node.kwargs), tuple(node.kwargs.values()), values)
        fake_args = without_live(map_values((*args, None), lambda value: self.tensor(value).fake))
        pull_back = partial(gradients_of, node.operation, positions)
        found: Sequence[torch.Tensor | None]
        with self.on_fakes():
            found = tuple(_empty_like(inputs[index]) for index in positions)
            try:
                _, found = pull_back(*fake_args)
            except MissingRule as error:
                raise MissingRule(f"{str(node.origin) or node.name}: {error}") from error
            except Exception:
                pass  # it cannot run on fake tensors, as the user's own code may not; contiguous is the usual layout
        is_strided = any(
            item.tensor_type.device.type == "cpu" and not item.tensor_type.is_contiguous for item in inputs
        )
        if is_strided and not _differentiated(node.operation).runs_user_code:
            _, found = self.run_on_zeros(pull_back, fake_args, {}, (None, found))
        # Without a dependence, as in an empty product, eager has no gradient, and not a tensor of zeros.
        reached = {index: fake for index, fake in zip(positions, found, strict=True) if fake is not None}
        if not reached:
            return []
        state = self._generator_state(node) if node.operation.is_random else None
        target = through_autograd(node.operation, tuple(reached))
        return self._emit(target, (*args, state), [inputs[index] for index in reached], list(reached.values()))

    def _is_differentiable_by_autograd(self, node: Node) -> bool:
        """Whether PyTorch has a derivative for it; some that only move elements have none for complex ones."""
        with self.on_fakes(), torch.enable_grad():
            tensors = {
                value: self.tensor(value).fake.detach().requires_grad_(value in self.active)
                for value in node.inputs
                if value in self.active or isinstance(value.type, TensorType)
            }
            args = without_live(map_values(node.args, tensors.__getitem__))
            kwargs = without_live(map_values_of(node.kwargs, tensors.__getitem__))
            try:
                outputs = flatten_outputs(node.target(*args, **kwargs))
                reached = [output for output in outputs if output is not None and output.requires_grad]
                leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
                gradients_through_autograd(reached, leaves, [torch.ones_like(output) for output in reached])
            except (RuntimeError, MissingRule):
                return False
        return bool(reached)

    def _emit(
        self, target: Any, args: Any, inputs: list[Value], fakes: Sequence[torch.Tensor]
    ) -> list[tuple[Any, Any]]:
        values = self.emit(target, args, {}, fakes)
        return [(item, self.adopt(fake, value)) for item, value, fake in zip(inputs, values, fakes, strict=True)]

    def _generator_state(self, node: Node) -> Value:
        generator = generator_of(node)
        value = self.names.value(GENERATOR_STATE, state_type_of(node))
        self.generator_states[node] = Node(
            GENERATOR_STATE, (generator,), {}, (value,), node.origin, task=Task.RECORD_STATE
        )
        return value

    def _forward_nodes(self) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for node in self.program.first_pass:
            if node in self.generator_states:
                nodes.append(self.generator_states[node])
            nodes.append(node)
        return tuple(nodes)

    def _spread(self, argument: Any, ct: Any) -> list[tuple[Value, torch.Tensor]]:
        """The Values in an argument, each with what has to be added to its cotangent."""
        if isinstance(argument, Value):
            return [(argument, conform(ct, argument.type))] if ct is not None and argument in self.active else []
        if not isinstance(argument, tuple) or ct is None:
            return []
        return [pair for item, item_ct in zip(argument, ct, strict=True) for pair in self._spread(item, item_ct)]

    def _accumulate(self, value: Value, ct: torch.Tensor) -> None:
        if value in self.rows:
            self._add_to_dense(value, ct, self.rows.pop(value))
            return
        known = self.cotangents.get(value)
        if known is not None:
            add = aten.add_.Tensor if self._is_added_into(known) else aten.add.Tensor
            self.num_in_storage[self.traced(known).alias.storage] -= 1
            ct = add(known, ct)
        self.cotangents[value] = ct
        self.num_in_storage[self.traced(ct).alias.storage] += 1

    def _is_added_into(self, ct: torch.Tensor) -> bool:
        """Whether eager adds the next cotangent into this one: the sum then has this one's strides.

        Eager does so where nothing else holds the tensor or its memory. Views hold the tensor that they view, and an
        operation that saved a tensor of the forward pass holds it.
        """
        traced = self.traced(ct)
        value, storage = self.value_of(traced), traced.alias.storage
        if traced.alias.steps or value in self.zeros or value in self.forward or not value.tensor_type.is_dense:
            return False
        num_pending = sum(self.traced(item).alias.storage is storage for _, item in self.pending)
        return self.num_in_storage[storage] + num_pending == 1

    def _extend(self, differentiable: frozenset[Value]) -> frozenset[Value]:
        extended = set(differentiable)
        for node in self.nodes:
            op = find_op(node.target)
            if (op is None or op.vjps) and any(value in extended for value in node.inputs):
                extended.update(value for value in node.outputs if value is not None and value.type.is_differentiable)
        return frozenset(extended)


def conform(ct: torch.Tensor, value_type: Any) -> torch.Tensor:
    """The cotangent summed over broadcast dimensions, then cast: what eager's engine does on every edge."""
    if tuple(ct.shape) != value_type.shape:
        ct = _sum_to_shape(ct, value_type.shape)
    if ct.dtype != value_type.dtype:
        ct = aten._to_copy.default(ct, dtype=value_type.dtype)
    if ct.device != value_type.device:
        ct = aten._to_copy.default(ct, device=value_type.device)
    return ct


def _sum_to_shape(ct: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if not shape:
        return aten.sum.default(ct)
    leading = ct.dim() - len(shape)
    dims = list(range(leading))
    dims += [dim for dim in range(leading, ct.dim()) if shape[dim - leading] == 1 and ct.shape[dim] != 1]
    ct = aten.sum.dim_IntList(ct, dims, True) if dims else ct
    return aten.view.default(ct, list(shape)) if leading else ct


def _differentiated(operation: Operation) -> Operation:
    """The operation that a derivative, or a derivative of that, is of."""
    return operation if operation.derivative_of is None else _differentiated(operation.derivative_of)


def _is_complex(node: Node) -> bool:
    """The rules are written for real numbers: none of them conjugates."""
    values = (*node.inputs, *node.named_outputs)
    return any(isinstance(value.type, TensorType) and value.type.dtype.is_complex for value in values)


def _empty_like(value: Value) -> torch.Tensor:
    kind = value.tensor_type
    return torch.empty(kind.shape, dtype=kind.dtype, device=kind.device)


def map_values_of(kwargs: dict[str, Any], replace_value: Any) -> dict[str, Any]:
    """Keyword arguments with every Value replaced."""
    return {name: map_values(item, replace_value) for name, item in kwargs.items()}


def _names(program: Program) -> list[str]:
    names = [item.value.name for item in (*program.inputs, *program.cotangents)]
    return names + [value.name for value in program.makers]
