"""What cannot be recorded faithfully is refused, with the line and a way out; what is wrong fails as in eager."""

import random

import numpy
import pytest
import torch
from torch import nn

import undertow as ut
from undertow.calls.runner import Runner


class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def plan(body, x=None):
    return ut.plan(Body(body), (torch.randn(4, 8) if x is None else x,))


def test_python_randomness_names_the_line():
    with pytest.raises(ut.CaptureError, match=r"test_capture_refusals\.py:\d+.*torch\.rand"):
        plan(lambda m, x: m.linear(x) * random.random())


def test_numpy_randomness_names_the_line():
    with pytest.raises(ut.CaptureError, match=r"test_capture_refusals\.py:\d+"):
        plan(lambda m, x: m.linear(x) * float(numpy.random.rand()))


def test_a_generator_of_ones_own_is_noticed():
    source = numpy.random.default_rng(0)
    with pytest.raises(ut.CaptureError, match=r"test_capture_refusals\.py:\d+"):
        plan(lambda m, x: m.linear(x) * float(source.random()))


def test_seeding_names_the_line_and_moves_no_state():
    def body(m, x):
        torch.manual_seed(3)
        return torch.dropout(m.linear(x), 0.5, True)

    model, x = Body(body), torch.randn(4, 8)
    before = torch.get_rng_state()
    with pytest.raises(ut.CaptureError, match=r"manual_seed.*test_capture_refusals\.py:\d+"):
        ut.plan(model, (x,))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_recorded_names_the_line():
    def body(m, x):
        packed = nn.utils.rnn.pack_padded_sequence(m.linear(x)[None], torch.tensor([3]), batch_first=True)
        return nn.LSTM(8, 8)(packed)[0].data

    with pytest.raises(ut.CaptureError, match=r"test_capture_refusals\.py:\d+"):
        plan(body)


def test_generators_made_or_seeded_inside_are_refused():
    with pytest.raises(ut.CaptureError, match=r"torch\.Generator.*test_capture_refusals\.py:\d+"):
        plan(lambda m, x: m.linear(x) * torch.rand(8, generator=torch.Generator().manual_seed(3)))
    model = Body(lambda m, x: m.linear(x) * torch.rand(8, generator=m.source.manual_seed(3)))
    model.source = torch.Generator().manual_seed(9)
    before = model.source.get_state()
    with pytest.raises(ut.CaptureError, match=r"seeds a torch\.Generator"):
        ut.plan(model, (torch.randn(4, 8),))
    assert torch.equal(model.source.get_state(), before)


def test_writing_into_an_argument_is_refused():
    class Store(nn.Module):
        def forward(self, x, found):
            found["x"] = x * 2
            return found["x"]

    with pytest.raises(ut.CaptureError, match="changes an object that it was given"):
        ut.plan(Store(), (torch.randn(4, 8), {}))


def test_sharing_memory_by_dlpack_is_refused():
    with pytest.raises(ut.CaptureError, match=r"DLPack.*test_capture_refusals\.py:\d+"):
        plan(lambda m, x: m.linear(x) * torch.from_dlpack(torch.ones(8)))


def test_tensor_hooks_name_the_line():
    def body(m, x):
        h = m.linear(x)
        h.register_hook(lambda ct: ct * 2)
        return h

    with pytest.raises(ut.CaptureError, match=r"hook.*test_capture_refusals\.py:\d+"):
        plan(body)


def test_module_backward_hooks_name_the_module():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[1].register_full_backward_hook(lambda *args: None)
    with pytest.raises(ut.CaptureError, match="module 1 has a backward hook"):
        ut.plan(model, (torch.randn(4, 8),))


def test_counting_calls_is_named():
    def body(m, x):
        m.count = getattr(m, "count", 0) + 1
        return m.linear(x) * m.count

    planned = plan(body)
    x = torch.randn(4, 8)
    for number in range(1, 5):
        assert torch.equal(planned(x), planned.linear(x) * number) and planned.count == number
    with pytest.raises(ut.CaptureError, match="count"):
        for _ in range(10):
            planned(x)


def test_growing_lists_are_named():
    def body(m, x):
        m.history.append(1)
        return m.linear(x)

    model = Body(body)
    model.history = []
    with pytest.raises(ut.CaptureError, match="history"):
        ut.plan(model, (torch.randn(4, 8),))
    assert model.history == []


def test_numpy_conversion_is_refused():
    with pytest.raises(ut.CaptureError, match="NumPy"):
        plan(lambda m, x: m.linear(x) * float(m.linear(x).detach().numpy().sum()))


def test_too_many_outcomes():
    planned = plan(lambda m, x: m.linear(x) * x.sum().item())
    with pytest.raises(ut.TooManyOutcomes, match=r"test_capture_refusals\.py:\d+.*torch\.where"):
        for number in range(70):
            planned(torch.full((4, 8), float(number)))


def test_branches_are_cached():
    planned = plan(lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(x) * 2)
    for number in (1.0, -1.0, 2.0, -2.0, 3.0):
        x = torch.full((4, 8), number)
        expected = nn.Module.__call__(planned, x)
        assert torch.equal(expected, planned.linear(x) * (1 if number > 0 else 2))
    (variants,) = planned.undertow_runner._variants.values()
    assert len(variants) == 2


def test_the_commonest_branch_is_tried_first(monkeypatch):
    planned = plan(lambda m, x: m.linear(x) if x.sum() > 0 else m.linear(x) * 2)
    runner, tried = planned.undertow_runner, []
    run = Runner._run
    monkeypatch.setattr(Runner, "_run", lambda *args: tried.append(args[1].captured.outcomes) or run(*args))

    def num_tries(number):
        tried.clear()
        planned(torch.full((4, 8), number))
        assert runner._last.captured.outcomes == tried[-1] == (number > 0,)
        return len(tried)

    for number in (-1.0, 1.0, 1.0, 1.0, -1.0):
        num_tries(number)
    assert num_tries(1.0) == 1  # one call with the other outcome does not outweigh the calls before
    assert [num_tries(-1.0) for _ in range(12)][-1] == 1  # many do


def test_a_miss_leaves_no_trace():
    """When the other variant is captured, generator and buffers are as they were before the step."""

    def body(m, x):
        m.norm.train()
        h = m.norm(torch.nn.functional.dropout(m.linear(x), 0.5))
        return h if torch.rand([]) < 0.5 else h * 2

    model = Body(body)
    model.norm = nn.BatchNorm1d(8)
    x = torch.randn(4, 8)
    planned = ut.plan(model, (x,))
    for _ in range(6):
        planned(x)
    assert planned.norm.num_batches_tracked == 6


class Lazy(nn.Sequential):
    """Its first layer has a shape, the others do not yet."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.LazyLinear(4), nn.Dropout(0.5), nn.LazyBatchNorm1d(affine=False))

    def total(self, x):
        return self(x).sum()


LAZY_CALLS = {
    "plan": lambda m, x: ut.plan(m, (x,)),
    "plan with optimizer": lambda m, x: ut.plan(m, (x,), optimizer=torch.optim.SGD(m.parameters())),
    "train_step": lambda m, x: ut.train_step(m, (x,), loss=torch.sum, optimizer=torch.optim.SGD(m.parameters())),
    "train_step within a budget": lambda m, x: ut.train_step(m, (x,), loss=torch.sum, budget="1MiB"),
    "tradeoff": lambda m, x: ut.tradeoff(m, (x,), loss=torch.sum),
    "largest_batch": lambda m, x: ut.largest_batch(m, lambda n: ((x[:n],), ()), loss=torch.sum, budget="1MiB"),
    "measure": lambda m, x: ut.measure(m, x),
    "inspect": lambda m, x: ut.inspect(m, (x,)),
    "trace": lambda m, x: ut.trace(m, (x,)),
    "check_gradients": lambda m, x: ut.check_gradients(m, (x,)),
    "grad": lambda m, x: ut.grad(m.total)(x),
    "vjp": lambda m, x: ut.vjp(m.total, x),
    "hvp": lambda m, x: ut.hvp(m.total, (x,), (x,)),
    "hessian": lambda m, x: ut.hessian(m.total)(x),
    "a loss that is lazy": lambda m, x: ut.train_step(nn.Linear(8, 8), (x,), loss=m.total),
}


@pytest.mark.parametrize("call", LAZY_CALLS.values(), ids=LAZY_CALLS.keys())
def test_lazy_modules_have_to_be_called_once_first(call):
    """Refused in one line. The model is unchanged: its first call gives what it gives in eager."""
    model, other, x = Lazy(), Lazy(), torch.randn(4, 8)
    other.load_state_dict(model.state_dict())
    with pytest.raises(ut.CaptureError, match=r"^[^\n]*\(lazy\) parameter[^\n]*; run the model once first$"):
        call(model, x)
    results = []
    for item in (model, other):
        torch.manual_seed(0)
        results.append(item(x))
    assert torch.equal(*results)


def test_a_planned_model_that_becomes_lazy():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    planned = ut.plan(model, (x,))
    model[1] = nn.LazyLinear(3)
    for _ in range(2):
        with pytest.raises(ut.CaptureError, match="module 1 has uninitialized"):
            planned(x)
    model[1](x)
    assert torch.equal(planned(x), nn.Sequential(*model)(x))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
def test_wrapped_models_are_refused(wrap):
    with pytest.raises(ut.CallError, match="give the module inside it"):
        ut.plan(wrap(nn.Linear(8, 8)), (torch.randn(4, 8),))


def test_calls_that_are_wrong():
    model = nn.Linear(8, 8)
    with pytest.raises(ut.CallError, match="tuple"):
        ut.plan(model, torch.randn(4, 8))
    with pytest.raises(ut.CallError, match="nn.Module"):
        ut.plan(torch.relu, (torch.randn(4, 8),))
    with pytest.raises(ut.CallError, match="dict"):
        ut.plan(model, (torch.randn(4, 8),), [1])


def test_wrong_shapes_and_missing_arguments_fail_as_eager_does():
    planned = ut.plan(nn.Linear(8, 8), (torch.randn(4, 8),))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        planned(torch.randn(4, 9))
    with pytest.raises(TypeError, match="missing"):
        planned()


def test_strict_names_operations_without_a_rule():
    with pytest.raises(ut.MissingRule, match="no derivative rule"):
        ut.plan(Body(lambda m, x: torch.fft.rfft(m.linear(x)).abs()), (torch.randn(4, 8),), strict=True)


def test_a_model_without_parameters():
    planned = ut.plan(nn.Sequential(nn.Tanh(), nn.Softmax(-1)), (torch.randn(4, 8),))
    x = torch.randn(4, 8, requires_grad=True)
    planned(x)[:, 0].sum().backward()
    expected = torch.autograd.grad(torch.softmax(torch.tanh(x), -1)[:, 0].sum(), x)[0]
    assert torch.equal(x.grad, expected)


SCALE = torch.eye(8).to_sparse()


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize(
    ("body", "layout"),
    [
        (lambda m, x: m.linear(x).to_sparse().to_dense(), "sparse_coo"),
        (lambda m, x: m.linear(x).to_sparse(), "sparse_coo"),
        (lambda m, x: m.linear(x) @ torch.sparse_coo_tensor(torch.zeros(2, 1).long(), torch.ones(1), (8, 8)), "sparse"),
        (lambda m, x: m.linear(x) @ SCALE, "sparse_coo"),
        (lambda m, x: m.linear(x).to_sparse_csr().to_dense(), "sparse_csr"),
        (lambda m, x: m.linear(x).sparse_mask(SCALE[:4]).to_dense(), "sparse_coo"),
        (lambda m, x: m.linear(x).to_mkldnn().to_dense(), "mkldnn"),
        (lambda m, x: torch.quantize_per_tensor(m.linear(x), 0.1, 0, torch.quint8).dequantize(), "quantized"),
    ],
)
def test_tensors_that_are_not_dense_and_strided_are_refused(body, layout, budget):
    match = rf"test_capture_refusals\.py:\d+.*{layout}|{layout}.*test_capture_refusals\.py:\d+"
    with pytest.raises(ut.CaptureError, match=match):
        ut.plan(Body(body), (torch.randn(4, 8),), budget=budget)


def test_sparse_gradients_of_other_operations_are_refused():
    with pytest.raises(ut.CaptureError, match="sparse_grad=False"):
        plan(lambda m, x: torch.gather(m.linear(x), 1, torch.zeros(4, 1, dtype=torch.long), sparse_grad=True))
