"""Two losses that PyTorch computes differently on tensors without data: they are recorded as eager computes them.

Both functions ask whether a tensor is of a subclass, and every traced tensor is. Cross entropy with weights and label
smoothing then adds the weights of ignored targets as zeros, which rounds differently from leaving them out. CTC with
lengths that are numbers writes these into a tensor that has no memory. So during a capture both functions are replaced.
Other threads still reach the originals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undertow.ir import Node, Value
from undertow.ir.pytorch import operation_of
from undertow.ops.own import register_kernel
from undertow.torch_internals import c_nn

if TYPE_CHECKING:
    from undertow.record.tracing import Recorder

aten = torch.ops.aten

_MEAN = 1  # of PyTorch's reductions


@contextmanager
def eager_losses(recorder: Recorder) -> Iterator[None]:
    """Record losses as eager computes them."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (c_nn, "cross_entropy_loss", partial(_record_cross_entropy, recorder)),
        (torch, "ctc_loss", _ctc_loss),
    ]
    originals = [getattr(module, name) for module, name, _ in replaced]
    for (module, name, record), original in zip(replaced, originals, strict=True):
        setattr(module, name, _for_this_thread(partial(record, original), original))
    try:
        yield
    finally:
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)


def _for_this_thread(record: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (record if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


def _sum_selected(weight: Tensor, target: Tensor, is_ignored: Tensor) -> Tensor:
    return weight.gather(0, target.masked_select(~is_ignored).flatten()).sum()


# The sum of the weights of the targets that are not ignored.
SUM_SELECTED = register_kernel(
    "sum_selected_weights",
    _sum_selected,
    why_not_captured=lambda node: f"the number of targets that are not ignored is read ({node.origin})",
)


def _record_cross_entropy(recorder: Recorder, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    start = len(recorder.nodes)
    loss = original(*args, **kwargs)
    recorder.nodes[start:] = _with_selected_weights(recorder.nodes[start:])
    return loss


def _with_selected_weights(nodes: list[Node]) -> list[Node]:
    """The nodes of a cross entropy. Gathering, masking and adding weights becomes selecting and adding them."""
    makers = {value: node for node in nodes for value in node.named_outputs}
    readers = {value: node for node in nodes for value in node.inputs}  # the last reader; here each value has one
    for gather in nodes:
        if gather.target is aten.gather.default:
            weight, _, chosen = gather.args
            masked_target = _maker_before_views(chosen, makers)
            (gathered,) = gather.named_outputs
            masked = readers[gathered]
            total = readers[masked.named_outputs[0]]
            selected = Node(
                operation_of(SUM_SELECTED), (weight, *masked_target.args[:2]), {}, total.outputs, total.origin
            )
            gone = {gather: (), masked: (), total: (selected,)}
            return [kept for node in nodes for kept in gone.get(node, (node,))]
    return nodes


def _maker_before_views(value: Value, makers: dict[Value, Node]) -> Node:
    maker = makers[value]
    return _maker_before_views(maker.inputs[0], makers) if maker.operation.is_view else maker


def _ctc_loss(
    original: Callable[..., Tensor],
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    if reduction != _MEAN or isinstance(target_lengths, Tensor):
        return original(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    losses = original(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()
