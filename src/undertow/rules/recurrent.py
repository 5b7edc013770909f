"""Recurrent layers and cells that run as one kernel: LSTM on the CPU (oneDNN), LSTM and GRU on CUDA.

In: inputs, weights, states and the kernel's outputs. Out: the cotangents of inputs, weights and states. All other
layers are recorded as their elementary operations. An LSTM step, with the gates i, f, g, o concatenated in a:

    a = x W^T + h U^T + b        i, f, o = sigmoid(a)        g = tanh(a)        c' = f c + i g        h' = o tanh(c')

The composed form unrolls these equations over time and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from undertow.errors import MissingRule
from undertow.rules.registry import Call, Case, Op, Sampler, case, composed_joint, fused_joint, kink, register

aten = torch.ops.aten

_LSTM_MODE = 2  # the kernels' number for LSTM


@dataclass(frozen=True)
class _LstmStep:
    """What the derivative of a step needs."""

    gates: Sequence[torch.Tensor]  # i, f, g, o
    cell_before: torch.Tensor
    squashed_cell: torch.Tensor  # tanh(c')
    cell: torch.Tensor

    @property
    def hidden(self) -> torch.Tensor:
        return self.gates[3] * self.squashed_cell


def _lstm_step(pre_activation: torch.Tensor, cell: torch.Tensor) -> _LstmStep:
    i, f, g, o = pre_activation.chunk(4, dim=-1)
    gates = (i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid())
    cell_after = gates[1] * cell + gates[0] * gates[2]
    return _LstmStep(gates, cell, cell_after.tanh(), cell_after)


# ct_c' += ct_h' o (1 - tanh(c')^2)
# ct_i = ct_c' g        ct_f = ct_c' c        ct_g = ct_c' i        ct_o = ct_h' tanh(c')        ct_c = ct_c' f
def _lstm_step_back(
    step: _LstmStep, ct_hidden: torch.Tensor, ct_cell: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangents of the pre-activation and of the cell before the step."""
    i, f, g, o = step.gates
    ct_cell = ct_cell + ct_hidden * o * (1 - step.squashed_cell * step.squashed_cell)
    ct_gates = [
        ct_cell * g * i * (1 - i),
        ct_cell * step.cell_before * f * (1 - f),
        ct_cell * i * (1 - g * g),
        ct_hidden * step.squashed_cell * o * (1 - o),
    ]
    return torch.cat(ct_gates, dim=-1), ct_cell * f


_LAYER_INPUTS = ("input", "weight0", "weight1", "weight2", "weight3", "hx_", "cx_")


def _layer_kernel(
    c: Call,
    ct_output: torch.Tensor | None,
    ct_hidden: torch.Tensor | None,
    ct_cell: torch.Tensor | None,
    _: None,
) -> tuple[torch.Tensor, ...]:
    return aten.mkldnn_rnn_layer_backward(
        *(c.input, c.weight0, c.weight1, c.weight2, c.weight3, c.hx_, c.cx_, *c.outs[:3]),
        *(ct_output, ct_hidden, ct_cell, c.reverse, c.mode, c.hidden_size, c.num_layers, c.has_biases, c.train),
        *(c.bidirectional, c.batch_sizes, c.batch_first, c.outs[3]),
    )


def _layer_unrolled(
    c: Call,
    ct_output: torch.Tensor | None,
    ct_hidden: torch.Tensor | None,
    ct_cell: torch.Tensor | None,
    _: None,
) -> dict[str, torch.Tensor]:
    order = list(range(c.input.shape[0]))
    if c.reverse:
        order.reverse()
    from_input = c.input.matmul(c.weight0.t())
    if c.has_biases:
        from_input = from_input + c.weight2 + c.weight3
    hidden, cell = c.hx_, c.cx_
    hidden_before, steps = {}, {}
    for time in order:
        hidden_before[time] = hidden
        steps[time] = _lstm_step(from_input[time] + hidden.matmul(c.weight1.t()), cell)
        hidden, cell = steps[time].hidden, steps[time].cell

    ct_hidden = torch.zeros_like(hidden) if ct_hidden is None else ct_hidden
    ct_cell = torch.zeros_like(cell) if ct_cell is None else ct_cell
    ct_gates = {}
    for time in reversed(order):
        if ct_output is not None:
            ct_hidden = ct_hidden + ct_output[time]
        ct_gates[time], ct_cell = _lstm_step_back(steps[time], ct_hidden, ct_cell)
        ct_hidden = ct_gates[time].matmul(c.weight1)

    ct_all = torch.stack([ct_gates[time] for time in range(len(order))])
    before = torch.stack([hidden_before[time] for time in range(len(order))])
    ct_bias = ct_all.sum((0, 1))
    cts = {
        "input": ct_all.matmul(c.weight0),
        "weight0": ct_all.flatten(0, 1).t().matmul(c.input.flatten(0, 1)),
        "weight1": ct_all.flatten(0, 1).t().matmul(before.flatten(0, 1)),
        "hx_": ct_hidden,
        "cx_": ct_cell,
    }
    return cts | ({"weight2": ct_bias, "weight3": ct_bias} if c.has_biases else {})


def _layer_samples(draw: Sampler) -> list[Case]:
    shapes = [(5, 2, 3), (16, 3), (16, 4), (16,), (16,), (2, 4), (2, 4)]

    def layer(reverse: bool) -> Case:
        # The kernel does not support float64.
        tensors = [draw(*shape).float() for shape in shapes]
        return kink(*tensors, reverse, [], _LSTM_MODE, 4, 1, True, False, False, True)

    return [layer(reverse=False), layer(reverse=True)]


register(
    Op(
        aten.mkldnn_rnn_layer.default,
        vjps=(
            fused_joint(*_LAYER_INPUTS, by=_layer_kernel),
            composed_joint(*_LAYER_INPUTS, by=_layer_unrolled),
        ),
        samples=_layer_samples,
        devices=("cpu",),
    )
)


def _with_and_without_bias(draw: Sampler, *shapes: tuple[int, ...]) -> list[Case]:
    return [case(*(draw(*shape) for shape in shapes)), case(*(draw(*shape) for shape in shapes[:3]))]


_LSTM_CELL_INPUTS = ("input_gates", "hidden_gates", "cx", "input_bias", "hidden_bias")
_GRU_CELL_INPUTS = ("input_gates", "hidden_gates", "hx", "input_bias", "hidden_bias")


def _with_bias(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


def _lstm_cell(
    c: Call, ct_hidden: torch.Tensor | None, ct_cell: torch.Tensor | None, _: None
) -> dict[str, torch.Tensor]:
    step = _lstm_step(_with_bias(c.input_gates, c.input_bias) + _with_bias(c.hidden_gates, c.hidden_bias), c.cx)
    ct_hidden = torch.zeros_like(step.cell) if ct_hidden is None else ct_hidden
    ct_cell = torch.zeros_like(step.cell) if ct_cell is None else ct_cell
    ct_gates, ct_before = _lstm_step_back(step, ct_hidden, ct_cell)
    ct_bias = ct_gates.sum(0)
    return dict(zip(_LSTM_CELL_INPUTS, (ct_gates, ct_gates, ct_before, ct_bias, ct_bias), strict=True))


def _lstm_cell_kernel(
    c: Call, ct_hidden: torch.Tensor | None, ct_cell: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    ct_gates, ct_before, ct_bias = aten._thnn_fused_lstm_cell_backward_impl(
        ct_hidden, ct_cell, c.cx, c.outs[1], c.outs[2], c.input_bias is not None
    )
    return ct_gates, ct_gates, ct_before, ct_bias, ct_bias


register(
    Op(
        aten._thnn_fused_lstm_cell.default,
        vjps=(
            fused_joint(*_LSTM_CELL_INPUTS, by=_lstm_cell_kernel),
            composed_joint(*_LSTM_CELL_INPUTS, by=_lstm_cell),
        ),
        samples=lambda draw: _with_and_without_bias(draw, (2, 16), (2, 16), (2, 4), (16,), (16,)),
        devices=("cuda",),
    )
)


# r = sigmoid(a_r + b_r)        z = sigmoid(a_z + b_z)        n = tanh(a_n + r b_n)        h' = n + z (h - n)
# with a the gates from the input and b the gates from the hidden state
def _gru_cell(c: Call, ct: torch.Tensor, _: None) -> dict[str, torch.Tensor]:
    a_r, a_z, a_n = _with_bias(c.input_gates, c.input_bias).chunk(3, dim=-1)
    b_r, b_z, b_n = _with_bias(c.hidden_gates, c.hidden_bias).chunk(3, dim=-1)
    reset, update = (a_r + b_r).sigmoid(), (a_z + b_z).sigmoid()
    new = (a_n + reset * b_n).tanh()
    ct_new = ct * (1 - update) * (1 - new * new)
    ct_update = ct * (c.hx - new) * update * (1 - update)
    ct_reset = ct_new * b_n * reset * (1 - reset)
    ct_input_gates = torch.cat([ct_reset, ct_update, ct_new], dim=-1)
    ct_hidden_gates = torch.cat([ct_reset, ct_update, ct_new * reset], dim=-1)
    cts = (ct_input_gates, ct_hidden_gates, ct * update, ct_input_gates.sum(0), ct_hidden_gates.sum(0))
    return dict(zip(_GRU_CELL_INPUTS, cts, strict=True))


register(
    Op(
        aten._thnn_fused_gru_cell.default,
        vjps=(
            fused_joint(
                *_GRU_CELL_INPUTS,
                by=lambda c, ct, _: aten._thnn_fused_gru_cell_backward(ct, c.outs[1], c.input_bias is not None),
            ),
            composed_joint(*_GRU_CELL_INPUTS, by=_gru_cell),
        ),
        samples=lambda draw: _with_and_without_bias(draw, (2, 12), (2, 12), (2, 4), (12,), (12,)),
        devices=("cuda",),
    )
)

_CUDNN_INPUTS = ("input", "hx", "cx", "weight")


def _cudnn_kernel(
    c: Call,
    ct_output: torch.Tensor | None,
    ct_hidden: torch.Tensor | None,
    ct_cell: torch.Tensor | None,
    *_: None,
) -> tuple[object, ...]:
    output, _, _, reserve, weight_buffer = c.outs
    if weight_buffer is None:
        # The real kernel returns packed weights, but recording sees only PyTorch's fake kernel, which returns None.
        raise MissingRule(
            "the derivative of cuDNN's recurrent layers cannot be recorded; "
            "run the model under torch.backends.cudnn.flags(enabled=False)"
        )
    return aten._cudnn_rnn_backward(
        *(c.input, c.weight, c.weight_stride0, weight_buffer, c.hx, c.cx, output, ct_output, ct_hidden, ct_cell),
        *(c.mode, c.hidden_size, c.proj_size, c.num_layers, c.batch_first, c.dropout, c.train, c.bidirectional),
        # cuDNN writes into the reserve.
        *(c.batch_sizes, c.dropout_state, reserve.clone(), [c.wants(name) for name in _CUDNN_INPUTS]),
    )


def _cudnn_samples(draw: Sampler) -> list[Case]:
    weights = [draw(*shape) for shape in ((16, 3), (16, 4), (16,), (16,))]
    states = [draw(1, 2, 4) for _ in range(2)]
    layer: tuple[object, ...] = (_LSTM_MODE, 4, 0, 1, False, 0.0, True, False, [], None)
    return [case(draw(5, 2, 3), weights, 4, None, *states, *layer)]


register(
    Op(
        aten._cudnn_rnn.default,
        vjps=(fused_joint(*_CUDNN_INPUTS, by=_cudnn_kernel),),
        samples=_cudnn_samples,
        devices=("cuda",),
    )
)
