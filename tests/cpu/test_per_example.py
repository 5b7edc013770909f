"""`ut.grad(f, per_example=True)` against `torch.func.vmap(torch.func.grad(f))`, and against one example at a time."""

import gc
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

import undertow as ut
from undertow.api import functional
from undertow.models import SMALL
from undertow.runtime.measure import measure_call

NUM_EXAMPLES = 5


def loss_of(name, is_training):
    """The loss of one example of a model of the zoo as a function of its parameters, and a batch of examples."""
    torch.manual_seed(0)
    entry = SMALL[name]
    model = entry.build().train(is_training)
    parameters = {path: item.detach() for path, item in model.named_parameters()}

    def loss(parameters, x, target):
        return entry.loss(functional_call(model, parameters, (x[None],)), target[None])

    return loss, (parameters, *entry.example_inputs(NUM_EXAMPLES), *entry.example_targets(NUM_EXAMPLES))


def torchs(function, args, in_dims=(None, 0, 0)):
    gradients, values = torch.func.vmap(torch.func.grad_and_value(function), in_dims, randomness="different")(*args)
    return values, gradients


# Without BatchNorm in train(), which is refused, and without lstm, whose cell torch.func writes in other operations.
@pytest.mark.parametrize("name", ["mlp", "lenet5", "alexnet", "char_gpt"])
@pytest.mark.parametrize("is_training", [False, True], ids=["eval", "train"])
def test_bits_are_those_of_torch_func(name, is_training):
    """The same operations run in the same order, dropout included: each example draws its own numbers."""
    loss, args = loss_of(name, is_training)
    torch.manual_seed(3)
    expected, expected_gradients = torchs(loss, args)
    torch.manual_seed(3)
    values, gradients = ut.value_and_grad(loss, per_example=True)(*args)
    assert torch.equal(values, expected) and gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[path], expected_gradients[path]) for path in gradients)


@pytest.mark.parametrize("name", ["vgg_small", "resnet50", "unet"])
def test_batch_norm_in_eval_has_torch_funcs_bits(name):
    loss, args = loss_of(name, is_training=False)
    expected, expected_gradients = torchs(loss, args)
    values, gradients = ut.value_and_grad(loss, per_example=True)(*args)
    assert torch.equal(values, expected)
    assert all(torch.equal(gradients[path], expected_gradients[path]) for path in gradients)


def test_an_lstm_within_what_rounding_can_do():
    """torch.func refuses LSTM's float64 kernel and writes the float32 one in other operations: compare one by one.

    In any order a sum of n terms is exact to n eps of the sum of their sizes. The longest chain of sums through the
    12 steps, 2 layers and their derivatives has 2 * 12 * 2 sums of up to 4 * 32 terms: 6,144 eps of the largest.
    """
    loss, args = loss_of("lstm", is_training=False)
    gradients = ut.grad(loss, per_example=True)(*args)
    bound = 6144 * torch.finfo(torch.float32).eps
    for index in range(NUM_EXAMPLES):
        alone = torch.func.grad(loss)(args[0], args[1][index], args[2][index])
        for path, found in gradients.items():
            assert float((found[index] - alone[path]).abs().max()) <= bound * float(alone[path].abs().max())


def test_each_example_by_itself_and_their_mean():
    """In float64 a batched product and single ones differ by rounding: sums of at most 20 * 5 * 5 = 500 terms."""
    loss, args = loss_of("lenet5", is_training=False)
    parameters = {path: item.double() for path, item in args[0].items()}
    x, target = args[1].double(), args[2]
    together = ut.grad(loss, per_example=True)(parameters, x, target)
    eps = torch.finfo(torch.float64).eps
    for index in range(NUM_EXAMPLES):
        alone = ut.grad(loss)(parameters, x[index], target[index])
        for path, found in together.items():
            assert float((found[index] - alone[path]).abs().max()) <= 500 * eps * float(alone[path].abs().max())
    mean = ut.grad(lambda p: torch.stack([loss(p, a, b) for a, b in zip(x, target, strict=True)]).mean())(parameters)
    for path, found in together.items():
        assert float((found.mean(0) - mean[path]).abs().max()) <= 500 * eps * float(found.abs().max())


def test_nested_arguments_argnums_and_named_examples():
    w, b, x, scale = torch.randn(3, 2), torch.randn(2), torch.randn(4, 3), torch.randn(4)

    def function(x, shared, *, more):
        (w, b) = shared["layer"]
        return torch.tanh(x["x"] @ w + b).sum() * more

    found = ut.grad(function, (1,), per_example=True)({"x": x}, {"layer": (w, b), "unused": w}, more=scale)
    expected = torch.func.vmap(
        torch.func.grad(lambda shared, x, more: function(x, shared, more=more)), in_dims=(None, 0, 0)
    )({"layer": (w, b), "unused": w}, {"x": x}, scale)
    assert isinstance(found, tuple) and found[0].keys() == expected.keys()
    assert all(torch.equal(a, b) for a, b in zip(found[0]["layer"], expected["layer"], strict=True))
    assert torch.equal(found[0]["unused"], torch.zeros(4, 3, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: w.sum() + x.sum(),
        lambda w, x: x.sum(),
        lambda w, x: (w.cumsum(0) * x).amax(),
        lambda w, x: torch.linalg.inv(torch.outer(w, x) + torch.eye(3)).sum(),
        lambda w, x: (w * torch.rand(3) * x).sum(),
    ],
    ids=["same for all", "without influence", "extremum", "inverse", "draws"],
)
def test_small_functions(function):
    w, x = torch.randn(3), torch.randn(NUM_EXAMPLES, 3)
    torch.manual_seed(1)
    found = ut.grad(function, per_example=True)(w, x)
    torch.manual_seed(1)
    expected = torch.func.vmap(torch.func.grad(function), (None, 0), randomness="different")(w, x)
    assert torch.equal(found, expected) and found.shape == (NUM_EXAMPLES, 3)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, ct):
        return 2 * ct


def norm_in_training(w, x, norm=nn.BatchNorm1d(3)):  # noqa: B008
    return norm(torch.stack([w, x])).square().sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda w, x: (w * x).sum() if x[0] > 0 else w.sum(), "guard .*branches on a value"),
        (lambda w, x: (w[x > 0] ** 2).sum(), "branches on a value"),
        (norm_in_training, "writes over a tensor"),
        (lambda w, x: Doubled.apply(w * x).sum(), "custom autograd Function"),
        (lambda w, x: (w.as_strided((2, 2), (1, 1)) @ x[:2]).sum(), "reads memory by strides"),
        (lambda w, x: torch.fft.rfft(w * x).abs().sum(), "has no derivative rule"),
    ],
    ids=["branch", "boolean mask", "batch norm", "Function", "as_strided", "no rule"],
)
def test_what_examples_do_not_share_is_refused(function, message):
    with pytest.raises(ut.CaptureError, match=message) as caught:
        ut.grad(function, per_example=True)(torch.randn(3), torch.randn(NUM_EXAMPLES, 3))
    assert "\n" not in str(caught.value)


def test_calls_without_a_batch_are_refused():
    w = torch.randn(3)
    gradient = ut.grad(lambda *args: sum(item.sum() for item in args), per_example=True)
    for args in ((w, torch.randn(2, 3), torch.randn(4, 3)), (w, torch.tensor(1.0)), (w, torch.randn(0, 3))):
        with pytest.raises(ut.CallError, match="one example per index of their first dimension"):
            gradient(*args)
    with pytest.raises(ut.CallError, match="there is no other"):
        gradient(w)
    with pytest.raises(ut.CallError, match="scalar"):
        ut.grad(lambda w, x: w * x, per_example=True)(w, torch.randn(2, 3))
    with pytest.raises(ut.CallError, match="differentiated again"):
        ut.grad(lambda w: gradient(w, torch.randn(2, 3)).sum())(w)


def test_no_more_memory_than_torch_func():
    """Activations are most of it here: a deep, narrow network on many rows. Both free nothing else than values."""
    weights = [torch.randn(16, 16) / 4 for _ in range(12)]

    def loss(weights, x):
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.square().sum()

    x = torch.randn(8, 2048, 16)
    arguments = (weights, x)
    ours = measure_call(lambda: ut.grad(loss, per_example=True)(*arguments), [*weights, x])
    theirs = measure_call(lambda: torch.func.vmap(torch.func.grad(loss), (None, 0))(*arguments), [*weights, x])
    assert ours.peak_bytes <= theirs.peak_bytes


SCALE = 2.0


class Settings:
    def __init__(self):
        self.inner = {"powers": [2, 3]}
        self.network = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
        self.shift = torch.ones(3)


def helper(h):
    return (h * SCALE).sum()


def kept_loss(settings):
    def loss(weight, x, power=1):
        h = settings.network(x @ weight + settings.shift) ** power
        return helper(h) ** settings.inner["powers"][0]

    return loss


@pytest.fixture
def recordings(monkeypatch):
    found = []
    plain = functional.capture
    monkeypatch.setattr(functional, "capture", lambda *args: found.append(args[0]) or plain(*args))
    return found


def change_global(settings, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)


def change_helper(settings, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda h: h.square().sum())


def change_code(settings, monkeypatch):
    monkeypatch.setattr(helper, "__code__", (lambda h: (h * h).sum()).__code__)


CHANGES = {
    "a global": change_global,
    "a function": change_helper,
    "its code": change_code,
    "deep in a container": lambda settings, _: settings.inner["powers"].__setitem__(0, 3),
    "a mode": lambda settings, _: settings.network.train(),
    "a module": lambda settings, _: settings.network.__setitem__(1, nn.Tanh()),
    "a parameter": lambda settings, _: setattr(settings.network[0], "weight", nn.Parameter(torch.eye(3))),
    "a tensor": lambda settings, _: setattr(settings, "shift", torch.zeros(3)),
    "a hook": lambda settings, _: settings.network[0].register_forward_hook(lambda module, args, out: 2 * out),
    "a default": lambda settings, _: settings.loss.__setattr__("__defaults__", (2,)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_recording_is_used_again_until_something_changes(monkeypatch, recordings, change):
    torch.manual_seed(0)
    settings = Settings()
    settings.loss = loss = kept_loss(settings)
    per_example = ut.grad(loss, per_example=True)
    weight, x = torch.randn(3, 3), torch.randn(7, 3)

    def check(num_recordings):
        torch.manual_seed(1)
        expected = torchs(loss, (weight, x), (None, 0))[1]
        torch.manual_seed(1)
        assert torch.equal(per_example(weight, x), expected) and len(recordings) == num_recordings

    check(1)
    check(1)
    settings.shift.mul_(2)  # numbers are read at every call
    weight = weight + 1
    x = torch.randn(5, 3)  # as is the number of examples
    check(1)
    CHANGES[change](settings, monkeypatch)
    check(2)
    check(2)


def test_arguments_of_another_kind_are_recorded_again(recordings):
    settings = Settings()
    per_example = ut.grad(kept_loss(settings), per_example=True)
    weight, x = torch.randn(3, 3), torch.randn(7, 3)
    for num, args in enumerate([(weight, x), (weight.T, x), (weight, x, 3), (weight, x, 3.0)], start=1):
        per_example(*args)
        per_example(*args)
        assert len(recordings) == num
    with torch.autocast("cpu", torch.bfloat16):
        per_example(weight, x)
    assert len(recordings) == 5


def test_what_cannot_be_looked_into_is_recorded_at_every_call(recordings):
    numbers = iter([1.0, 2.0, 3.0])
    per_example = ut.grad(lambda weight, x: (weight * x).sum() * next(numbers), per_example=True)
    found = [per_example(torch.ones(2), torch.ones(3, 2)) for _ in range(3)]
    assert [float(item[0, 0]) for item in found] == [1.0, 2.0, 3.0] and len(recordings) == 3


def test_a_recording_holds_no_arguments():
    per_example = ut.grad(lambda weight, x: (weight @ x).sum(), per_example=True)
    weight, x = torch.ones(2, 2), torch.ones(3, 2)
    per_example(weight, x)
    given = weakref.ref(weight), weakref.ref(x)
    del weight, x
    gc.collect()
    assert [item() for item in given] == [None, None]
