"""What PyTorch says of its operations: what they mutate, alias, draw, and return; how they are called.

Everything is read from the schema and the tags, except `_UNDECLARED_MUTATIONS`, where the schema is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from undertow.ir.types import TensorType
from undertow.torch_internals import OpOverload, SchemaTensorType

aten = torch.ops.aten

# Batch normalisation in training mode updates its running statistics, which these schemas do not declare
# (read off the kernels' behaviour on torch 2.11 and 2.13).
_UNDECLARED_MUTATIONS = {
    aten.native_batch_norm.default: ("running_mean", "running_var"),
    aten.cudnn_batch_norm.default: ("running_mean", "running_var"),
    aten.miopen_batch_norm.default: ("running_mean", "running_var"),
}


# The fake kernels of these give other sizes or strides than the real ones (torch 2.13, CPU), so that their types are
# found by running them. For these two every call: oneDNN's workspace has no bytes on fake tensors, and folding has
# other strides along a batch of 1.
_FAKE_DIFFERS = {aten.mkldnn_rnn_layer.default, aten.col2im.default}

# For these, calls on permuted or sliced arguments: the fake kernels keep or drop strides where the real ones do not
# (tests/ops/test_recorded_types.py compares all operations of the registry).
_FAKE_STRIDES_DIFFER = {
    aten.log_sigmoid_forward.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
    aten.native_batch_norm_backward.default,
    aten.native_layer_norm_backward.default,
    aten._weight_norm_interface.default,
    aten.native_dropout.default,
    aten.rrelu_with_noise.default,
    aten.copysign.Tensor,
    aten.div.Tensor_mode,
    aten.ldexp.Tensor,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.pow.Scalar,
    aten.xlogy.Tensor,
    aten.channel_shuffle.default,
    aten.index.Tensor,
    aten.max_unpool2d.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default,
    aten.replication_pad3d_backward.default,
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.logit_backward.default,
    aten.softplus_backward.default,
    aten._log_softmax_backward_data.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.nll_loss2d_forward.default,
    aten.nll_loss2d_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.poisson.default,
    aten.uniform.default,
}

# The same, but only along sizes of 1 in the outputs, such as the gradients of 1 x 1 convolution kernels.
_FAKE_ONES_DIFFER = {aten.convolution_backward.default, aten.view.default}

# Most fake kernels are wrong about arguments with odd strides along sizes of 1. These are right, and would be slow to
# run: in a network with channels last the weights of every convolution of 1 x 1 have such strides.
_FAKE_ODD_ONES_HOLD = {
    aten.convolution.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
}


def is_type_found_by_running(
    target: OpOverload, tensors: Iterable[torch.Tensor], results: Iterable[torch.Tensor | None]
) -> bool:
    """Whether fake `results` may have other types than this call on `tensors` gives.

    Strides along dimensions of size 1 are compared too: some kernels choose a layout by them.
    """
    if target in _FAKE_DIFFERS:
        return True
    types = [TensorType.of(tensor) for tensor in tensors]
    has_ones = any(result is not None and 1 in result.shape for result in results)
    if target in _FAKE_STRIDES_DIFFER or (has_ones and target in _FAKE_ONES_DIFFER):
        return any(not kind.is_contiguous for kind in types)
    # Where a size of 1 is broadcast, its stride does not affect the result of an elementwise operation.
    is_reached = has_ones or torch.Tag.pointwise not in target.tags
    is_right = target in _FAKE_ODD_ONES_HOLD or schema_of(target).is_view
    return is_reached and not is_right and any(kind.has_odd_ones for kind in types)


@dataclass(frozen=True)
class Schema:
    """What recording and running one operation depend on."""

    mutated: tuple[str, ...]
    is_inplace: bool  # mutates its first argument and returns it
    is_view: bool
    is_random: bool
    returns_single: bool  # one tensor, neither a tuple nor a list
    has_effect: bool  # must run even if nobody reads its outputs


@cache
def schema_of(target: OpOverload) -> Schema:
    """The facts about `target`."""
    arguments = target._schema.arguments
    returns = target._schema.returns
    mutated = tuple(argument.name for argument in arguments if argument.is_write)
    mutated += _UNDECLARED_MUTATIONS.get(target, ())
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return Schema(
        mutated=mutated,
        is_inplace=len(mutated) == 1
        and mutated[0] == arguments[0].name
        and len(returns) == 1
        and returns[0].alias_info is not None,
        is_view=not mutated and any(item.alias_info is not None for item in returns),
        is_random=is_random,
        returns_single=len(returns) == 1 and isinstance(returns[0].type, SchemaTensorType),
        has_effect=is_random or not returns,
    )


@cache
def functional_of(target: OpOverload) -> OpOverload | None:
    """The operation that computes what the in-place `target` writes, with the same arguments; None if there is none."""
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    packet = getattr(aten, name, None)
    if packet is None or target.namespace != "aten":
        return None
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if [(argument.name, str(argument.type)) for argument in candidate._schema.arguments] == wanted:
            return candidate
    return None


@cache
def inplace_of(target: OpOverload) -> OpOverload | None:
    """The operation that writes the result of `target` over its first argument; None if there is none."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(aten, target._schema.name.removeprefix("aten::") + "_", None)
    if packet is None:
        return None
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if schema_of(candidate).is_inplace and functional_of(candidate) is target:
            return candidate
    return None


def is_mutated(target: OpOverload, bound: dict[str, Any]) -> bool:
    """Whether this call mutates an argument: batch normalisation does so in training mode only."""
    if target in _UNDECLARED_MUTATIONS:
        return bound["training"] and any(bound[name] is not None for name in _UNDECLARED_MUTATIONS[target])
    return bool(schema_of(target).mutated)


def flatten_outputs(result: Any) -> list[torch.Tensor | None]:
    """The tensors an operation returned, in order; None stands for an item that is no tensor (a count, a flag)."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [item for part in result for item in flatten_outputs(part)]
    return [None]


def bind_arguments(target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in. `self` stays `self`."""
    bound = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            bound[argument.name] = args[position]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
        else:
            raise TypeError(f"{target}: argument {argument.name} is missing")
    return bound
