"""A zoo model as a jitted JAX function: the same operations, read off the captured forward pass.

In: a model, its arguments and targets. Out: a call that runs a step (loss and gradients, with Adam if requested) or an
evaluation, compiled by XLA for the CPU, and waits for it. Parameters that Adam updates are donated. It needs JAX, which
no other part of the project does. It knows only the operations of the workloads of `speed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import torch

from undertow.ir import InputKind, Node, Program, Value, map_values
from undertow.record.capture import capture

OPERATIONS: dict[str, Callable[..., Any]] = {}


def _operation(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return add


@_operation("aten.convolution.default")
def _convolution(x, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups):  # type: ignore[no-untyped-def]
    layout = ("NCHW", "OIHW", "NCHW")
    sides = [(size, size) for size in padding]
    if is_transposed:
        assert groups == 1 and not any(output_padding) and set(dilation) == {1}
        sides = [(size - 1 - side, size - 1 - side) for size, side in zip(weight.shape[2:], padding, strict=True)]
        flipped = jnp.swapaxes(weight[:, :, ::-1, ::-1], 0, 1)
        y = jax.lax.conv_general_dilated(x, flipped, (1, 1), sides, stride, None, layout)
    else:
        y = jax.lax.conv_general_dilated(x, weight, stride, sides, None, dilation, layout, groups)
    return y if bias is None else y + bias[:, None, None]


@_operation("aten.max_pool2d_with_indices.default")
def _max_pool(x, size, stride, padding=(0, 0), dilation=(1, 1), is_ceil=False):  # type: ignore[no-untyped-def]
    assert tuple(dilation) == (1, 1) and not is_ceil
    sides = ((0, 0), (0, 0), *((item, item) for item in padding))
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, *size), (1, 1, *stride), sides), None


@_operation("native_batch_norm.functional")
def _batch_norm(x, weight, bias, mean, variance, is_training, momentum, epsilon):  # type: ignore[no-untyped-def]
    now_mean, now_variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    count = x.size / x.shape[1]
    y = _normalise(x, now_mean, now_variance, weight, bias, epsilon)
    new_mean = (1 - momentum) * mean + momentum * now_mean
    new_variance = (1 - momentum) * variance + momentum * now_variance * count / (count - 1)
    return y, now_mean, now_variance, new_mean, new_variance


@_operation("aten.native_batch_norm.default")
def _batch_norm_evaluation(x, weight, bias, mean, variance, is_training, momentum, epsilon):  # type: ignore[no-untyped-def]
    assert not is_training
    return _normalise(x, mean, variance, weight, bias, epsilon), None, None


def _normalise(x, mean, variance, weight, bias, epsilon):  # type: ignore[no-untyped-def]
    scale = weight * jax.lax.rsqrt(variance + epsilon)
    return x * scale[:, None, None] + (bias - mean * scale)[:, None, None]


@_operation("aten.native_layer_norm.default")
def _layer_norm(x, shape, weight, bias, epsilon):  # type: ignore[no-untyped-def]
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + epsilon) * weight + bias, mean, variance


@_operation("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_loss(log_likelihood, target, weight, reduction, ignored):  # type: ignore[no-untyped-def]
    taken = jnp.take_along_axis(log_likelihood, jnp.expand_dims(target, 1), 1)
    return -taken.mean(), None


@_operation("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _attention(query, key, value, dropout=0.0, is_causal=False, **_):  # type: ignore[no-untyped-def]
    assert dropout == 0.0
    batches, heads = (jnp.swapaxes(item, 1, 2) for item in (query, key)), jnp.swapaxes(value, 1, 2)
    return jnp.swapaxes(jax.nn.dot_product_attention(*batches, heads, is_causal=is_causal), 1, 2), None


@_operation("aten.gelu.default")
def _gelu(x, approximate="none"):  # type: ignore[no-untyped-def]
    return jax.nn.gelu(x, approximate=approximate == "tanh")


OPERATIONS |= {
    "aten.relu.default": lambda x: jnp.maximum(x, 0),
    "aten.view.default": jnp.reshape,
    "aten._unsafe_view.default": jnp.reshape,
    "aten.t.default": lambda x: x.T,
    "aten.permute.default": jnp.transpose,
    "aten.transpose.int": jnp.swapaxes,
    "aten.unbind.int": lambda x, dim=0: tuple(jnp.moveaxis(x, dim, 0)),
    "aten.expand.default": jnp.broadcast_to,
    "aten.clone.default": lambda x, **_: x,
    "aten.slice.Tensor": lambda x, dim, start, end: jax.lax.slice_in_dim(x, start, min(end, x.shape[dim]), axis=dim),
    "aten.cat.default": jnp.concatenate,
    "aten.mean.dim": lambda x, dims, keep=False: x.mean(tuple(dims), keepdims=keep),
    "aten.add.Tensor": lambda x, y: x + y,
    "aten.mul.Tensor": lambda x, y: x * y,
    "aten.mul.Scalar": lambda x, y: x * y,
    "aten.div.Scalar": lambda x, y: x / y,
    "aten.mm.default": jnp.matmul,
    "aten.bmm.default": jnp.matmul,
    "aten.addmm.default": lambda bias, x, y: x @ y + bias,
    "aten._log_softmax.default": lambda x, dim, _: jax.nn.log_softmax(x, dim),
    "aten._safe_softmax.default": lambda x, dim: jax.nn.softmax(x, dim),
    "aten._softmax.default": lambda x, dim, _: jax.nn.softmax(x, dim),
    "aten.embedding.default": lambda table, indices: table[indices],
    "aten.arange.default": lambda end, **_: jnp.arange(end),
    "aten.ones.default": lambda shape, dtype=None, **_: jnp.ones(shape, bool if dtype is torch.bool else jnp.float32),
    "aten.tril.default": jnp.tril,
    "aten.scalar_tensor.default": lambda number, **_: jnp.float32(number),
    "aten.where.self": jnp.where,
    "aten.empty_like.default": jnp.zeros_like,
}


def _run(program: Program, environment: dict[Value, Any], key: Any) -> list[Any]:
    for node in program.nodes:
        _run_node(node, environment, key)
        key = jax.random.split(key, 1)[0] if "bernoulli" in str(node.target) else key
    return [environment[value] for value in program.outputs]


def _run_node(node: Node, environment: dict[Value, Any], key: Any) -> None:
    args = map_values(node.args, environment.__getitem__)
    kwargs = {name: map_values(item, environment.__getitem__) for name, item in node.kwargs.items()}
    if str(node.target) == "bernoulli_.float.functional":
        result = jax.random.bernoulli(key, args[1], args[0].shape).astype(args[0].dtype)
    else:
        result = OPERATIONS[str(node.target)](*args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    environment.update({value: item for value, item in zip(node.outputs, results, strict=False) if value is not None})


def jax_call(
    model: torch.nn.Module, args: tuple[Any, ...], targets: tuple[Any, ...], loss: Any, has_adam: bool, is_step: bool
) -> Callable[[], Any]:
    """The step, or the evaluation, as a call without arguments."""
    given = (*args, *targets) if is_step else args

    def forward(*values: Any) -> Any:
        outputs = model(*values[: len(args)])
        return loss(outputs, *values[len(args) :]) if is_step else outputs

    with torch.set_grad_enabled(is_step):
        captured = capture(forward, given, {}, model)
    program, modules = captured.program, dict(model.named_modules())
    arrays = {
        item.value: jnp.asarray(
            captured.tensor_behind(item, list(given), modules).detach().numpy().astype(_dtype(item))
        )
        for item in program.inputs
    }
    trained = [item.value for item in program.inputs if item.kind is InputKind.PARAMETER]
    rest = {value: array for value, array in arrays.items() if value not in trained}

    def evaluate(parameters: list[Any], others: list[Any], key: Any) -> Any:
        environment = dict(zip([*trained, *rest], [*parameters, *others], strict=True))
        return _run(program, environment, key)[0]

    parameters, others = [arrays[value] for value in trained], list(rest.values())
    key = jax.random.key(0)
    if not is_step:
        compiled = jax.jit(evaluate)
        return lambda: jax.block_until_ready(compiled(parameters, others, key))
    gradients = jax.value_and_grad(evaluate)
    if not has_adam:
        differentiated = jax.jit(gradients)
        return lambda: jax.block_until_ready(differentiated(parameters, others, key))

    def train(state: Any, others: list[Any], key: Any) -> Any:
        parameters, first, second, count = state
        value, found = gradients(parameters, others, key)
        first = [0.9 * old + 0.1 * new for old, new in zip(first, found, strict=True)]
        second = [0.999 * old + 0.001 * new**2 for old, new in zip(second, found, strict=True)]
        count = count + 1
        size = 1e-3 / (1 - 0.9**count)
        scale = jnp.sqrt(1 - 0.999**count)
        moved = [
            item - size * a / (jnp.sqrt(b) / scale + 1e-8) for item, a, b in zip(parameters, first, second, strict=True)
        ]
        return value, (moved, first, second, count)

    stepped = jax.jit(train, donate_argnums=0)
    zeros = [jnp.zeros_like(item) for item in parameters]
    state = (parameters, zeros, [jnp.zeros_like(item) for item in parameters], jnp.float32(0))

    def step() -> None:
        nonlocal state
        _, state = jax.block_until_ready(stepped(state, others, key))

    return step


def _dtype(item: Any) -> Any:
    return numpy.int32 if not item.value.tensor_type.dtype.is_floating_point else numpy.float32
