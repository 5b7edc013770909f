"""`ut.inspect` against hand computation, PyTorch's own counters, and the allocator."""

import copy
import json
import math
import re

import pytest
import torch
from spread_cases import spread
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from undertow.alternatives.registry import Role, find_alternatives
from undertow.api.inspection import inspect
from undertow.api.planning import plan
from undertow.costs.optimizer_state import count_optimizer_state
from undertow.costs.work import total_work, work_of
from undertow.errors import CallError
from undertow.ir import Node, Origin, TensorType, Value
from undertow.models import SMALL, ZOO, vgg16
from undertow.pipeline import Request, derive
from undertow.record.capture import capture
from undertow.terms import Numerics, Terms

FLOAT, INDEX = 4, 8  # bytes


@pytest.fixture(autouse=True)
def same_numbers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def tiny_convnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 4, 10)
    )


def inspect_tiny(**options):
    return inspect(tiny_convnet(), (torch.randn(2, 3, 8, 8),), **options)


def askers(layer):
    return [{(site.operation, site.layer) for site in item.asked_for_by} for item in layer.kept]


def test_tiny_convnet_by_hand_memory():
    conv, relu, pool, flatten, linear = inspect_tiny().layers
    assert [layer.path for layer in (conv, relu, pool, flatten, linear)] == ["0", "1", "2", "3", "4"]
    assert [layer.kind for layer in (conv, linear)] == ["Conv2d", "Linear"]
    assert (conv.num_parameters, conv.parameter_bytes) == (4 * 3 * 9 + 4, (4 * 3 * 9 + 4) * FLOAT)
    assert (linear.num_parameters, linear.parameter_bytes) == (64 * 10 + 10, (64 * 10 + 10) * FLOAT)

    image, halved = 2 * 4 * 8 * 8 * FLOAT, 2 * 4 * 4 * 4 * FLOAT
    assert [layer.output_bytes for layer in (conv, relu, pool, flatten)] == [image, image, halved, halved]
    assert linear.output_bytes == 2 * 10 * FLOAT

    # ReLU writes over the convolution's output, so only one of the two is there to be kept.
    assert (conv.kept_bytes, flatten.kept_bytes, linear.kept_bytes) == (0, 0, 0)
    assert [item.num_bytes for item in relu.kept] == [image]
    # Eager keeps it for the pooling layer too, whose derivative reads only its shape.
    assert askers(relu) == [{("relu", "1")}]
    assert [item.num_bytes for item in pool.kept] == [halved, 2 * 4 * 4 * 4 * INDEX]
    assert askers(pool) == [{("addmm", "4")}, {("max_pool2d_with_indices", "2")}]
    assert pool.kept[0].asked_for_by[0].location.startswith("test_inspection.py:")


def test_tiny_convnet_by_hand_arithmetic():
    conv, relu, pool, flatten, linear = inspect_tiny().layers
    positions = 2 * 8 * 8
    # The batch needs no gradient: one product instead of two.
    assert conv.forward.flops == conv.backward.flops == 2 * positions * 4 * 3 * 9
    assert linear.forward.flops == 2 * 2 * 64 * 10
    assert linear.backward.flops == 2 * linear.forward.flops
    assert (relu.work.flops, relu.forward.element_operations) == (0, 4 * positions)
    # The sum over the batch that is the bias's gradient.
    assert linear.backward.element_operations == 2 * 10

    batch, image = 3 * positions * FLOAT, 4 * positions * FLOAT
    weights = (4 * 3 * 9 + 4) * FLOAT
    assert conv.forward.moved_bytes == batch + weights + image
    # Reads the cotangent, the batch and the weights, not the bias; writes the gradients of weight and bias.
    assert conv.backward.moved_bytes == image + batch + (weights - 4 * FLOAT) + weights
    assert relu.forward.moved_bytes == 2 * image
    assert relu.backward.moved_bytes == 3 * image
    assert flatten.work.moved_bytes == 0
    assert conv.forward.operations_per_byte == conv.forward.flops / conv.forward.moved_bytes
    assert relu.work.dram_joules == pytest.approx(5 * image / 4 * 640e-12, rel=1e-15)


def test_tiny_convnet_by_hand_totals():
    model = tiny_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    result = inspect(model, (torch.randn(2, 3, 8, 8),), optimizer=optimizer)
    weights = (4 * 3 * 9 + 4 + 64 * 10 + 10) * FLOAT
    batch, image, halved = 2 * 3 * 8 * 8 * FLOAT, 2 * 4 * 8 * 8 * FLOAT, 2 * 4 * 4 * 4 * FLOAT
    assert result.gradient_bytes == result.optimizer.num_bytes == weights
    assert result.reread_batch_bytes == batch
    assert result.reread_parameter_bytes == weights - (4 + 10) * FLOAT
    # Inference has its peak while it pools: input, output and the indices of the maxima.
    assert result.inference.peak_bytes == weights + batch + image + 3 * halved
    assert result.inference.at.startswith("max_pool2d_with_indices 2")
    # Training has its peak at the derivative of ReLU: its output, which is kept, the cotangents of its output and its
    # input, and the gradients of the linear layer. The derivative of the pooling, just before, takes less: instead of
    # one image it has the pooled image's cotangent and the indices of the maxima, 3 * halved.
    memory = result.training
    assert memory.at.startswith("threshold_backward 1")
    assert (memory.parameter_bytes, memory.batch_bytes, memory.buffer_bytes) == (weights, batch, 0)
    assert (memory.kept_bytes, memory.gradient_bytes) == (image, (64 * 10 + 10) * FLOAT)
    assert memory.optimizer_bytes == weights
    # The logits belong to the user, who holds them to the end; their cotangent is freed before that.
    assert memory.other_bytes == 2 * 10 * FLOAT + 2 * image
    assert memory.peak_bytes == 2 * weights + batch + 3 * image + (64 * 10 + 10) * FLOAT + 2 * 10 * FLOAT
    assert result.memory_ratio == memory.peak_bytes / result.inference.peak_bytes
    assert result.flops_ratio == (27648 + 2 * 2560) / (27648 + 2560)


# Without alexnet, whose grouped convolutions PyTorch counts wrong, and lstm, which it does not count.
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"alexnet", "lstm"}))
def test_flops_are_those_of_the_flop_counter(name):
    model, inputs = SMALL[name].build(), SMALL[name].example_inputs(3)
    with FlopCounterMode(display=False) as forward:
        output = model(*inputs)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    result = inspect(model, inputs)
    assert result.forward.flops == forward.get_total_flops() > 0
    assert result.backward.flops == backward.get_total_flops() > 0


@pytest.mark.parametrize("name", spread(["vgg_small", "lenet5", "gpt"], str, every=3))
def test_other_kernels_do_the_same_arithmetic(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, inputs = SMALL[name].build(), SMALL[name].example_inputs(3)
    for mode, pattern in ((model.train(), (True,)), (model.eval(), (False,))):
        program = capture(mode.forward, inputs, {}, mode).program
        requests = [Request(mode, mode.forward, Terms(numerics=kind)) for kind in (Numerics.EXACT, Numerics.FAST)]
        exact, fast = (derive(request, program, pattern, is_holding=False) for request in requests)
        assert total_work(exact.nodes).flops == total_work(fast.nodes).flops > 0
        for item in find_alternatives(exact):
            base = exact.nodes[item.position]
            if item.role is Role.PART:
                assert work_of(item.node).flops == work_of(base).flops // 2


# oneDNN's LSTM keeps a workspace that a tensor without data does not show.
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"lstm"}))
def test_kept_bytes_are_what_eager_saves(name):
    model, inputs = SMALL[name].build(), SMALL[name].example_inputs(3)
    given = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers(), *inputs)}
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*inputs)
    eager = sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in given)
    kept = inspect(model, inputs).kept_bytes
    # The derivative of a pooling layer needs only the shape of its input. Eager keeps the input just for that.
    assert 0 < kept < eager if name in ("alexnet", "lenet5") else kept == eager > 0
    del output


def measured_peak(run):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        run()
    alive = highest = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            highest = max(highest, alive)
    return highest


def test_peaks_are_the_allocators():
    # Matrix products and elementwise operations: no kernel among them has a workspace.
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 256), nn.Sigmoid(), nn.Linear(256, 8))
    inputs = (torch.randn(512, 64),)
    result = inspect(model, inputs)
    planned, ct = plan(model, inputs), torch.ones(512, 8)
    resting = result.inference.parameter_bytes + result.inference.batch_bytes
    with torch.no_grad():
        planned(*inputs)
        held = sum(tensor.nbytes for tensor in planned.undertow_runner.persistent_tensors())  # the arena
        assert result.inference.peak_bytes == resting + held + measured_peak(lambda: planned(*inputs))
    planned(*inputs).backward(ct)
    model.zero_grad()
    # The cotangent, here made outside the step, is read for the last time before the peak.
    assert result.training.peak_bytes == resting + measured_peak(lambda: planned(*inputs).backward(ct))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_convolutions(kind, groups):
    layer = kind(4, 8, 3, stride=2, groups=groups)
    work = inspect(layer, (torch.randn(2, 4, 9, 9, requires_grad=True),))[""]
    # Every weight is used once per pixel: of the output, 4 x 4, or for a transposed convolution of the input.
    positions = 4 * 4 if kind is nn.Conv2d else 9 * 9
    assert work.forward.flops == 2 * 2 * positions * layer.weight.numel()
    assert work.backward.flops == 2 * work.forward.flops


def test_recurrent_layers():
    steps, batch, width, hidden = 5, 3, 6, 7
    layer = nn.LSTM(width, hidden, num_layers=2)
    result = inspect(layer, (torch.randn(steps, batch, width, requires_grad=True),))[""]
    matrices = 4 * hidden * (width + hidden) + 4 * hidden * (hidden + hidden)
    assert result.forward.flops == 2 * steps * batch * matrices
    assert result.backward.flops == 2 * result.forward.flops


def test_recurrent_kernel_of_cudnn():
    def value(name, *shape):
        return Value(name, TensorType.of(torch.empty(shape, device="meta")))

    weights = (value("ih", 28, 6), value("hh", 28, 7), value("bias", 28))
    args = (value("x", 5, 3, 6), weights, 4, value("all", 28 * 13 + 28), value("h", 1, 3, 7), value("c", 1, 3, 7))
    for target, factor in ((torch.ops.aten._cudnn_rnn, 1), (torch.ops.aten._cudnn_rnn_backward, 2)):
        node = Node(target.default, args, {}, (value("y", 5, 3, 7),), Origin())
        assert work_of(node).flops == factor * 2 * 5 * 3 * 28 * (6 + 7)


def test_attention_kernel():
    class Attention(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    result = inspect(Attention(), (torch.randn(2, 3, 16, 8, requires_grad=True),))[""]
    product = 2 * (2 * 3) * 16 * 16 * 8
    assert result.forward.flops == 2 * product
    # Four products, and the scores once more, which the kernel does not keep.
    assert result.backward.flops == 5 * product


def test_embedding_reads_its_rows_only():
    result = inspect(nn.Embedding(10_000, 8), (torch.zeros(2, 3, dtype=torch.int64),))[""]
    assert result.forward.moved_bytes == 2 * 3 * (INDEX + 2 * 8 * FLOAT)
    assert result.forward.element_operations == 2 * 3 * 8


def test_vgg16_at_published_size():
    with torch.device("meta"):
        result = inspect(vgg16(), (torch.empty(1, 3, 224, 224),))
    assert result.num_parameters == 138_357_544
    widths, size, products = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512], 224, 0
    pooled_after = {2, 4, 7, 10}
    for index, (before, after) in enumerate(zip(widths, widths[1:], strict=False), start=1):
        products += size * size * 9 * before * after
        size //= 2 if index in pooled_after else 1
    assert size == 14
    products += 25088 * 4096 + 4096 * 4096 + 4096 * 1000
    assert result.forward.flops == 2 * products
    first = 2 * 224 * 224 * 9 * 3 * 64
    assert result.backward.flops == 2 * result.forward.flops - first
    assert result["classifier.0"].parameters[0].num_bytes == 392 * 2**20


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.Adam,
        lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
    ],
)
def test_optimizer_state_is_what_a_step_makes(make):
    model = tiny_convnet()
    model[0].bias.requires_grad_(False)
    optimizer = make(model.parameters())
    foreseen = inspect(model, (torch.randn(2, 3, 8, 8),), optimizer=optimizer).optimizer
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    tensors = [item for entry in optimizer.state.values() for item in entry.values() if isinstance(item, torch.Tensor)]
    assert foreseen.name == type(optimizer).__name__
    assert foreseen.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert inspect(model, (torch.randn(2, 3, 8, 8),), optimizer=optimizer).optimizer == foreseen


def test_optimizer_state_by_hand():
    parameter = nn.Parameter(torch.zeros(10, 20))
    sizes = {
        torch.optim.SGD([parameter], lr=0.1): 0,
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9): 800,
        torch.optim.Adam([parameter]): 2 * 800 + 4,
        torch.optim.LBFGS([parameter]): None,
    }
    for optimizer, num_bytes in sizes.items():
        assert count_optimizer_state(optimizer, [parameter]).num_bytes == num_bytes
        assert not optimizer.state


def test_unknown_optimizer_state_is_said():
    model = tiny_convnet()
    result = inspect(model, (torch.randn(2, 3, 8, 8),), optimizer=torch.optim.LBFGS(model.parameters()))
    assert result.training.optimizer_bytes == 0
    assert "LBFGS's is unknown before its first step" in str(result)
    assert "no optimizer was given" in str(inspect_tiny())


def test_the_model_is_left_alone():
    model = SMALL["vgg_small"].build()
    model.features[1].eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    tensors = {path: tensor.data_ptr() for path, tensor in model.state_dict().items()}
    inputs = SMALL["vgg_small"].example_inputs(4)
    state = torch.get_rng_state()
    inspect(model, inputs, optimizer=torch.optim.AdamW(model.parameters()))
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert {path: tensor.data_ptr() for path, tensor in model.state_dict().items()} == tensors
    assert all(torch.equal(tensor, before[path]) for path, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mode_is_kept():
    model, inputs = SMALL["vgg_small"].build(), SMALL["vgg_small"].example_inputs(4)
    training = inspect(model, inputs)
    model.eval()
    assert "classifier.0" in {layer.path for layer in training.layers}  # dropout
    assert "classifier.0" not in {layer.path for layer in inspect(model, inputs).layers}


def test_no_grad_around_it_changes_nothing():
    with torch.no_grad():
        assert inspect_tiny().training is not None


def test_planned_module_is_inspected_as_the_model():
    model, inputs = SMALL["lenet5"].build(), SMALL["lenet5"].example_inputs(2)
    assert inspect(plan(model, inputs), inputs).to_dict() == inspect(model, inputs).to_dict()


def test_tied_unused_and_frozen_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
            self.unused = nn.Parameter(torch.zeros(7))
            self.register_buffer("table", torch.zeros(5))

        def forward(self, x):
            return self.frozen(self.second(self.first(x)))

    result = inspect(Net(), (torch.randn(2, 4),))
    assert result.num_parameters == 16 + 16 + 7
    assert [layer.num_parameters for layer in result.layers] == [16, 0, 16, 7]
    assert result.gradient_bytes == 16 * FLOAT
    assert result.inference.parameter_bytes == result.training.parameter_bytes == (16 + 16 + 7) * FLOAT
    assert result.training.buffer_bytes == 5 * FLOAT
    # No product for the frozen weight's gradient: one each for it and the first layer, two in between.
    assert result.flops_ratio == 4 / 3


def test_nothing_to_differentiate():
    result = inspect(tiny_convnet().requires_grad_(False), (torch.randn(2, 3, 8, 8),))
    assert result.training is None and result.memory_ratio is None and result.flops_ratio is None
    assert result.backward.flops == result.kept_bytes == 0
    assert "there is no backward pass" in str(result)
    empty = inspect(nn.ReLU(), (torch.randn(3),))
    assert (empty.num_parameters, empty.inference.peak_bytes) == (0, 2 * 3 * FLOAT)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, ct):
        return 2 * ct


def test_derivatives_through_autograd_are_named():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.linalg.cholesky(Doubled.apply(self.linear(x).abs()) + 20 * torch.eye(4))

    result = inspect(Net(), (torch.randn(4, 4),))
    assert [site.operation for site in result.without_rule] == ["Doubled", "linalg_cholesky_ex"]
    assert all(site.location.startswith("test_inspection.py:") for site in result.without_rule)
    assert "no rule" in str(result) and "linalg_cholesky_ex" in str(result)
    assert "no rule" not in str(inspect_tiny())


def numbers_in(data):
    if isinstance(data, dict):
        for item in data.values():
            yield from numbers_in(item)
    elif isinstance(data, list):
        for item in data:
            yield from numbers_in(item)
    elif isinstance(data, int | float):
        yield data


@pytest.mark.parametrize("name", ZOO)
def test_every_zoo_model_prints_in_100_columns(name):
    with torch.device("meta"):
        model = ZOO[name].build()
    inputs = tuple(tensor.to("meta") for tensor in ZOO[name].example_inputs(2))
    result = inspect(model, inputs, optimizer=torch.optim.AdamW(model.parameters()))
    text = str(result)
    assert max(map(len, text.splitlines())) <= 100
    assert text.isascii()
    assert result.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert f"{result.num_parameters:,} parameters" in text
    assert result.gradient_bytes == 4 * result.num_parameters
    assert result.optimizer.num_bytes == 8 * result.num_parameters + 4 * len(list(model.parameters()))
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert all(math.isfinite(number) and number >= 0 for number in numbers_in(data))
    assert sum(layer["kept_bytes"] for layer in data["layers"]) == data["kept_bytes"] == result.kept_bytes
    assert data["training_memory"]["peak_bytes"] == sum(
        size for role, size in data["training_memory"].items() if role not in ("at", "peak_bytes")
    )
    assert data["memory_ratio"] == data["training_memory"]["peak_bytes"] / data["inference_memory"]["peak_bytes"]


def test_long_names_stay_in_100_columns():
    class LayerWithAVeryLongNameThatFillsAWholeColumn(nn.Linear):
        def forward(self, x):
            return torch.linalg.cholesky(super().forward(x).abs() + 20 * torch.eye(4))

    model = LayerWithAVeryLongNameThatFillsAWholeColumn(4, 4)
    for _ in range(5):
        outer = nn.Sequential()
        outer.add_module("a_name_as_long_as_some_users_write_them", model)
        model = outer
    lines = str(inspect(model, (torch.randn(4, 4),))).splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("a_name..") and line.count("LayerWith") == 1 for line in lines)
    peak = next(line for line in lines if line.startswith("the peak of training is at"))
    assert re.search(r"test_inspection\.py:\d+$", peak)


def test_rows_and_bars():
    lines = str(inspect_tiny()).splitlines()
    relu = next(line for line in lines if line.startswith("1 ReLU"))
    pool = next(line for line in lines if line.startswith("2 MaxPool2d"))
    # 2,048 bytes fill the bar of ten, 1,536 bytes three quarters of it: 7.5, rounded to even.
    assert relu.split()[2:] == ["-", "2.0", "KiB", "2.0", "KiB", "#" * 10, "relu"]
    assert pool.split()[2:8] == ["-", "512", "B", "1.5", "KiB", "#" * 8]


def test_wrong_calls_name_the_argument():
    model, inputs = tiny_convnet(), (torch.randn(2, 3, 8, 8),)
    with pytest.raises(CallError, match=r"args must be a tuple.*\(x,\)"):
        inspect(model, inputs[0])
    with pytest.raises(CallError, match="kwargs must be a dict"):
        inspect(model, inputs, [1])
    with pytest.raises(CallError, match=r"nn\.Module, got function"):
        inspect(lambda x: x, inputs)
    with pytest.raises(CallError, match="DataParallel.*model.module"):
        inspect(nn.DataParallel(model), inputs)
    with pytest.raises(CallError, match=r"torch\.compile.*_orig_mod"):
        inspect(torch.compile(model), inputs)
    with pytest.raises(CallError, match="optimizer must be"):
        inspect(model, inputs, optimizer="adam")
    with pytest.raises(CallError, match="no parameter of the model"):
        inspect(model, inputs, optimizer=torch.optim.Adam(tiny_convnet().parameters()))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        inspect(nn.Linear(4, 4), (torch.randn(2, 5),))


def test_empty_batch():
    result = inspect(tiny_convnet(), (torch.randn(0, 3, 8, 8),))
    assert result.forward.flops == result.kept_bytes == 0
    assert result.flops_ratio is None
    assert str(result)


def test_im2col_against_unfold():
    """`unfold` really makes the patch matrix; groups, strides, dilation and padding change its size."""
    convolutions = [
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Conv2d(6, 6, (5, 3), stride=(2, 1), padding=2, dilation=(1, 2), groups=3),
        nn.Conv2d(6, 2, 1),
    ]
    result = inspect(nn.Sequential(*convolutions, nn.ConvTranspose2d(2, 2, 2)), (torch.randn(3, 4, 12, 10),))
    x = torch.randn(3, 4, 12, 10)
    assert [item.layer for item in result.amplifications] == ["0", "1", "2"]  # a transposed one gathers no patches
    for layer, item in zip(convolutions, result.amplifications, strict=True):
        patches = nn.functional.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        assert (item.input_bytes, item.patch_bytes) == (x.nbytes, patches.nbytes)
        x = layer(x)
    assert result.to_dict()["im2col"][0]["factor"] == 9
    assert not inspect(nn.Linear(3, 3), (torch.randn(2, 3),)).amplifications


def test_vgg16_is_amplified_nine_times():
    """The figure of lecture 24 of CMU 15-418 (2019)."""
    with torch.device("meta"):
        result = inspect(vgg16(), (torch.empty(2, 3, 224, 224),))
    assert [item.factor for item in result.amplifications] == [9.0] * 13


@pytest.mark.parametrize(
    ("optimizer", "copies"), [(None, None), (torch.optim.SGD, 0), (torch.optim.Adagrad, 1), (torch.optim.Adam, 2)]
)
def test_gradients_and_optimizer_state_as_copies_of_the_parameters(optimizer, copies):
    model = nn.Linear(100, 100)
    made = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    result = inspect(model, (torch.randn(2, 100),), optimizer=made)
    assert result.parameter_bytes == result.gradient_bytes == 4 * 10_100 and result.gradient_copies == 1
    # Adam and Adagrad also count steps, in 4 bytes for each of two parameters.
    counters = 0 if not copies else 8
    assert result.optimizer_copies == (None if copies is None else (copies * 4 * 10_100 + counters) / (4 * 10_100))
    text = str(result)
    assert "1.00 times the weights" in text and ("gradients and optimizer state" in text) == (copies is not None)
    frozen = inspect(model.requires_grad_(False), (torch.randn(2, 100, requires_grad=True),))
    assert frozen.gradient_copies == 0
