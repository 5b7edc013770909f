"""grad, value_and_grad, vjp, hvp, hessian, trace, numerical_gradient against torch.func and against definitions."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import undertow as ut
from undertow.ir.structure import tensors_in


def f64(*shape):
    return torch.randn(shape, dtype=torch.float64)


def network(x, w0, w1):
    return 0.5 * ((torch.relu(x @ w0) @ w1) ** 2).sum()


def test_grad_has_autograds_bits():
    args = (f64(4, 3), f64(3, 5), f64(5, 2))
    for argnums in (0, 2, (0, 1, 2), (2, 0), -1):
        expected = torch.func.grad(network, argnums)(*args)
        found = ut.grad(network, argnums)(*args)
        pairs = zip(expected, found, strict=True) if isinstance(argnums, tuple) else [(expected, found)]
        assert all(torch.equal(left, right) for left, right in pairs)


def test_nested_arguments_keep_their_structure():
    tree = {"layers": [(f64(3, 4), f64(4)), (f64(4, 2), f64(2))], "scale": f64()}

    def loss(tree, x):
        for weight, bias in tree["layers"]:
            x = torch.tanh(x @ weight + bias)
        return (x * tree["scale"]).sum()

    x = f64(5, 3)
    value, found = ut.value_and_grad(loss)(tree, x)
    assert value.shape == () and found.keys() == tree.keys()
    assert [[item.shape for item in layer] for layer in found["layers"]] == [[(3, 4), (4,)], [(4, 2), (2,)]]
    numerical = ut.numerical_gradient(loss, (tree, x))
    # Central differences of an analytic function of order one have an error of about eps^(2/3).
    assert torch.allclose(numerical["layers"][0][0], found["layers"][0][0], atol=1e-8)
    assert torch.allclose(numerical["scale"], found["scale"], atol=1e-8)


def test_an_argument_without_influence_gets_zeros():
    assert torch.equal(ut.grad(lambda x, y: x.sum(), 1)(f64(3), f64(2, 2)), torch.zeros(2, 2, dtype=torch.float64))


def test_the_same_tensor_twice_is_two_arguments():
    x = f64(3)
    left, right = ut.grad(lambda x, y: (x * y**2).sum(), (0, 1))(x, x)
    assert torch.equal(left, x**2) and torch.allclose(right, 2 * x * x)


def test_vjp_of_several_outputs():
    a, b = f64(3, 4), f64(4, 2)
    value, pull_back = ut.vjp(lambda a, b: {"product": a @ b, "sum": a.sum()}, a, b)
    cotangent = {"product": f64(3, 2), "sum": f64()}
    found = pull_back(cotangent)
    assert torch.equal(found[1], a.t() @ cotangent["product"])
    assert torch.allclose(found[0], cotangent["product"] @ b.t() + cotangent["sum"])
    with pytest.raises(ut.CallError, match="shapes of the output"):
        pull_back({"product": f64(3, 3), "sum": f64()})


def test_vjp_of_a_tensor_returned_twice_adds_its_cotangents():
    def twice(x):
        y = x.sin()
        return {"first": y, "rest": [x.detach(), x, y.sum(), (x, y)]}

    x = f64(3)
    cts = [f64(3), f64(3), f64(3), f64(), f64(3), f64(3)]
    leaf = x.clone().requires_grad_()
    outputs = [tensor for _, tensor in tensors_in(twice(leaf))]
    reached = [(output, ct) for output, ct in zip(outputs, cts, strict=True) if output.requires_grad]
    (expected,) = torch.autograd.grad([output for output, _ in reached], leaf, [ct for _, ct in reached])
    _, pull_back = ut.vjp(twice, x)
    (found,) = pull_back({"first": cts[0], "rest": [*cts[1:4], tuple(cts[4:])]})
    assert torch.equal(expected, found)


def test_second_derivatives_where_two_arguments_share_their_gradient():
    def function(x, y, unused, also_unused):
        return ((x + y) ** 3).sum()

    args, vectors = (f64(3), f64(3), f64(2), f64()), (f64(3), f64(3), f64(2), f64())
    _, expected = torch.autograd.functional.hvp(function, args, vectors)
    found = ut.hvp(function, args, vectors)
    assert all(torch.allclose(left, right) for left, right in zip(expected, found, strict=True))
    rows = zip(torch.func.hessian(function, (0, 1))(*args), ut.hessian(function, (0, 1))(*args), strict=True)
    assert all(torch.allclose(left, right) for row in rows for left, right in zip(*row, strict=True))


def test_bad_calls():
    with pytest.raises(ut.CallError, match="scalar"):
        ut.grad(lambda x: x * 2)(f64(3))
    with pytest.raises(ut.CallError, match="argnums"):
        ut.grad(lambda x: x.sum(), 3)(f64(3))
    with pytest.raises(ut.CallError, match="floating point"):
        ut.grad(lambda x: x.sum())(torch.arange(3))
    with pytest.raises(ut.CallError, match="float64"):
        ut.numerical_gradient(lambda x: x.sum(), (torch.randn(3),))
    with pytest.raises(ut.CallError, match="vectors"):
        ut.hvp(lambda x: x.sum(), (f64(3),), (f64(4),))


def test_derivatives_of_derivatives():
    def function(x):
        return torch.sin(5 * torch.exp(x))

    x = torch.tensor(0.3, dtype=torch.float64)
    expected, found = function, function
    for _ in range(3):
        expected, found = torch.func.grad(expected), ut.grad(found)
        assert torch.allclose(expected(x), found(x), rtol=1e-12)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.out(nn.functional.gelu(h)).log_softmax(-1)[..., 0].mean()


class AffineTransformer(Transformer):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, stride=2, padding=1)
        self.norm = nn.Identity()
        self.out = nn.Linear(8, 2)

    def forward(self, x):
        h = torch.nn.functional.max_pool2d(torch.nn.functional.silu(self.norm(self.conv(x))), 2)
        return torch.nn.functional.cross_entropy(self.out(h.flatten(1)), torch.tensor([0, 1]))


class NormedConvNet(ConvNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(2)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid())

    def forward(self, x):
        return nn.functional.mse_loss(self.layers(x), torch.zeros(2, 2, dtype=x.dtype))


def row_by_row(function):
    """A Hessian without vmap, for models with affine norms.

    torch.func.hessian's block of weight by input is wrong for layer_norm and batch_norm (torch 2.13): it is not the
    transpose of the block of input by weight, which agrees with finite differences.
    """

    def hessian(tree):
        names = list(tree)
        blocks = torch.autograd.functional.hessian(
            lambda *items: function(dict(zip(names, items, strict=True))), tuple(tree.values())
        )
        return {left: dict(zip(names, row, strict=True)) for left, row in zip(names, blocks, strict=True)}

    return hessian


@pytest.mark.parametrize(
    ("make", "shape", "reference"),
    [
        (Perceptron, (2, 3), torch.func.hessian),
        (ConvNet, (2, 1, 8, 8), torch.func.hessian),
        (NormedConvNet, (2, 1, 8, 8), row_by_row),
        (Transformer, (2, 3, 4), torch.func.hessian),
        (AffineTransformer, (2, 3, 4), row_by_row),
    ],
    ids=["perceptron", "convnet", "convnet with batch norm", "transformer", "transformer with affine norm"],
)
def test_hessian_against_torch(make, shape, reference):
    """Relative error under 1e-10 in float64, and Hessian-vector products consistent with it."""
    torch.manual_seed(0)
    model, x = make().double(), f64(*shape)
    parameters = {name: item.detach() for name, item in model.named_parameters()}
    buffers = {name: item.clone() for name, item in model.named_buffers()}

    def loss(parameters):
        fresh = {name: item.clone() for name, item in buffers.items()}
        return torch.func.functional_call(model, {**parameters, **fresh}, (x,))

    # PyTorch's flash attention has no second derivative; ours is the composed form of the same kernel.
    with sdpa_kernel(SDPBackend.MATH):
        expected = reference(loss)(parameters)
    found = ut.hessian(loss)(parameters)
    scale = max(float(block.abs().max()) for row in expected.values() for block in row.values())
    for left in parameters:
        for right in parameters:
            assert float((expected[left][right] - found[left][right]).abs().max()) <= 1e-10 * scale
    vectors = {name: f64(*item.shape) for name, item in parameters.items()}
    (product,) = ut.hvp(loss, (parameters,), (vectors,))
    for left in parameters:
        row = sum((found[left][right] * vectors[right]).flatten(parameters[left].dim()).sum(-1) for right in parameters)
        assert torch.allclose(product[left], row, rtol=1e-9, atol=1e-9 * scale)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**3

    @staticmethod
    def backward(ctx, ct):
        (x,) = ctx.saved_tensors
        return 3 * ctx.scale * x**2 * ct, None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.fft.rfft(x).abs().sum(),
        lambda x: (torch.linalg.eigvalsh(x.view(3, 4) @ x.view(3, 4).T) ** 1.5).sum(),
        lambda x: (torch.linalg.inv(x.view(3, 4)[:, :3] + 4 * torch.eye(3)) ** 2).sum(),
        lambda x: Cube.apply(torch.sin(x), 2.0).sum(),
    ],
    ids=["fft", "eigenvalues", "inverse", "custom Function"],
)
def test_second_derivatives_without_a_rule_are_pytorchs(function):
    x, vector = f64(12), f64(12)
    expected = torch.autograd.functional.hessian(function, x)
    found = ut.hessian(function)(x)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12) and not found.requires_grad
    (product,) = ut.hvp(function, (x,), (vector,))
    assert torch.allclose(product, expected @ vector, rtol=1e-10, atol=1e-10) and not product.requires_grad


def test_what_pytorch_cannot_differentiate_twice_is_refused():
    def loss(x):
        return torch.nn.functional.ctc_loss(x.view(6, 1, 2).log_softmax(-1), torch.ones(1, 2).long(), (6,), (2,))

    assert ut.grad(loss)(f64(12)).shape == (12,)
    with pytest.raises(ut.MissingRule, match="derivative for aten::_ctc_loss_backward is not implemented"):
        ut.hvp(loss, (f64(12),), (f64(12),))


def test_third_derivatives_without_a_rule():
    x = f64(6)
    function = lambda x: torch.fft.rfft(x).abs().sum()  # noqa: E731
    expected = torch.autograd.functional.hessian(
        lambda x: (torch.autograd.grad(function(x), x, create_graph=True)[0] ** 2).sum(), x.requires_grad_()
    )
    found = ut.hessian(lambda x: (ut.grad(function)(x) ** 2).sum())(x.detach())
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10)


def test_numerical_gradient_counts_evaluations():
    calls = []

    def function(x):
        calls.append(1)
        return torch.sin(x).sum()

    x = f64(5)
    central = ut.numerical_gradient(function, (x,))
    num_central = len(calls)
    calls.clear()
    forward = ut.numerical_gradient(function, (x,), is_central=False)
    assert (num_central - 1, len(calls)) == (10, 6)
    assert torch.allclose(central, torch.cos(x), atol=1e-9) and torch.allclose(forward, torch.cos(x), atol=1e-6)


def test_trace_has_value_and_derivative_everywhere():
    number = lambda value: torch.tensor(float(value), dtype=torch.float64)  # noqa: E731
    trace = ut.trace(lambda x, y, z: (x + y) * z, (number(-2), number(5), number(-4)))
    assert [(node.value.item(), node.derivative.item()) for node in trace.nodes] == [
        (-2, -4), (5, -4), (-4, 3), (3, -4), (-12, 1),
    ]  # fmt: skip
    picture = trace.svg()
    assert picture.startswith("<svg") and picture.count("<rect") == 5
    with pytest.raises(ut.CallError, match="scalar"):
        ut.trace(lambda x: x * 2, (f64(3),))


def test_nothing_agrees_where_the_function_is_not_finite():
    with pytest.raises(ut.GradientCheckFailed):
        ut.check_gradients(lambda a: a.log().sum(), (torch.tensor([-1.0, 2.0]),))


def test_a_function_that_returns_its_argument_is_checked_by_that_output_too():
    assert ut.check_gradients(lambda a: (a, a.sin(), a), (f64(3),)).ok


def test_wrong_argnums_and_arguments_are_named():
    x = torch.randn(3, dtype=torch.float64)
    with pytest.raises(ut.CallError, match="argnums"):
        ut.grad(torch.sum, argnums="a")(x)
    with pytest.raises(ut.CallError, match="args must be a tuple"):
        ut.hvp(torch.sum, x, (x,))
    with pytest.raises(ut.CallError, match="scalar"):
        ut.numerical_gradient(lambda a: a * 2, (x,))
