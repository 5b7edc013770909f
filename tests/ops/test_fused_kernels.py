"""Undertow's fused kernels against PyTorch in float64, with bounds derived from the number of roundings."""

import os
from pathlib import Path

import pytest
import torch

from undertow.kernels import draws
from undertow.kernels.batch_norm import batch_norm_backward, batch_norm_evaluate, batch_norm_forward, rows_of
from undertow.kernels.cross_entropy import cross_entropy_backward, cross_entropy_forward
from undertow.kernels.draws import draw_bernoulli, has_pytorch_bits
from undertow.kernels.elementwise import compile_chain
from undertow.kernels.layer_norm import layer_norm_backward, layer_norm_forward
from undertow.kernels.max_pool import max_pool_backward, max_pool_forward
from undertow.kernels.optimizers import adam_step, is_bit_identical, sgd_step
from undertow.kernels.packed_product import multiply_packed
from undertow.kernels.product import multiply_blocked, multiply_naive
from undertow.kernels.window_codes import encode_windows

aten = torch.ops.aten
EPSILON = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def same(found, expected):
    """Equal bits, except that any NaN equals any other."""
    return torch.equal(found.nan_to_num(1e30), expected.nan_to_num(1e30)) and torch.equal(
        found.isnan(), expected.isnan()
    )


def assert_near(found, expected, scale, num_roundings):
    """|found - expected| <= num_roundings * eps * scale, with NaN and infinity at the same positions."""
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
    # Statistics: 32 roundings of a block in float32 of squares 5 times larger, and the final roundings.
    assert_near(mean, saved_mean, saved_mean.abs() + 1 / saved_inverse, 2)
    assert_near(inverse_std, saved_inverse, saved_inverse, 32 * 5 / 2 + 2)
    assert_near(running[0], expected_running[0], expected_running[0].abs() + 100, 2)
    assert_near(running[1], expected_running[1], expected_running[1].abs(), 32 * 5 + 2)
    size = deviation * weight.abs() + bias.abs() + residual.abs() + weight.abs()
    assert_near(out, y, size.detach(), 32 * 5 / 2 + 8)
    ct_x, ct_weight, ct_bias = torch.empty_like(x), torch.empty(channels), torch.empty(channels)
    # The derivative of a ReLU jumps at 0, so both sides use the mask of the float64 pass.
    given = y.detach().float() if has_relu else None
    ct_residual = torch.empty_like(x) if has_relu and has_residual else None
    batch_norm_backward(ct, x, weight, mean, inverse_std, given, ct_x, ct_weight, ct_bias, ct_residual)
    y.backward(ct.double())
    sums = ct.abs().sum(0).double()
    products = (ct.abs() * (deviation + 1)).sum(0).detach()
    # The saved mean has one rounding of 100 standard deviations.
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


def test_batch_norm_evaluation_bypassing_caches_and_in_place(threads):
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


POOLS = [
    ((2, 2), (2, 2), (0, 0), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((3, 2), (1, 2), (1, 1), (2, 1)),
    ((2, 3), (3, 4), (1, 0), (1, 3)),
    ((1, 1), (2, 2), (0, 0), (1, 1)),
]


@pytest.mark.parametrize("channels", [1, 19, 64])
@pytest.mark.parametrize("geometry", POOLS)
def test_max_pool(geometry, channels, threads):
    # Few different values give many ties, some of them at the ReLU's zero.
    x = torch.randint(-2, 3, (2, channels, 13, 11)).float().contiguous(memory_format=torch.channels_last)
    x.permute(0, 2, 3, 1).view(-1)[::7] = float("nan")
    x.permute(0, 2, 3, 1).view(-1)[::5] = -float("inf")
    y, indices = aten.max_pool2d_with_indices(x, *geometry)
    out = torch.empty(y.permute(0, 2, 3, 1).shape)
    codes = torch.empty(out.shape, dtype=torch.uint8)
    max_pool_forward(x.permute(0, 2, 3, 1), *geometry, out, codes)
    assert same(out, y.permute(0, 2, 3, 1))
    kernel, stride, padding, dilation = geometry
    theirs = encode_windows(indices.contiguous(), x.shape[3], kernel[1], stride, padding, dilation)
    assert torch.equal(codes, theirs.permute(0, 2, 3, 1))
    ct = torch.randn_like(y)
    expected = aten.max_pool2d_with_indices_backward(ct, x, *geometry, False, indices)
    ct_x = torch.empty(x.permute(0, 2, 3, 1).shape)
    max_pool_backward(ct.permute(0, 2, 3, 1), codes, None, *geometry, ct_x)
    assert same(ct_x, expected.permute(0, 2, 3, 1))
    masked = aten.threshold_backward(ct, y, 0)
    expected = aten.max_pool2d_with_indices_backward(masked, x, *geometry, False, indices)
    max_pool_backward(ct.permute(0, 2, 3, 1), codes, out, *geometry, ct_x)
    assert same(ct_x, expected.permute(0, 2, 3, 1))


def test_max_pool_refuses_a_window_too_large_for_its_code():
    x = torch.randn(1, 20, 20, 1)
    with pytest.raises(ValueError, match="256"):
        max_pool_forward(x, (17, 17), (1, 1), (0, 0), (1, 1), x, x)


SIZES = [*range(1, 71), 131_073]


def gradients_of(size, step):
    """Ordinary, tiny, huge, zero and subnormal values."""
    generator = torch.Generator().manual_seed(1000 * size + step)
    gradient = torch.randn(size, generator=generator)
    exponents = torch.randint(-40, 18, (size,), generator=generator)
    return gradient * torch.where(exponents < -38, 0.0, 10.0 ** exponents.clamp(max=3 if step % 2 else 17))


def assert_same_steps(size, optimizer_of, step_of, num_state, options):
    theirs = torch.randn(size).requires_grad_()
    own, state = theirs.detach().clone(), [torch.zeros(size) for _ in range(num_state)]
    optimizer = optimizer_of([theirs], foreach=False, **options)
    for step in range(1, 6 if size > 1000 else 4):
        theirs.grad = gradients_of(size, step)
        optimizer.step()
        step_of(own, theirs.grad, state, step)
        assert torch.equal(own.view(torch.int32), theirs.detach().view(torch.int32)), (size, step)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.8, 0.0, True)]
)
def test_sgd_has_the_bits_of_pytorch(momentum, dampening, nesterov, weight_decay):
    options = {
        "lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": weight_decay
    }  # fmt: skip

    def step_of(own, gradient, state, step):
        sgd_step(own, gradient, state[0], step == 1, 0.1, momentum, dampening, weight_decay, nesterov)

    for size in SIZES:
        assert_same_steps(size, torch.optim.SGD, step_of, 1, options)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
def test_adam_has_the_bits_of_pytorch(betas, is_decoupled, weight_decay):
    options = {"lr": 3e-3, "betas": betas, "eps": 1e-8, "weight_decay": weight_decay}

    def step_of(own, gradient, state, step):
        adam_step(own, gradient, *state, step, 3e-3, *betas, 1e-8, weight_decay, is_decoupled)

    for size in SIZES:
        assert_same_steps(size, torch.optim.AdamW if is_decoupled else torch.optim.Adam, step_of, 2, options)


def test_pytorch_rounds_as_expected():
    assert is_bit_identical()


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("XDG_CACHE_HOME")
    if before is not None:
        os.environ["XDG_CACHE_HOME"] = before


def every_float():
    """Floats from the whole range, evenly spaced in their bits, denser where the functions bend, and special ones."""
    bits = torch.arange(-(2**31), 2**31, 9973, dtype=torch.int64).to(torch.int32)
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 88.72284, -103.97208])
    return torch.cat([bits.view(torch.float32), torch.linspace(-110, 95, 400_003), special])


@pytest.mark.parametrize(("name", "units", "floor"), [
    ("exp", 2, 2.0**-126), ("tanh", 3, 2.0**-126), ("erf", 3, 2.0**-126), ("sigmoid", 3, 2.0**-100),
])  # fmt: skip
def test_functions_over_the_whole_float_range(name, units, floor):
    x = every_float()
    found = torch.empty_like(x)
    compile_chain(("full",), ((name, (0,)),), (1,))((x,), (found,))
    exact = getattr(torch, name)(x.double())
    assert torch.equal(found.isnan(), exact.isnan())
    # What rounds to infinity in float32 must be infinite.
    overflows = exact > torch.finfo(torch.float32).max
    assert found[overflows & (exact > 3.4028236e38)].isinf().all()
    rest = ~overflows & ~exact.isnan()
    unit = 2.0 ** (exact.abs().clamp(min=floor).log2().floor() - 23)
    assert ((found.double() - exact).abs() / unit)[rest].max().item() <= units


def test_chain_with_vectors_constants_and_several_outputs(threads):
    x, row, column = torch.randn(37, 21), torch.randn(37), torch.randn(21)
    steps = (("add", (0, 2)), ("mul", (4, 1)), ("gelu", (5,)), ("mul", (6, 3)), ("sub", (7, 0.5)), ("relu", (8,)))
    chain = compile_chain(("full", "row", "column", "scalar"), steps, (5, 9))
    outs = torch.empty(37, 21), torch.empty(37, 21)
    chain((x, row, column, 2.0), outs)
    middle = (x.double() + column) * row.double()[:, None]
    expected = (torch.nn.functional.gelu(middle) * 2 - 0.5).relu()
    assert_near(outs[0], middle, (x.abs() + column.abs()) * row.abs()[:, None], 2)
    assert_near(outs[1], expected, (x.abs() + column.abs()) * row.abs()[:, None] * 4 + 1, 12)
    chain((x, row, column, 2.0), (x, outs[0]))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("size", [1, 4095, 4096, 9001])
def test_chain_of_any_size(size):
    x, out = torch.randn(size), torch.empty(size)
    compile_chain(("full", "full"), (("relu_backward", (0, 1)), ("neg", (2,))), (3,))((x, x - 0.5), (out,))
    assert torch.equal(out, -aten.threshold_backward(x, x - 0.5, 0))


def test_chain_with_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "undertow").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x, out = torch.randn(10), torch.empty(10)
    compile_chain(("full",), (("square", (0,)), ("add", (1, 3.0))), (2,))((x,), (out,))
    assert_near(out, x.double() ** 2 + 3, x**2 + 3, 2)


@pytest.mark.parametrize("arguments", [
    (("some",), (), (0,)), (("full",), (("nothing", (0,)),), (1,)), (("full",), (("add", (0, 1)),), (1,)),
    (("full",), (("add", (0,)),), (1,)), (("full",), (), (1,)),
])  # fmt: skip
def test_chain_refuses_what_it_does_not_know(arguments):
    with pytest.raises(ValueError, match="compile_chain"):
        compile_chain(*arguments)


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (70, 65), (600, 768)])
def test_layer_norm(rows, columns, has_residual, threads):
    x, residual, ct = (torch.randn(rows, columns) for _ in range(3))
    weight, bias = torch.randn(columns), torch.randn(columns)
    out, summed = torch.empty_like(x), torch.empty_like(x)
    mean, inverse_std = torch.empty(rows), torch.empty(rows)
    given = (residual, summed) if has_residual else (None, None)
    layer_norm_forward(x, given[0], weight, bias, 1e-5, out, mean, inverse_std, given[1])
    whole = x + residual if has_residual else x
    if has_residual:
        assert torch.equal(summed, whole)
    exact = [tensor.double().requires_grad_() for tensor in (whole, weight, bias)]
    y, their_mean, their_inverse = aten.native_layer_norm(exact[0], [columns], *exact[1:], 1e-5)
    # Vectors of at least 16 sums: columns / 16 roundings one after the other, and a few to join them.
    roundings = columns / 16 + 16
    size = whole.abs().amax(1, keepdim=True)
    assert_near(mean, their_mean[:, 0].detach(), size[:, 0], roundings)
    # A variance of 0 beside epsilon: the squared error of the mean, divided by epsilon.
    assert_near(inverse_std, their_inverse[:, 0].detach(), their_inverse[:, 0].detach(), 2 * roundings)
    spread = size * their_inverse.detach() * weight.abs() + bias.abs()
    assert_near(out, y.detach(), spread, 3 * roundings)
    ct_x, ct_weight, ct_bias = torch.empty_like(x), torch.empty(columns), torch.empty(columns)
    layer_norm_backward(ct, whole, mean, inverse_std, weight, ct_x, ct_weight, ct_bias)
    y.backward(ct.double())
    normalised = (size * their_inverse).detach() + 1
    scaled = (ct * weight).abs().amax(1, keepdim=True)
    assert_near(ct_bias, exact[2].grad, ct.abs().sum(0), 34)
    assert_near(ct_weight, exact[1].grad, (ct.abs() * normalised).sum(0), 34 + 3 * roundings)
    assert_near(ct_x, exact[0].grad, their_inverse.detach() * scaled * normalised**2, 6 * roundings)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 10), (9, 63), (33, 5003)])
def test_cross_entropy(rows, classes, reduction, threads):
    logits = torch.randn(rows, classes) * 20
    targets = torch.randint(classes, (rows,))
    if rows > 1:
        targets[1] = -100
        logits[0, classes // 2] = -float("inf")
        targets[0] = 0
    loss, logsumexp, ct_logits = torch.empty(()), torch.empty(rows), torch.empty_like(logits)
    cross_entropy_forward(logits, targets, -100, reduction, loss, logsumexp)
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, targets, reduction=reduction)
    size = logits[logits.isfinite()].abs().max() * (rows if reduction == "sum" else 1)
    # The error of exp and the roundings of 32 lanes in the sum, which the logarithm turns into an absolute error.
    assert_near(loss, expected.detach(), size + 1, 140)
    cross_entropy_backward(0.7, logits, targets, -100, reduction, logsumexp, ct_logits)
    expected.mul(0.7).backward()
    # e^(x - logsumexp): the roundings of the difference, of logsumexp and of exp.
    assert_near(ct_logits, exact.grad, exact.grad.abs() * (2 * size + 4) + 2.0**-140, 140)
    cross_entropy_backward(0.7, logits, targets, -100, reduction, logsumexp, logits)
    assert torch.equal(ct_logits, logits)


def test_cross_entropy_of_bad_rows():
    logits = torch.randn(4, 3000)
    logits[0, 7], logits[1], logits[2, :2500] = float("nan"), -float("inf"), -float("inf")
    targets = torch.tensor([1, 2, 2900, 3])
    loss, logsumexp = torch.empty(()), torch.empty(1)
    for row in range(4):
        cross_entropy_forward(logits[row : row + 1], targets[row : row + 1], -100, "sum", loss, logsumexp)
        expected = torch.nn.functional.cross_entropy(logits[row : row + 1].double(), targets[row : row + 1])
        assert_near(loss, expected, expected.abs() + 10, 140)
    with pytest.raises(IndexError, match="3000"):
        cross_entropy_forward(logits, torch.tensor([0, 1, 2, 3000]), -100, "mean", loss, torch.empty(4))
    with pytest.raises(ValueError, match="reduction"):
        cross_entropy_forward(logits, targets, -100, "none", loss, torch.empty(4))


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (3, 5, 7), (17, 33, 40), (70, 64, 129)])
def test_products(rows, inner, columns, threads):
    a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
    exact, size = a.double() @ b.double(), a.abs().double() @ b.abs().double()
    multiply_naive(a, b, out)
    assert_near(out, exact, size, inner + 1)
    for block_size in (1, 4, 16, 48, 256):
        multiply_blocked(a, b, block_size, out)
        assert_near(out, exact, size, inner + 1)
    with pytest.raises(ValueError, match="block size"):
        multiply_blocked(a, b, 0, out)


@pytest.mark.parametrize("rows, inner, columns", [(1, 1, 1), (7, 3, 5), (8, 32, 32), (37, 53, 71), (300, 1100, 97)])
@pytest.mark.parametrize("is_left_transposed", [False, True])
@pytest.mark.parametrize("is_right_transposed", [False, True])
def test_packed_products(threads, rows, inner, columns, is_left_transposed, is_right_transposed):
    a = torch.randn(inner, rows).t() if is_left_transposed else torch.randn(rows, inner)
    b = torch.randn(columns, inner).t() if is_right_transposed else torch.randn(inner, columns)
    around = torch.full((rows + 2, columns), 7.0)  # nothing outside the result may be written
    out = around[1:-1]
    multiply_packed(a, b, out.fill_(torch.nan))
    assert_near(out, a.double() @ b.double(), a.double().abs() @ b.double().abs(), inner + 1)
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()


def test_packed_products_of_several_blocks_of_columns(threads):
    a, b, out = torch.randn(150, 40), torch.randn(40, 4500), torch.empty(150, 4500)
    multiply_packed(a, b, out)
    assert_near(out, a.double() @ b.double(), a.double().abs() @ b.double().abs(), 41)


def draw_both(make, p, own, pytorchs):
    """Our draws and generator state must equal PyTorch's."""
    found, expected = draw_bernoulli(make(), p, generator=own), make().bernoulli_(p, generator=pytorchs)
    assert torch.equal(found, expected)
    assert torch.equal(own.get_state(), pytorchs.get_state())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1 - 2**-53, 1.0])
def test_draws_are_pytorchs(p, monkeypatch):
    monkeypatch.setattr(draws, "MIN_ELEMENTS", 1)
    own, pytorchs = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for size in (0, 1, 2, 311, 312, 313, 5000):
        draw_both(lambda size=size: torch.empty(size), p, own, pytorchs)
        for generator in (own, pytorchs):
            torch.randint(10, (1,), generator=generator)  # one word, so that a later pair spans two states
            torch.randn(1, generator=generator)  # leaves a second number in the state
    draw_both(lambda: torch.empty(6, 4, 5).transpose(0, 1), p, own, pytorchs)
    draw_both(lambda: torch.empty(50, dtype=torch.float64), p, own, pytorchs)


def test_draws_from_the_default_generator_and_bad_probabilities():
    state = torch.get_rng_state()
    expected = [torch.empty(size).bernoulli_(0.3) for size in (1000, 2000)]
    torch.set_rng_state(state)
    assert all(torch.equal(draw_bernoulli(torch.empty(item.shape), 0.3), item) for item in expected)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(RuntimeError, match="bernoulli_ expects p to be in"):
            draw_bernoulli(torch.empty(3), p)


def test_our_draws_are_used_on_amd_processors():
    processor = Path("/proc/cpuinfo")
    if not processor.exists() or "AuthenticAMD" not in processor.read_text():
        pytest.skip("PyTorch draws with MKL on Intel's processors; others were not compared")
    assert has_pytorch_bits()
