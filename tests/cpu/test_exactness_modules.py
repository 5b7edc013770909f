"""Small modules with constructs that capture must handle: three training steps have eager's bits."""

import copy
import dataclasses
import math

import numpy
import pytest
import torch
import torch.nn.functional as F
from exactness import assert_same_steps, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import undertow as ut


class Bare(nn.Module):
    """A linear layer, and what the case does with it."""

    def __init__(self, body, **extra):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body
        for name, item in extra.items():
            self.register_buffer(name, item) if isinstance(item, torch.Tensor) else setattr(self, name, item)

    def forward(self, x):
        return self.body(self, x)


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    parts: dict


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return torch.sin(factor * x)

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return ct * ctx.factor * torch.cos(ctx.factor * x) * 1.5, None  # not the derivative, on purpose


class GradientInside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, ct):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.sin(leaf).sum(), leaf)
        return ct @ weight * slope, ct.t() @ x


class RunsModuleAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, ct):
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.module(leaf)
        torch.autograd.backward(again, ct)
        return leaf.grad, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left @ right

    @staticmethod
    def backward(ctx, ct):
        left, right = ctx.saved_tensors
        return ct @ right.t(), left.t() @ ct


def write_spectrum(spectrum):
    kept = torch.zeros_like(spectrum)
    kept[:, :3] = spectrum[:, :3] * 2
    return kept


class DoubleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, ct):
        return ct * 2


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0].cos()


def write_column(m, x):
    h = m.linear(x)
    h[:, 0] = 0
    h[:, 1:3] *= 2
    h.t()[4].exp_()
    return h


def fill_rows(m, x):
    out = torch.zeros(4, 8)
    out[:, :4] = m.linear(x)[:, :4]
    out[:, 4:] = m.linear(x)[:, 4:] * 2
    return out


def average_buffer(m, x):
    h = m.linear(x)
    m.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - m.average


def reassign_buffer(m, x):
    m.average = m.average * 0.9 + x.mean(0) * 0.1
    return m.linear(x) * m.average


def under_no_grad(m, x):
    h = m.linear(x)
    with torch.no_grad():
        scale = h.abs().mean()
        h.mul_(2)
    return h / scale


def gradient_penalty(m, x):
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(torch.tanh(m.linear(x)).sum(), x, create_graph=True)
    return m.linear(x) + (slope.norm(2, 1, keepdim=True) - 1) ** 2


def layer_drop(m, x):
    for _ in range(3):
        if torch.rand([]) < 0.5:
            x = torch.tanh(m.linear(x))
    return m.linear(x)


def mask_assignment(m, x):
    h = m.linear(x)
    h[x > 0] = m.linear(x)[x > 0] * 2
    return h


def remember(m, x):
    m.last = m.linear(x)
    return m.last * 2


def autocast_inside(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = m.linear(m.linear(x))
        with torch.autocast("cpu", enabled=False):
            h = m.linear(h.float())
    return h


CASES = {
    "write_column": Bare(write_column),
    "fill_rows": Bare(fill_rows),
    "average_buffer": Bare(average_buffer, average=torch.zeros(8)),
    "reassign_buffer": Bare(reassign_buffer, average=torch.ones(8)),
    "under_no_grad": Bare(under_no_grad),
    "gradient_penalty": Bare(gradient_penalty),
    "layer_drop": Bare(layer_drop),
    "mask_assignment": Bare(mask_assignment),
    "remember": Bare(remember),
    "autocast_inside": Bare(autocast_inside),
    "one_layer_many_times": Bare(lambda m, x: m.linear(torch.tanh(m.linear(torch.tanh(m.linear(x)))))),
    "elu_in_place": Bare(lambda m, x: F.elu_(m.linear(x), 1.3) + F.celu_(m.linear(x), 0.7) + F.selu_(m.linear(x))),
    "dataclass": Bare(lambda m, x: Result(m.linear(x), {"again": [m.linear(x) * 2, None, "text"]})),
    "unused_output": Bare(lambda m, x: (m.linear(x), m.linear(x * 2))),
    "returns_input": Bare(lambda m, x: (m.linear(x), x, m.linear.weight)),
    "transposed_in_place": Bare(lambda m, x: m.linear(x).t_().contiguous().unsqueeze_(0)),
    "data_write": Bare(lambda m, x: (lambda h: (h.data.mul_(2), h)[1])(m.linear(x))),
    "function": Bare(lambda m, x: Sine.apply(m.linear(x), 3.0)),
    "function_in_place": Bare(lambda m, x: DoubleInPlace.apply(m.linear(x) * 1)),
    "function_through_numpy": Bare(lambda m, x: ThroughNumpy.apply(m.linear(x))),
    "checkpoint": Bare(
        lambda m, x: checkpoint(lambda h: F.dropout(m.linear(h), 0.5), m.linear(x), use_reentrant=False)
    ),
    "complex": Bare(lambda m, x: torch.fft.rfft(m.linear(x)).abs()),
    "generator": Bare(lambda m, x: m.linear(x) * torch.rand(4, 8, generator=m.source), source=torch.Generator()),
    "complex_factor": Bare(lambda m, x: ((1j * m.linear.weight) * x[:, None]).abs().sum(2)),
    "complex_slices": Bare(lambda m, x: write_spectrum(torch.fft.rfft(m.linear(x))).real),
    "function_with_a_module": Bare(
        lambda m, x: RunsModuleAgain.apply(m.linear(x), m.inner), inner=nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    ),
    "function_with_products": Bare(lambda m, x: Product.apply(x, m.linear.weight) + x),
    "solve": Bare(lambda m, x: torch.linalg.solve(m.linear.weight + 3 * torch.eye(8), m.linear(x).t())),
    "function_with_gradient_inside": Bare(lambda m, x: GradientInside.apply(m.linear(x), m.linear.weight)),
    "batch_norm": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)),
    "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "spectral_norm_by_hook": nn.utils.spectral_norm(nn.Linear(8, 8)),
    "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "lstm": nn.LSTM(8, 5, 2, batch_first=True, dropout=0.2, bidirectional=True),
    "gru": nn.GRU(8, 5, 2, dropout=0.2),
    "transformer_layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
}


def loss_of(result):
    if isinstance(result, Result):
        result = (result.hidden, result.parts["again"][0])
    if isinstance(result, torch.Tensor):
        result = (result,)
    return result[0].float().square().mean() + result[0].float().sin().mean()


@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_eager(name):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    if name in ("lstm", "gru", "transformer_layer"):
        x = torch.randn(2, 4, 8)
    num_steps = 8 if name == "layer_drop" else 3
    if name == "generator":
        CASES[name].source.manual_seed(3)
    assert_same_steps(CASES[name], (x,), {}, loss_of, num_steps=num_steps)


class SmoothedLoss(nn.Module):
    def __init__(self, ignore_index):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.loss = nn.CrossEntropyLoss(torch.rand(5), ignore_index=ignore_index, label_smoothing=0.1)

    def forward(self, x, targets):
        return self.loss(self.linear(x).movedim(-1, 1), targets)


@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("shape", [(17,), (3, 5, 4)])
def test_cross_entropy_leaves_ignored_targets_out(shape, ignore_index):
    """With weights and smoothing, eager does not add zeros for ignored targets, which shows in the order of its sum.

    The number of ignored targets is not a branch: there is one plan for every batch.
    """
    torch.manual_seed(0)
    model = SmoothedLoss(ignore_index)
    eager = copy.deepcopy(model)
    planned = None
    for _ in range(70):
        x, targets = torch.randn(*shape, 6), torch.randint(0, 5, shape)
        targets[targets == 4] = ignore_index
        planned = planned or ut.plan(model, (x, targets))
        expected, found = eager(x, targets), planned(x, targets)
        assert same_bits(expected, found)
        names = [eager.linear.weight, eager.linear.bias], [model.linear.weight, model.linear.bias]
        expected, found = torch.autograd.grad(expected, names[0]), torch.autograd.grad(found, names[1])
        assert all(map(same_bits, expected, found))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_batched", [True, False])
def test_ctc_with_lengths_as_numbers(reduction, is_batched):
    torch.manual_seed(0)
    x = torch.randn(10, 3, 8) if is_batched else torch.randn(10, 8)
    targets = torch.randint(1, 8, (3, 4) if is_batched else (4,))
    lengths = ((10, 9, 3), (3, 0, 4)) if is_batched else ((10,), (4,))

    def body(m, x):
        scores = m.linear(x).log_softmax(-1)
        return F.ctc_loss(scores, targets, *lengths, reduction=reduction, zero_infinity=True)

    assert_same_steps(Bare(body), (x,), {}, lambda result: result.sum())


def test_tied_and_frozen_and_unused_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model.spare = nn.Parameter(torch.ones(3))

    planned = assert_same_steps(model_with_forward(model), (torch.randn(4, 8),), {}, loss_of)
    assert planned.spare.grad is None and planned[2].bias.grad is None


def model_with_forward(model):
    """The same layers in an ordinary forward method."""

    class Chain(nn.Sequential):
        def forward(self, x):
            return self[2](torch.relu(self[1](self[0](x))))

    chain = Chain(model[0], model[1], model[2])
    chain.spare = model.spare
    return chain


@pytest.mark.parametrize("shape", ["batch 0", "batch 1", "strided", "expanded"])
def test_unusual_inputs(shape):
    x = {
        "batch 0": torch.randn(0, 8),
        "batch 1": torch.randn(1, 8),
        "strided": torch.randn(8, 8).t()[::2],
        "expanded": torch.randn(8).expand(4, 8),
    }[shape]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    assert_same_steps(model, (x,), {}, lambda out: out.square().sum())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_not_finite_inputs(bad):
    x = torch.randn(4, 8)
    x[1, 2] = bad
    assert_same_steps(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), (x,), {}, lambda out: out.sum())


class FunctionOf(nn.Module):
    def __init__(self, function, *weights):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([weight.clone() for weight in weights])

    def forward(self):
        return self.function(*self.weights)


def assert_gradients_of_eager(function, *weights):
    """A planned module has the bits of eager's gradients. So has `ut.vjp`, with zeros where eager has no gradient."""
    leaves = [weight.clone().requires_grad_() for weight in weights]
    outputs = function(*leaves)
    ct = -torch.ones_like(outputs)
    outputs.backward(ct)
    model = FunctionOf(function, *weights)
    ut.plan(model, ())().backward(ct)
    pulled_back = ut.vjp(function, *weights)[1](ct)
    for leaf, parameter, cotangent in zip(leaves, model.parameters(), pulled_back, strict=True):
        gradient = None if leaf.grad is None else leaf.grad.clone()  # the clone of a ZeroTensor has memory
        assert same_bits(gradient, parameter.grad)
        assert same_bits(torch.zeros_like(cotangent) if gradient is None else gradient, cotangent)


def test_gradients_that_are_left_out():
    product, multiply = torch.linalg.householder_product, torch.ormqr
    assert_gradients_of_eager(lambda a, t: product(a * 2, t), torch.randn(0, 0), torch.randn(0))
    assert_gradients_of_eager(lambda a, t: product(a * 2, t), torch.randn(5, 5), torch.randn(0))
    assert_gradients_of_eager(lambda a, t: product(a * 2, t), torch.randn(5, 3), torch.randn(3))
    assert_gradients_of_eager(multiply, torch.randn(5, 0), torch.randn(0), torch.randn(5, 2))
    assert_gradients_of_eager(multiply, torch.randn(0, 2, 2), torch.randn(0, 2), torch.randn(0, 2, 2))
    assert_gradients_of_eager(multiply, torch.randn(5, 3), torch.randn(3), torch.randn(5, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_the_zeros_of_sgn_are_not_computed_with(dtype):
    x = torch.tensor([-2.0, 0.0, 3.0, -0.5, math.inf, 1.0]).to(dtype)
    for function in (
        lambda x: (x * -2).sgn(),
        lambda x: (x.view(2, 3) / -3).t().sgn(),
        lambda x: (x * math.inf).sgn(),
        lambda x: (x * -1).sgn() + (x * -1).exp(),
        lambda x: (x * -1).exp() + (x * -1).sgn(),
        lambda x: (scaled := x * -1).sgn() * scaled.exp(),
        lambda x: (scaled := x * -1) * 0 + scaled.sgn(),
    ):
        assert_gradients_of_eager(function, x)
