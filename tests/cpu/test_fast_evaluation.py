"""Evaluation in `numerics="fast"`: within a derived bound of float64, and every change of the weights is noticed."""

import copy
import random

import pytest
import torch
from spread_cases import spread
from torch import nn
from torch.nn.functional import cross_entropy, max_pool2d

import undertow as ut
from undertow.kernels.convolution import ALGORITHMS, Pass, shape_of
from undertow.kernels.convolution.algorithm import UNIT_ROUNDOFF, accumulated_error
from undertow.kernels.fingerprint import fingerprint, sample_addresses
from undertow.models import SMALL


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


class Layer(nn.Module):
    """Any of convolution, batch normalisation, residual sum, ReLU and pooling, in this order."""

    def __init__(self, draw, channels):
        super().__init__()
        groups = draw.choice([item for item in (1, 1, 2, 4) if channels % item == 0])
        out_channels = groups * draw.choice((1, 3, 8, 16))
        kernel, stride = draw.choice((1, 3, 3, 5)), draw.choice((1, 1, 2))
        has_convolution = draw.random() < 0.8
        self.is_residual = has_convolution and draw.random() < 0.4
        if self.is_residual:
            groups, out_channels, stride, kernel = 1, channels, 1, draw.choice((1, 3))
        self.convolution = None
        if has_convolution:
            self.convolution = nn.Conv2d(
                channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=draw.random() < 0.5
            )
            channels = out_channels
        self.norm = nn.BatchNorm2d(channels, affine=draw.random() < 0.7, eps=draw.choice((1e-5, 1e-3)))
        self.has_relu, self.has_pool = draw.random() < 0.7, draw.random() < 0.2
        self.channels = channels
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.2, 3.0)
        if self.norm.affine:
            self.norm.weight.data.normal_()
            self.norm.bias.data.normal_()

    def forward(self, x):
        y = x if self.convolution is None else self.convolution(x)
        y = self.norm(y)
        if self.is_residual:
            y = y + x
        if self.has_relu:
            y = torch.relu(y)
        return max_pool2d(y, 2, ceil_mode=True) if self.has_pool else y

    def bound(self, x, error):
        """The bound of the error of this layer's result, given `error` in x. x and weights are in float64.

        With n products of x and the folded weights w added up, it is the sum of: the bound of the algorithm, for
        whichever algorithm is chosen; one rounding of each weight; the error of x times the sum of |w|; and the
        roundings of the folded bias, of adding it, and of adding the residual.
        """
        norm = self.norm
        scale = (norm.running_var + norm.eps).rsqrt() * (norm.weight if norm.affine else 1)
        shift = (norm.bias if norm.affine else 0) - norm.running_mean * scale
        largest_x = x.abs().max() + error
        if self.convolution is None:
            # alpha = weight / sqrt(variance + epsilon), beta = bias - mean alpha, y = alpha x + beta.
            largest = (largest_x + norm.running_mean.abs().max()) * scale.abs().max() + shift.abs().max()
            return error * scale.abs().max() + accumulated_error(8) * largest
        item = self.convolution
        weight = item.weight * scale.view(-1, 1, 1, 1)
        shape = shape_of(x, weight, item.stride, item.padding, item.dilation, item.groups)
        of_algorithms = max(a.error_bound(shape, Pass.FORWARD) for a in ALGORITHMS if a.refusal(shape) is None)
        largest_weight = weight.abs().max() * (1 + UNIT_ROUNDOFF)
        num_terms = weight[0].numel()
        bias = (item.bias * scale if item.bias is not None else 0) + shift
        largest_sum = num_terms * largest_x * largest_weight + bias.abs().max()
        largest_sum += largest_x if self.is_residual else 0
        return (
            of_algorithms * largest_x * largest_weight
            + UNIT_ROUNDOFF * num_terms * largest_x * weight.abs().max()
            + error * (weight.abs().sum((1, 2, 3)).max() + self.is_residual)
            + accumulated_error(4) * largest_sum
        )


def random_network(seed):
    torch.manual_seed(seed)
    draw = random.Random(seed)
    channels = draw.choice((1, 3, 4, 8))
    x = torch.randn(draw.choice((1, 2)), channels, draw.randint(9, 20), draw.randint(9, 20))
    if draw.random() < 0.4:
        x = x.contiguous(memory_format=torch.channels_last)
    layers = []
    for _ in range(draw.randint(1, 4)):
        layers.append(Layer(draw, channels))
        channels = layers[-1].channels
    return nn.Sequential(*layers).eval(), x


@pytest.mark.parametrize("seed", spread(range(24), str, every=3))
def test_random_networks_stay_within_the_derived_bound(seed):
    network, x = random_network(seed)
    exact = copy.deepcopy(network).double()
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        found, before = planned(x), network(x)
        value, error = x.double(), 0.0
        for layer in exact:
            error = layer.bound(value, error)
            value = layer(value)
    assert (found.double() - value).abs().max() <= error
    assert found.stride() == before.stride()
    num_norms = sum("batch_norm" in node.name for node in planned.plan.nodes)
    assert num_norms == sum(layer.convolution is None for layer in network)


def folded_network():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 64, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    network(x)
    return network.eval(), x


def replace_weight(network, x):
    network[0].weight = nn.Parameter(torch.randn_like(network[0].weight))


def step_optimizer(network, x):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    with torch.enable_grad():
        network(x).sum().backward()
    optimizer.step()


def update_statistics(network, x):
    network.train()
    network(3 * x + 1)
    network.eval()


CHANGES = {
    "optimizer": step_optimizer,
    "load_state_dict": lambda network, x: network.load_state_dict(
        {name: item + 0.5 if item.is_floating_point() else item for name, item in network.state_dict().items()}
    ),
    "in place": lambda network, x: network[3].weight.mul_(2),
    "one element": lambda network, x: network[6].weight[7, 100].add_(1),
    "a buffer": lambda network, x: network[1].running_mean.add_(1),
    "statistics": update_statistics,
    "another tensor": replace_weight,
    "other data": lambda network, x: setattr(network[0].weight, "data", torch.randn_like(network[0].weight)),
    "through data": lambda network, x: network[0].weight.data.mul_(1.5),
    "through NumPy": lambda network, x: network[6].weight.detach().numpy().__imul__(2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_weights_are_noticed(name):
    network, x = folded_network()
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        before = planned(x)
        torch.testing.assert_close(before, network(x))
        assert torch.equal(planned(x), before)
        CHANGES[name](network, x)
        torch.testing.assert_close(planned(x), network(x))
        assert not torch.allclose(planned(x), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("keep", [lambda x: x > 0.9, lambda x: (torch.arange(x.numel()) % 16 == 5).view_as(x)])
def test_a_write_to_pruned_weights_shows(dtype, keep):
    for seed in range(20):
        torch.manual_seed(seed)
        weight = torch.randn(37, 24, 3, 3).to(dtype)
        weight *= keep(torch.rand(weight.shape))
        places = sample_addresses([weight, torch.zeros(5), torch.zeros(0)])
        before = fingerprint(places)
        assert fingerprint(places) == before
        weight.mul_(3)
        assert fingerprint(places) != before


def test_weights_made_in_inference_mode_are_prepared_in_every_call():
    with torch.inference_mode():
        network, x = folded_network()
        planned = ut.plan(network, (x,), numerics="fast")
        torch.testing.assert_close(planned(x), network(x))
        network[0].weight.mul_(2)
        torch.testing.assert_close(planned(x), network(x))


def test_weights_are_prepared_once():
    network, x = folded_network()
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        planned(x)
        preparation = planned.undertow_runner._last.step().preparation
        values = preparation.values(
            [dict(network.state_dict(keep_vars=True))[item.path] for item in preparation.inputs]
        )
        planned(x)
        assert preparation._values is values


def test_the_user_sees_nothing_of_it():
    network, x = folded_network()
    before = {name: item.clone() for name, item in network.state_dict().items()}
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        planned(x)
    assert list(planned.state_dict()) == list(before)
    assert all(torch.equal(item, before[name]) for name, item in planned.state_dict().items())
    held = planned.plan.held["prepared weights"]
    assert held == sum(
        item.value.type.num_bytes for item in planned.plan.program.inputs if item.kind.name == "PREPARED"
    )
    assert held > 0


@pytest.mark.parametrize("name", ["vgg_small", "resnet50", "unet", "gpt", "mlp"])
def test_the_zoo_is_near_eager(name):
    torch.manual_seed(0)
    entry = SMALL[name]
    network, args = entry.build(), entry.example_inputs(3)
    network(*args)
    network.eval()
    with torch.no_grad():
        eager, exact = network(*args), copy.deepcopy(network).double()
        exact = exact(*(item.double() if item.is_floating_point() else item for item in args))
        found = ut.plan(network, args, numerics="fast")(*args)
        own_error = (eager - exact).abs().max()
    assert (found - exact).abs().max() < 30 * own_error.clamp_min(1e-6)


@pytest.mark.parametrize("name", ["vgg_small", "resnet50", "unet", "gpt"])
def test_exact_keeps_the_bits(name):
    entry = SMALL[name]
    network, args = entry.build(), entry.example_inputs(3)
    network(*args)
    network.eval()
    with torch.no_grad():
        planned = ut.plan(network, args)
        assert torch.equal(planned(*args), network(*args))
        assert planned.plan.program.preparation is None


def test_gradients_in_eval_mode():
    network, x = folded_network()
    eager, y = copy.deepcopy(network), torch.randint(5, (4,))
    planned = ut.plan(network, (x,), numerics="fast")
    with torch.no_grad():
        planned(x)
    for item in (eager, planned):
        cross_entropy(item(x), y).backward()
    for found, expected in zip(planned.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(planned(x), eager(x))


def test_batch_statistics_are_not_folded():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False), nn.ReLU()).eval()
    x = torch.randn(4, 3, 12, 12)
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        torch.testing.assert_close(planned(x), network(x))
    assert any("batch_norm" in node.name for node in planned.plan.nodes)


class ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.convolution(x)
        return self.norm(y) + y.tanh() + self.convolution(y)


def test_a_convolution_that_others_read_is_not_folded():
    network, x = ReadTwice().eval(), torch.randn(2, 4, 9, 9)
    network.norm.running_mean.normal_()
    with torch.no_grad():
        planned = ut.plan(network, (x,), numerics="fast")
        torch.testing.assert_close(planned(x), network(x))
    assert any("batch_norm" in node.name for node in planned.plan.nodes)
    # Both convolutions have the same weights and sizes: prepared once.
    prepared = planned.plan.program.preparation
    assert prepared is not None and len(prepared.nodes) == 1


class SumOfActivations(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(torch.relu(self.norm(self.convolution(x))) + x)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_sum_after_an_activation_stays_there(is_training):
    network, x = SumOfActivations().train(is_training), torch.randn(2, 4, 9, 9)
    with torch.set_grad_enabled(is_training):
        planned = ut.plan(network, (x,), numerics="fast")
        torch.testing.assert_close(planned(x), copy.deepcopy(network)(x))


def test_the_bits_are_the_same_whether_weights_are_held_or_not():
    network, x = folded_network()
    with torch.no_grad():
        plan = ut.plan(network, (x,), numerics="fast")
        expected = plan(x)
        with pytest.raises(ut.InfeasibleBudget) as refusal:
            ut.plan(network, (x,), numerics="fast", budget=1)
        least = ut.plan(network, (x,), numerics="fast", budget=refusal.value.minimum_bytes)
        roomy = ut.plan(network, (x,), numerics="fast", budget=plan.plan.peak_bytes + 2**24)
        assert torch.equal(least(x), expected) and torch.equal(roomy(x), expected)
    assert "prepared weights" not in least.plan.held
    assert roomy.plan.held["prepared weights"] == plan.plan.held["prepared weights"]


def test_a_change_of_shape_and_layout():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        planned = ut.plan(network, (torch.randn(2, 3, 8, 8),), numerics="fast")
        for shape in ((2, 3, 8, 8), (1, 3, 30, 7), (5, 3, 1, 1)):
            x = torch.randn(shape)
            for item in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3)):
                torch.testing.assert_close(planned(item), network(item))


def test_prepared_weights_are_freed():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    planned = ut.plan(network, (torch.randn(1, 3, 8, 8),), numerics="fast")
    runner, steps = planned.undertow_runner, []
    with torch.no_grad():
        for batch in range(1, 8):
            planned(torch.randn(batch, 3, 8, 8))
            steps.append(runner._last.step())
    assert [bool(step.preparation._values) for step in steps] == [False] * 3 + [True] * 4
    planned(torch.randn(1, 3, 8, 8)).sum().backward()
    assert not any(step.preparation._values for step in steps)
