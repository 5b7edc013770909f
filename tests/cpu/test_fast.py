"""`numerics="fast"`: close to eager, the same bits at every budget, and layouts that nobody sees outside."""

import copy

import pytest
import torch
from families import FAMILIES
from spread_cases import spread
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.alternatives.registry import Role, find_alternatives
from undertow.ir import TensorType
from undertow.models import SMALL
from undertow.ops.interpret import run_node

CASES = [*SMALL, *(f"hf-{name}" for name in FAMILIES)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def make(name):
    torch.manual_seed(0)
    if name.startswith("hf-"):
        build, kwargs = FAMILIES[name.removeprefix("hf-")]
        model = build().train()
        for module in model.modules():
            if hasattr(module, "drop_prob"):  # draws other numbers in float64
                module.drop_prob = 0.0
        return model, (), kwargs, (), None
    entry = SMALL[name]
    return entry.build(), entry.example_inputs(3), {}, entry.example_targets(3), entry.loss


def loss_and_gradients(model, args, kwargs, targets, loss, dtype=torch.float32):
    """Eager's gradients, computed in `dtype` from the same numbers and the same draws."""
    twin = copy.deepcopy(model).to(dtype)

    def cast(item):
        return item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item

    torch.manual_seed(5)
    outputs = twin(*map(cast, args), **{name: cast(item) for name, item in kwargs.items()})
    value = outputs.loss if loss is None else loss(outputs, *map(cast, targets))
    value.backward()
    return [value.detach(), *(item.grad for item in twin.parameters())]


def relative_error(found, expected):
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if b is not None]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs if b.numel())


@pytest.mark.parametrize("name", spread(list(CASES), str, every=4))
def test_gradients_are_near_eagers(name):
    model, args, kwargs, targets, loss = make(name)
    eager = loss_and_gradients(model, args, kwargs, targets, loss)
    exact = loss_and_gradients(model, args, kwargs, targets, loss, torch.float64)
    step = ut.train_step(model, args, kwargs, targets=targets, loss=loss, numerics="fast")
    torch.manual_seed(5)
    found = [step(*args, *targets, **kwargs).detach(), *(item.grad for item in model.parameters())]
    for gradient, parameter in zip(found[1:], model.parameters(), strict=True):
        assert gradient is None or gradient.stride() == parameter.stride()
    # Winograd's F(4x4,3x3) has about ten times the rounding error of a direct convolution (see its stated bound).
    # Eager's own error shows how the network magnifies rounding.
    own_error = relative_error(eager, exact)
    assert own_error < 1e-2  # both precisions drew the same masks
    assert relative_error(found, exact) < 30 * max(own_error, 1e-6)


@pytest.mark.parametrize("name", spread(["vgg_small", "resnet50", "unet", "hf-convnext"], str, every=2))
def test_the_bits_are_the_same_at_every_budget(name):
    model, args, kwargs, targets, loss = make(name)
    seen = []
    most = least = 0
    buffers = {key: item.clone() for key, item in model.named_buffers()}
    for share in (None, 1.0, 0.5, 0.0):
        budget = None if share is None else int(least + share * (most - least))
        step = ut.train_step(model, args, kwargs, targets=targets, loss=loss, numerics="fast", budget=budget)
        if share is None:
            most = step.plan.peak_bytes + 2**22
            with pytest.raises(ut.InfeasibleBudget) as refusal:
                ut.train_step(model, args, kwargs, targets=targets, loss=loss, numerics="fast", budget=1)
            least = refusal.value.minimum_bytes
        model.zero_grad(set_to_none=True)
        for key, item in model.named_buffers():
            item.copy_(buffers[key])
        torch.manual_seed(5)
        value = step(*args, *targets, **kwargs)
        seen.append([value.detach().clone(), *(item.grad.clone() for item in model.parameters())])
    for others in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], others, strict=True))


def program_and_environment(name):
    """What `fast` runs, and tensors for its inputs."""
    model, args, kwargs, *_ = make(name)
    program = ut.plan(model, args, kwargs, numerics="fast").plan.program
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    environment = {}
    for item in (*program.inputs, *program.cotangents):
        kind = item.value.tensor_type
        known = tensors.get(item.path)
        given = known.detach() if known is not None else torch.empty_strided(kind.shape, kind.strides, dtype=kind.dtype)
        environment[item.value] = given if known is not None else given.fill_(1)
    return program, environment


@pytest.mark.parametrize("name", ["vgg_small", "alexnet", "resnet50", "unet", "lenet5", "hf-convnext", "hf-resnet"])
def test_values_lie_as_the_program_says(name):
    program, environment = program_and_environment(name)
    with torch.no_grad():
        for node in program.nodes:
            run_node(node, environment)
            for value in node.named_outputs:
                if isinstance(value.type, TensorType) and len(value.type.shape) == 4:
                    # No address depends on the stride of a dim of size 1.
                    wide = [dim for dim, size in enumerate(value.type.shape) if size > 1]
                    found = environment[value].stride()
                    assert [found[dim] for dim in wide] == [value.type.strides[dim] for dim in wide], node


@pytest.mark.parametrize("name", ["vgg_small", "resnet50", "unet", "lenet5"])
def test_alternatives_make_the_same_bits(name):
    program, environment = program_and_environment(name)
    alternatives = [item for item in find_alternatives(program) if item.state is None]
    with torch.no_grad():
        for position, node in enumerate(program.nodes):
            run_node(node, environment)
            for item in alternatives:
                if item.position == position:
                    others = dict(environment)
                    run_node(item.node, others)
                    if item.role is Role.ENCODE:
                        environment[item.code] = others[item.code]
                        continue
                    for value in item.node.named_outputs:
                        assert torch.equal(others[value], environment[value]), item.node


def test_outputs_and_arguments_keep_their_layout():
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    planned = ut.plan(network, (x,), numerics="fast")
    y = planned(x)
    assert y.is_contiguous()
    y.sum().backward()
    assert x.grad.is_contiguous()


def test_an_unknown_name_is_refused():
    with pytest.raises(ut.CallError, match='"exact", "fast", "bf16"'):
        ut.plan(nn.Linear(2, 2), (torch.ones(1, 2),), numerics="quick")


def test_training_goes_on_in_eval_mode_and_back():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    eager = copy.deepcopy(network)
    x, y = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    planned = ut.plan(network, (x,), numerics="fast")
    for item in (eager, planned):
        cross_entropy(item(x), y).backward()
    torch.testing.assert_close(planned[4].weight.grad, eager[4].weight.grad)
    for item in (eager, planned):
        item.eval()
    with torch.no_grad():
        torch.testing.assert_close(planned(x), eager(x))
