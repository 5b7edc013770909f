"""Binary layers: the formulas of the paper, planned steps beside eager ones, packed bits beside floats."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.coding.small_file import SmallFile, pack_small_file
from undertow.coding.tensors import CodedTensor
from undertow.small.binary_layers import BinaryConv2d, BinaryLinear, filter_scales, straight_signs
from undertow.small.bit_layers import BitLayer
from undertow.small.packed_layers import PackedLayer
from undertow.small.quantising import code_integers, code_model, code_signs
from undertow.small.running import run_small


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.BatchNorm2d(6),
        BinaryConv2d(6, 9, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.BatchNorm2d(9),
        BinaryConv2d(9, 8, 3, bias=False, binary_inputs=False),
        nn.Flatten(),
        nn.BatchNorm1d(8 * 9),
        BinaryLinear(8 * 9, 20),
        nn.ReLU(),
        BinaryLinear(20, 5, binary_inputs=False),
    )


def signs(x):
    return torch.where(x >= 0, 1.0, -1.0)


def test_signs_and_their_straight_derivative():
    x = torch.tensor([-2.0, -1.0, -0.5, -0.0, 0.0, 0.3, 1.0, 1.5, float("nan")], requires_grad=True)
    y = straight_signs(x)
    assert torch.equal(y[:-1], torch.tensor([-1.0, -1, -1, 1, 1, 1, 1, 1])) and y[-1].isnan()
    y[:-1].sum().backward()
    # hardtanh passes nothing on at its two corners.
    assert torch.equal(x.grad, torch.tensor([0.0, 0, 1, 1, 1, 1, 0, 0, 0]))


def test_a_convolution_is_the_papers():
    """I * W is (sign(I) * sign(W)) K alpha, K the mean over channels convolved with 1 / (w h)."""
    layer = BinaryConv2d(4, 3, 3, padding=1)
    x = torch.randn(2, 4, 6, 7)
    means = functional.conv2d(x.abs().mean(1, keepdim=True), torch.full((1, 1, 3, 3), 1 / 9), padding=1)
    scales = layer.weight.abs().sum((1, 2, 3)) / 36
    expected = functional.conv2d(signs(x), signs(layer.weight), padding=1) * means * scales[:, None, None]
    torch.testing.assert_close(layer(x), expected + layer.bias[:, None, None])
    real = BinaryConv2d(4, 3, 3, binary_inputs=False)
    scales = real.weight.abs().mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(real(x), functional.conv2d(x, scales * signs(real.weight), real.bias))


def test_the_weights_derivative_is_the_real_one_but_for_the_signs():
    """y = sum_i c_i alpha s_i with alpha = mean |w|: dy/dw_j = s_j / n sum_i c_i s_i + alpha c_j."""
    layer = BinaryLinear(5, 1, bias=False, binary_inputs=False).double()
    c = torch.randn(1, 5, dtype=torch.float64)
    layer(c).sum().backward()
    s, w = signs(layer.weight.detach()).double(), layer.weight.detach()
    expected = s / 5 * (c * s).sum() + w.abs().mean() * c
    torch.testing.assert_close(layer.weight.grad, expected)


@pytest.mark.parametrize("has_budget", [False, True])
def test_planned_steps_have_eagers_bits(has_budget):
    planned = make_network()
    eager = copy.deepcopy(planned)
    x, wanted = torch.randn(8, 1, 12, 12), torch.randint(5, (8,))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (planned, eager)]
    terms = {"targets": (wanted,), "loss": functional.cross_entropy, "optimizer": optimizers[0], "costs": "model"}
    step = ut.train_step(planned, (x,), **terms, strict=True)
    if has_budget:
        budget = step.plan.peak_bytes * 85 // 100
        step = ut.train_step(planned, (x,), **terms, strict=True, budget=budget)
        assert step.plan.recomputed and step.plan.peak_bytes <= budget
    for _ in range(3):
        loss = step(x, wanted)
        optimizers[1].zero_grad()
        expected = functional.cross_entropy(eager(x), wanted)
        expected.backward()
        optimizers[1].step()
        assert torch.equal(loss, expected)
    assert all(map(torch.equal, planned.state_dict().values(), eager.state_dict().values()))


def test_packed_bits_have_the_bits_of_the_trained_network():
    model = make_network().eval()
    for norm in (model[1], model[4], model[7]):
        norm.running_mean.normal_()
    tensors = SmallFile(pack_small_file(code_model(model), {}), "a file").read_all()
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(
        {name: item.dense() if isinstance(item, CodedTensor) else item for name, item in tensors.items()}
    )
    x = torch.randn(4, 1, 12, 12)
    small = run_small(model, tensors, (x,), prefer="memory")
    assert {choice.name: choice.form for choice in small.choices} == {
        "2": "bits",
        "5": "signs",
        "8": "bits",
        "10": "signs",
    }
    images = [torch.randn(batch, 1, 12, 12) for batch in (1, 3, 0)]
    with torch.no_grad():
        for image in images:
            # The file keeps signs and scales, and its weights have them again, bit for bit.
            assert torch.equal(loaded(image), model(image))
            inside = model[:2](image)
            assert torch.equal(small.model[2](inside), model[2](inside))
            features = torch.randn(len(image), 8 * 9)
            assert torch.equal(small.model[8](features), model[8](features))
    assert torch.equal(small.model[2].weight, loaded[2].weight)
    assert torch.equal(small.model[8].weight, loaded[8].weight)
    assert isinstance(small.model[2], BitLayer) and isinstance(small.model[5], PackedLayer)


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
def test_bits_are_the_same_layer_after_layer(weights, images):
    """K is a sum over channels, whose order follows the layout in which the layer before gives its images."""
    layers = [ut.BinaryConv2d(70, 96, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(96), ut.BinaryConv2d(96, 130, 1)]
    model = nn.Sequential(*layers, ut.BinaryConv2d(130, 20, 3, stride=2)).eval().to(memory_format=weights)
    model[2].running_mean.uniform_()
    x = torch.randn(3, 70, 9, 9).contiguous(memory_format=images)
    small = run_small(model, code_model(model), (x,), prefer="memory")
    assert [choice.form for choice in small.choices] == ["bits"] * 3
    with torch.no_grad():
        for given in (x, x[:, :, 1:, 2:]):
            assert torch.equal(small(given), model(given))


def test_the_file_takes_a_bit_a_weight():
    layer = BinaryLinear(512, 256, bias=False)
    num_bytes = len(pack_small_file(code_model(layer), {}))
    # A bit a weight, four bytes a scale, and a header.
    assert 512 * 256 / 8 < num_bytes < 512 * 256 / 8 + 4 * 256 + 200


def test_scales_are_the_same_of_weights_that_have_them():
    """7 x 37 is no power of two: in float32 the mean of equal numbers would be another one."""
    weight = torch.randn(40, 7, 37)
    scales = filter_scales(weight)
    assert torch.equal(filter_scales(code_signs(weight).dense()), scales)
    torch.testing.assert_close(scales, weight.abs().mean((1, 2)))


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
def test_integers_are_within_half_a_step_or_clipped(num_bits):
    weight = torch.randn(6, 4, 3, 3) * torch.tensor([1e-30, 1e-3, 1.0, 7.0, 1e4, 0.0])[:, None, None, None]
    coded = code_integers(weight, num_bits)
    most = 2 ** (num_bits - 1) - 1
    scales = coded.scales[:, None, None, None]
    error = (coded.dense() - weight).abs()
    clipped = weight.abs() > scales * most
    assert (error <= scales * (0.5 + 1e-6)).logical_or(clipped).all()
    assert set(coded.codebook.tolist()) == set(range(-most, most + 1)) and not coded.dense()[5].any()
    if num_bits == 8:
        assert not (error > scales).any()
    else:
        # The search for a scale never does worse than the greatest magnitude.
        largest = weight.abs().amax((1, 2, 3), keepdim=True).clamp_min(1e-38) / most
        plain = ((weight / largest).round() * largest - weight).square().sum((1, 2, 3))
        assert (error.square().sum((1, 2, 3)) <= plain * (1 + 1e-5)).all()


def test_what_cannot_be_coded_is_refused():
    with pytest.raises(ut.CallError, match="infinities or NaN"):
        code_signs(torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ut.CallError, match="padding is a number of pixels"):
        BinaryConv2d(2, 2, 3, padding="same")
    with pytest.raises(ut.CallError, match="from 2 to 8; found 9"):
        code_integers(torch.randn(2, 2), 9)
    with pytest.raises(ut.CallError, match=r"rows of floats; found \(2,\) of torch.int64"):
        code_integers(torch.tensor([1, 2]), 4)
