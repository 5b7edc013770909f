"""The types that a recording notes are those that the kernels give, sizes of 1 included.

A stride along a size of 1 moves no element, but kernels choose layouts by it, and with a layout the order of sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operation_samples import OPS, map_tensors, samples
from spread_cases import spread

from undertow.autodiff.backward import differentiate
from undertow.ir import Program, TensorType
from undertow.ir.schema import bind_arguments, flatten_outputs
from undertow.ops.interpret import run_node
from undertow.ops.modes import below_autograd
from undertow.record.capture import Captured, capture
from undertow.record.outlines import _PRODUCTS, _SHAPE_KEPT, Outline, find_outlines
from undertow.rules.registry import Op
from undertow.torch_internals import FakeTensorMode

aten = torch.ops.aten

# Cutting all dimensions of one size gives sizes that do not fit each other, on which these kernels crash. The last four
# have sizes among their other arguments; fake batch normalisation divides by zero where a channel has one value, which
# eager refuses in its modules.
NOT_CUT = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.convolution.default,
    aten.max_pool2d_with_indices.default,
    aten.mkldnn_rnn_layer.default,
    aten._reshape_alias.default,
    aten.as_strided_scatter.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
}

# No recording holds the first: batch normalisation is recorded as the operation that it is made from. Eager has no
# gradient through the second.
LEFT_OUT = {aten._native_batch_norm_legit_functional.default, aten.lift_fresh.default}


def reverse(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, laid out from the last dimension to the first."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def put_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    order = (0, *range(2, tensor.dim()), 1) if tensor.dim() > 2 else tuple(range(tensor.dim()))
    return tensor.permute(order).contiguous().permute(tuple(order.index(dim) for dim in range(tensor.dim())))


def make_odd(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous but for sizes of 1, whose strides are what a slice of something larger would leave there."""
    tensor = tensor.contiguous()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided(tensor.shape, [3 * tensor.numel() if size == 1 else stride for size, stride in pairs])


def slice_wider(tensor: torch.Tensor) -> torch.Tensor:
    """A part of something larger: its rows lie apart."""
    if tensor.dim() == 0:
        return tensor
    wide = tensor.new_zeros((*tensor.shape[:-1], 3 * tensor.shape[-1]))
    return wide[..., : tensor.shape[-1]].copy_(tensor)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "reversed": reverse,
    "channels last": put_channels_last,
    "odd": make_odd,
    "sliced": slice_wider,
}


def tensors_in(item: Any) -> list[torch.Tensor]:
    return [tensor for tensor in flatten_outputs(item) if tensor is not None]


def cut(tensor: torch.Tensor, size: int | None) -> torch.Tensor:
    """The first of whatever there are `size` of."""
    for dim, found in enumerate(tensor.shape):
        tensor = tensor.narrow(dim, 0, 1) if found == size else tensor
    return tensor


def variants(op: Op) -> Iterator[dict[str, Any]]:
    """The arguments of every sample, whole and with one size cut to 1, in every layout."""
    for case in samples(op):
        bound = bind_arguments(op.target, case.args, case.kwargs)
        sizes = {size for item in bound.values() for tensor in tensors_in(item) for size in tensor.shape if size > 1}
        for size, layout in itertools.product(
            [None, *(sorted(sizes) if op.target not in NOT_CUT else ())], LAYOUTS.values()
        ):
            change = lambda tensor: layout(cut(tensor.float() if tensor.is_floating_point() else tensor, size))  # noqa: B023, E731
            changed = {name: map_tensors(item, change) for name, item in bound.items()}
            make_leaves(op, changed)
            yield changed


def is_accepted(op: Op, bound: dict[str, Any]) -> bool:
    """Whether eager takes these arguments, forward and backward."""
    try:
        with torch.random.fork_rng(devices=[]):
            outputs = [output for output in tensors_in(op.target(**bound)) if output.grad_fn is not None]
        # Eager knows some derivatives only of the in-place operation.
        outputs = [output for output in outputs if not output.grad_fn.name().endswith("NotImplemented")]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def make_leaves(op: Op, bound: dict[str, Any]) -> None:
    """Let the arguments require gradients that the rule gives them for."""
    for name in op.exact_vjp.arguments if op.vjps else ():
        for tensor in tensors_in(bound[name]):
            tensor.requires_grad_(tensor.is_floating_point())


def record(op: Op, bound: dict[str, Any]) -> tuple[Program, Captured, list[torch.Tensor]]:
    """A call of the operation and its backward pass as a Program, and the tensors that it is called on."""
    leaves = [tensor for item in bound.values() for tensor in tensors_in(item)]

    def call(*given: torch.Tensor) -> list[torch.Tensor]:
        left = iter(given)
        arguments = {name: map_tensors(item, lambda _: next(left)) for name, item in bound.items()}
        return tensors_in(op.target(**arguments))

    captured = capture(call, tuple(leaves), {}, None)
    program = captured.program
    sources = [item.value for item in program.inputs if item.value in program.differentiable]
    outputs = [value for value in program.outputs if value in program.differentiable]
    return differentiate(program, outputs, sources), captured, leaves


def differing_types(program: Program, captured: Captured, tensors: list[torch.Tensor]) -> list[str]:
    """Run node after node; the nodes that made something of another type than recorded."""
    environment = {item.value: captured.tensor_behind(item, tensors, {}).detach() for item in program.inputs}
    for item in program.cotangents:
        kind = item.value.tensor_type
        environment[item.value] = torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype).fill_(1.0)
    wrong = []
    for node in program.nodes:
        with below_autograd():
            run_node(node, environment, captured.live)
        for value in node.named_outputs:
            if isinstance(value.type, TensorType) and value.type.num_elements:
                found = TensorType.of(environment[value])
                if found != value.type:
                    inputs = ", ".join(str(item.type) for item in node.inputs)
                    wrong.append(f"{node.name}({inputs}): {found.strides} of {found.shape}, not {value.type.strides}")
    return wrong


@pytest.mark.parametrize(
    "op", spread([op for op in OPS if op.target not in LEFT_OUT], lambda op: str(op.target), every=25)
)
def test_types_are_those_that_kernels_give(op: Op) -> None:
    accepted = [bound for bound in variants(op) if is_accepted(op, bound)]
    assert accepted
    wrong = [text for bound in accepted for text in differing_types(*record(op, bound))]
    assert not wrong, "\n".join(dict.fromkeys(wrong))


PLENTY = (3, 1, 70, 33)


def call_of(target: Any, *tensors: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of an operation that keeps the shape of its tensors."""
    if target in (aten._softmax.default, aten._log_softmax.default):
        return tensors[0], -1, False
    if target in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
        return *tensors[:2], -1, tensors[0].dtype
    if target is aten._safe_softmax.default:
        return tensors[0], 1
    if target is aten.full_like.default:
        return tensors[0], 2.5
    return tensors[
        : sum("Tensor" in str(item.type) and not item.has_default_value() for item in target._schema.arguments)
    ]


@pytest.mark.parametrize(
    "target",
    [
        *sorted(_SHAPE_KEPT, key=str),
        aten.add.Tensor,
        aten.where.self,
        aten.gelu.default,
        aten.lt.Tensor,
        aten.mul.Tensor,
    ],
    ids=str,
)
def test_a_twin_tells_the_type_for_any_size(target: Any) -> None:
    mode = FakeTensorMode()
    for shape, dtype in itertools.product(
        [PLENTY, (300, 7), (1,), (2, 1, 1), (64, 2048)], [torch.float32, torch.float64]
    ):
        tensors: list[Any] = [torch.ones(shape, dtype=dtype), torch.ones(shape), torch.ones((), dtype=torch.float64)]
        if target is aten.where.self:
            tensors = [tensors[0] > 0, *tensors[:2]]
        if target in (aten.tril.default, aten.triu.default) and len(shape) < 2:
            continue
        if target in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default):
            tensors[1] = tensors[0]
        for given in [tensors, [tensors[0], tensors[-1], tensors[-1]]] if target is aten.add.Tensor else [tensors]:
            args = call_of(target, *given)
            if target is aten._safe_softmax.default and len(shape) < 2:
                args = tensors[0], 0
            outlines = map_tensors(args, lambda item: Outline(mode, TensorType.of(item)))
            found = find_outlines(mode, target, outlines, {})
            assert found is not None and found[0][0] is not None
            assert found[0][0].type == TensorType.of(target(*args)), (shape, dtype)


@pytest.mark.parametrize("target", _PRODUCTS, ids=str)
def test_products_are_row_major_however_their_factors_lie(target: Any) -> None:
    mode = FakeTensorMode()
    num_dims = _PRODUCTS[target]
    for rows, inner, columns, layout in itertools.product((0, 1, 5), (0, 1, 4), (1, 3), LAYOUTS.values()):
        left, right = (layout(torch.ones((2, *size)[-num_dims:])) for size in ((rows, inner), (inner, columns)))
        whole = torch.ones((2, rows, columns)[-num_dims:])
        biases = [whole, whole[..., :1], layout(whole[..., :1, :])] if "add" in str(target) else [None]
        for bias in biases:
            args = (left, right) if bias is None else (bias, left, right)
            found = find_outlines(mode, target, map_tensors(args, lambda item: Outline(mode, TensorType.of(item))), {})
            assert found is not None and found[0][0] is not None
            assert found[0][0].type == TensorType.of(target(*args))


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(2, 3), torch.ones(2, 3)),
        (torch.ones(2, 3), torch.ones(3, 3).double()),
        (torch.ones(2, 3), torch.ones(3)),
        (torch.ones(5), torch.ones(2, 3), torch.ones(3, 4)),
        (torch.ones(1, 2, 4), torch.ones(2, 3), torch.ones(3, 4)),
    ],
)
def test_a_wrong_product_is_left_to_eager(args: tuple[torch.Tensor, ...]) -> None:
    mode = FakeTensorMode()
    target = aten.mm.default if len(args) == 2 else aten.addmm.default
    assert find_outlines(mode, target, tuple(Outline(mode, TensorType.of(item)) for item in args), {}) is None
    with pytest.raises(RuntimeError):
        target(*args)
