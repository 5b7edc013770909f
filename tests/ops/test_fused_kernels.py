"""Undertow's fused kernels against PyTorch in float64, with bounds derived from the number of roundings."""

import pytest
import torch

from undertow.kernels.batch_norm import batch_norm_backward, batch_norm_evaluate, batch_norm_forward, rows_of

aten = torch.ops.aten
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same(found, expected):
    """Equal bits, except that any NaN equals any other."""
    return torch.equal(found.nan_to_num(1e30), expected.nan_to_num(1e30)) and torch.equal(
        found.isnan(), expected.isnan()
    )


def assert_near(found, expected, scale, num_roundings):
    """|found - expected| <= num_roundings * eps * scale, with NaN and infinity in the same places."""
    expected = expected.double()
    finite = expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~finite & ~expected.isnan()].double(), expected[~finite & ~expected.isnan()])
    scale = torch.as_tensor(scale, dtype=torch.float64).broadcast_to(expected.shape)
    excess = (found.double() - expected).abs() / (num_roundings * EPSILON * scale + 1e-45)
    assert excess[finite].max().item() <= 1 if finite.any() else True, excess[finite].max().item()


def run_batch_norm(x, weight, bias, residual, has_relu):
    channels = x.shape[1]
    out, mean, inverse_std = torch.empty_like(x), torch.empty(channels), torch.empty(channels)
    running = torch.randn(channels), torch.rand(channels)
    before = [statistic.clone() for statistic in running]
    batch_norm_forward(x, weight, bias, *running, 0.1, 1e-5, residual, has_relu, out, mean, inverse_std)
    return out, mean, inverse_std, before, running


@pytest.mark.parametrize("has_relu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "channels"), [(2, 1), (7, 3), (97, 65), (1024, 16), (400, 2048)])
def test_batch_norm(rows, channels, has_residual, has_relu, threads):
    x, ct = torch.randn(rows, channels) * 3 + 100, torch.randn(rows, channels)
    weight, bias, residual = torch.randn(channels), torch.randn(channels), torch.randn(rows, channels)
    out, mean, inverse_std, before, running = run_batch_norm(
        x, weight, bias, residual if has_residual else None, has_relu
    )
    inputs = [tensor.double().requires_grad_() for tensor in (x, weight, bias, residual)]
    expected_running = [statistic.double() for statistic in before]
    y, saved_mean, saved_inverse = torch.native_batch_norm(*inputs[:3], *expected_running, True, 0.1, 1e-5)
    y = y + inputs[3] if has_residual else y
    y = y.relu() if has_relu else y
    deviation = ((x - saved_mean) * saved_inverse).abs()
    # Statistics: 32 roundings of a block in float32 at a 5 times larger square, and the final ones.
    assert_near(mean, saved_mean, saved_mean.abs() + 1 / saved_inverse, 2)
    assert_near(inverse_std, saved_inverse, saved_inverse, 32 * 5 / 2 + 2)
    assert_near(running[0], expected_running[0], expected_running[0].abs() + 100, 2)
    assert_near(running[1], expected_running[1], expected_running[1].abs(), 32 * 5 + 2)
    size = deviation * weight.abs() + bias.abs() + residual.abs() + weight.abs()
    assert_near(out, y, size.detach(), 32 * 5 / 2 + 8)
    ct_x, ct_weight, ct_bias = torch.empty_like(x), torch.empty(channels), torch.empty(channels)
    # A ReLU's backward is a step: it is given the float64 pass's own mask.
    given = y.detach().float() if has_relu else None
    ct_residual = torch.empty_like(x) if has_relu and has_residual else None
    batch_norm_backward(ct, x, weight, mean, inverse_std, given, ct_x, ct_weight, ct_bias, ct_residual)
    y.backward(ct.double())
    sums = ct.abs().sum(0).double()
    products = (ct.abs() * (deviation + 1)).sum(0).detach()
    # The saved mean carries one rounding of 100 standard deviations.
    off = 2 * 100 * saved_inverse.detach().clamp(min=1)
    assert_near(ct_bias, inputs[2].grad, sums, 34)
    assert_near(ct_weight, inputs[1].grad, products + sums * off, 34 + 2 * 80)
    per_row = (products / rows) * (deviation.detach() + 1)
    spread = saved_inverse.detach() * weight.abs() * (ct.abs() + sums / rows + per_row) * (1 + off)
    assert_near(ct_x, inputs[0].grad, spread, 34 + 4 * 80)
    if ct_residual is not None:
        assert same(ct_residual, inputs[3].grad.float())


def test_batch_norm_with_a_large_mean_is_no_worse_than_pytorch(threads):
    x = torch.randn(20000, 24) * torch.logspace(-2, 0, 24) + torch.logspace(4, 0, 24)
    exact = torch.var(x.double(), 0, correction=0)
    _, _, inverse_std, _, _ = run_batch_norm(x, None, None, None, False)
    _, _, theirs = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    expected = (exact + 1e-5).rsqrt()
    error = ((inverse_std - expected) / expected).abs().max()
    assert error <= max(((theirs - expected) / expected).abs().max(), 4 * EPSILON)


def test_batch_norm_does_not_depend_on_threads():
    x = torch.randn(4096, 24)
    found = []
    for num_threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        found.append(run_batch_norm(x, None, None, None, True)[0])
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_batch_norm_with_nan_and_infinity():
    x = torch.randn(100, 4)
    x[0, 0], x[50, 1], x[99, 2] = float("inf"), float("nan"), -float("inf")
    out, mean, inverse_std, _, _ = run_batch_norm(x, None, None, None, True)
    y, their_mean, their_inverse = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    assert torch.equal(out.isnan(), y.relu().isnan())
    assert torch.equal(mean.isnan(), their_mean.isnan())
    assert torch.equal(inverse_std.isnan(), their_inverse.isnan())


def test_batch_norm_evaluation_past_the_caches_and_in_place(threads):
    activations = torch.randn(2, 64, 192, 192).contiguous(memory_format=torch.channels_last)
    x = rows_of(activations)
    residual, out = torch.randn_like(x), torch.empty_like(x)
    weight, bias, mean, variance = torch.randn(64), torch.randn(64), torch.randn(64), torch.rand(64) + 0.1
    batch_norm_evaluate(x, weight, bias, mean, variance, 1e-5, residual, True, out)
    scale = weight.double() / (variance.double() + 1e-5).sqrt()
    expected = ((x - mean.double()) * scale + bias + residual).relu()
    assert_near(out, expected, (x.abs() + mean.abs()) * scale.abs() + bias.abs() + residual.abs(), 4)
    batch_norm_evaluate(x, weight, bias, mean, variance, 1e-5, residual, True, residual)
    assert torch.equal(out, residual)
