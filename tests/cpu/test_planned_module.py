"""A planned module in user code behaves as the module it was made from."""

import copy
import enum
import functools
import inspect
import io
from types import SimpleNamespace

import pytest
import torch
from exactness import same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import undertow as ut


def make(dropout=0.3):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(16, 3)
    )


def pair():
    eager = make()
    copied = copy.deepcopy(eager)
    return eager, ut.plan(copied, (torch.randn(4, 8),))


def gradients(model):
    return {name: None if item.grad is None else item.grad.clone() for name, item in model.named_parameters()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert [name for name in left if not same_bits(left[name], right[name])] == []


def run_both(models, act):
    """The result of `act(model)` for each, under the same generator state."""
    results = []
    for model in models:
        torch.manual_seed(7)
        results.append((act(model), gradients(model), dict(model.named_buffers()), torch.get_rng_state()))
    (_, left, left_buffers, left_state), (_, right, right_buffers, right_state) = results
    assert_same(left, right)
    assert_same(left_buffers, right_buffers)
    assert torch.equal(left_state, right_state)
    return results[0][0], results[1][0]


def test_it_is_the_module():
    model = make()
    planned = ut.plan(model, (torch.randn(4, 8),))
    assert isinstance(planned, nn.Sequential) and type(planned).__name__ == "Sequential"
    assert [id(item) for item in planned.parameters()] == [id(item) for item in model.parameters()]
    assert list(planned.state_dict()) == list(model.state_dict())
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert planned[0] is model[0] and planned.training is model.training
    planned.eval()
    assert not model.training
    with pytest.raises(AttributeError):
        planned.nothing_of_that_name  # noqa: B018


def test_two_forwards_before_a_backward():
    x, y = torch.randn(4, 8), torch.randn(4, 8)

    def act(model):
        first, second = model(x), model(y)
        (first.sum() + second.square().sum()).backward()

    run_both(pair(), act)


def test_gradient_accumulation():
    def act(model):
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()

    run_both(pair(), act)


def test_retained_graph_runs_again():
    x = torch.randn(4, 8)

    def act(model):
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    run_both(pair(), act)


def test_a_number_that_was_read_is_read_again_as_it_was():
    """BatchNorm with momentum=None reads the number of batches that it has counted."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, momentum=None))
    x = torch.randn(16, 8)
    planned = ut.plan(copy.deepcopy(eager), (x,))

    def act(model):
        for _ in range(2):
            loss = model(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()

    run_both((eager, planned), act)


def test_second_backward_without_retaining_is_eagers_error():
    planned = pair()[1]
    loss = planned(torch.randn(4, 8)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradient_of_some_parameters():
    x = torch.randn(4, 8)

    def act(model):
        return torch.autograd.grad(model(x).square().sum(), [model[4].weight, model[0].bias])

    left, right = run_both(pair(), act)
    assert all(map(same_bits, left, right))


def test_gradient_reaches_an_argument_with_history():
    x = torch.randn(4, 8, requires_grad=True)

    def act(model):
        x.grad = None
        model(x * 2).sum().backward()
        return x.grad.clone()

    left, right = run_both(pair(), act)
    assert same_bits(left, right)


def test_given_cotangent_of_a_matrix():
    def act(model):
        model(torch.ones(4, 8)).backward(torch.arange(12.0).reshape(4, 3))

    run_both(pair(), act)


def test_a_forward_of_the_instance_is_planned():
    model, num_calls = nn.Linear(8, 8), []
    plain = model.forward
    model.forward = lambda x: [num_calls.append(1), plain(x) * 2][1]
    x = torch.randn(4, 8)
    expected = model(x)
    planned = ut.plan(model, (x,))
    num_calls.clear()
    assert same_bits(planned(x), expected) and not num_calls
    inner = planned.forward
    planned.forward = lambda x: inner(x) + 1
    assert same_bits(planned(x), expected + 1)
    num_calls.clear()  # another forward is another capture
    assert same_bits(planned(x), expected + 1) and not num_calls
    del planned.forward
    assert same_bits(planned(x), plain(x) * 2)


def test_requires_grad_toggled_later():
    eager, planned = pair()
    for flag in (False, True):
        for model in (eager, planned):
            model.zero_grad()
            model[0].weight.requires_grad_(flag)
        run_both((eager, planned), lambda model: model(torch.ones(4, 8)).sum().backward())


def test_eval_no_grad_and_inference_mode():
    eager, planned = pair()
    x = torch.randn(4, 8)
    eager.eval(), planned.eval()
    assert same_bits(eager(x), planned(x)) and planned(x).requires_grad
    with torch.no_grad():
        assert same_bits(eager(x), planned(x)) and not planned(x).requires_grad
    with torch.inference_mode():
        assert same_bits(eager(x), planned(x))


def test_new_shapes_are_captured():
    run_both(pair(), lambda model: [model(torch.ones(size, 8)).sum().backward() for size in (2, 5, 2)])


def test_dropped_layers_are_captured_once_for_each_pattern():
    recorded = []

    class LayerDrop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            dropped = [bool(torch.rand(()) < 0.5) for _ in self.layers] if self.training else [False] * 3
            recorded.append((self.training, *dropped))  # Python runs only when a variant is recorded
            for layer, is_dropped in zip(self.layers, dropped, strict=True):
                x = x if is_dropped else layer(x)
            return x.sum()

    torch.manual_seed(0)
    model, x = LayerDrop(), torch.randn(4, 8, requires_grad=True)
    planned = ut.plan(model, (x,))
    for _ in range(60):
        planned.train()(x).backward()
        planned.eval()(x)
    assert len(recorded) == len(set(recorded)) == 9


def test_python_attributes_are_part_of_the_capture():
    def act(model):
        model[3].p = 0.9
        model(torch.ones(4, 8)).sum().backward()

    run_both(pair(), act)


def test_a_replaced_submodule_is_captured_again():
    x = torch.randn(4, 8)

    def act(model):
        model(x).sum().backward()
        torch.manual_seed(3)
        model[4] = nn.Linear(16, 5)
        model(x).square().sum().backward()

    run_both(pair(), act)


def test_forward_hooks_added_later_are_seen():
    x = torch.randn(4, 8)

    def act(model):
        model(x).sum().backward()
        handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
        model(x).sum().backward()
        handle.remove()
        model(x).sum().backward()

    run_both(pair(), act)


def test_an_argument_that_the_model_asks_a_gradient_for():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, positions):
            positions.requires_grad_()
            energy = self.linear(torch.tanh(self.linear(positions))).square().sum()
            return torch.autograd.grad(energy, positions, create_graph=True)[0]

    eager = Forces()
    planned = ut.plan(copy.deepcopy(eager), (torch.randn(4, 8),))
    start = torch.randn(4, 8)

    def act(model):
        positions = start.clone()
        model(positions).square().sum().backward()
        return positions.grad

    assert same_bits(*run_both((eager, planned), act))


class Body(nn.Module):
    """A linear layer and what `body` does with it; `settings` become attributes."""

    def __init__(self, body, **settings):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.body = body
        for name, item in settings.items():
            setattr(self, name, item)

    def forward(self, *args):
        return self.body(self, *args)


def test_attributes_changed_later_are_part_of_the_capture():
    x = torch.randn(4, 8)
    body = Body(lambda m, x: m.linear(x) * m.table["scale"] * m.numbers[0] * m.config.factor, table={"scale": 2.0})
    body.numbers, body.config = [3.0], SimpleNamespace(factor=1.0)
    planned = ut.plan(copy.deepcopy(body), (x,))
    for model in (body, planned):
        model(x)
        model.table["scale"], model.numbers[0], model.config.factor = 5.0, 7.0, 2.0
    assert same_bits(body(x), planned(x))


def test_python_arguments_are_compared_by_value():
    x = torch.randn(4, 8)
    body = Body(lambda m, x, item: m.linear(x) * len(item))
    planned = ut.plan(body, (x, range(1)))
    for count in range(1, 5):
        assert same_bits(planned(x, range(count)), body(x, range(count)))
        assert same_bits(planned(x, set(range(count))), body(x, set(range(count))))


def test_enumerations_and_cycles_as_arguments():
    x, mode = torch.randn(4, 8), enum.Enum("Mode", "A B")
    body = Body(lambda m, x, item: m.linear(x) if item is mode.A else m.linear(-x))
    planned = ut.plan(body, (x, mode.A))
    assert same_bits(planned(x, mode.B), body(x, mode.B))
    loop = SimpleNamespace(scale=torch.tensor(2.0))
    loop.itself = loop
    body = Body(lambda m, x, item: m.linear(x) * item.itself.scale)
    assert same_bits(ut.plan(body, (x, loop))(x, loop), body(x, loop))


def test_arguments_in_the_same_memory():
    body = Body(lambda m, left, right: left.add_(1) * 0 + m.linear(right))
    planned = ut.plan(body, (torch.randn(6, 8), torch.randn(6, 8)))
    memory = torch.randn(12, 8)
    with pytest.raises(ut.CaptureError, match="shares memory"):
        planned(memory[:6], memory[3:9])


def test_a_mask_cached_outside_the_model_survives():
    @functools.lru_cache
    def mask(size):
        return torch.triu(torch.ones(size, size), 1).bool()

    x = torch.randn(8, 8)
    body = Body(lambda m, x: m.linear(x).masked_fill(mask(8), 0.0))
    planned = ut.plan(body, (x,))
    assert same_bits(planned(x), body(x))
    assert same_bits(planned(x.t().contiguous().t()), body(x.t().contiguous().t()))


def test_disjoint_outputs_are_differentiated_one_by_one():
    body = Body(lambda m, x: (m.linear(x).square().sum(), m.other(x).square().sum()), other=nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def act(model):
        first, second = model(x)
        first.backward()
        second.backward()

    run_both((body, ut.plan(copy.deepcopy(body), (x,))), act)


def test_a_step_for_other_outputs_is_made_as_the_expected_one_is():
    def forward(m, x):
        pooled = m.linear(x).view(2, 2, 8).sum(1)  # a view of the expanded cotangent is a copy
        return pooled.sum(), pooled * 2

    body = Body(forward)
    x = torch.randn(4, 8)

    def act(model):
        first, second = model(x)
        (first + second.square().sum()).backward()

    run_both((body, ut.plan(copy.deepcopy(body), (x,))), act)


def test_hooks_of_unreached_parameters_are_not_called():
    body = Body(lambda m, x: (m.linear(x).sum(), m.other(m.linear(x)).sum()), other=nn.Linear(8, 8))
    x = torch.randn(4, 8)

    def act(model):
        calls = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(lambda ct, name=name: calls.append(name))
        for output in (0, 1, 0):
            model(x)[output].backward()
        return sorted(calls)

    assert len(set(map(tuple, run_both((body, ut.plan(copy.deepcopy(body), (x,))), act)))) == 1


def test_planned_modules_nest_and_pickle():
    x = torch.randn(4, 8)
    inner = ut.plan(make(0.0), (x,))
    with pytest.raises(ut.CallError, match="already planned"):
        ut.plan(inner, (x,))
    outer = ut.plan(nn.Sequential(inner, nn.Linear(3, 2)), (x,))
    assert same_bits(outer(x), outer[1](inner(x)))
    file = io.BytesIO()
    torch.save(inner, file)
    file.seek(0)
    assert same_bits(torch.load(file, weights_only=False).eval()(x), inner.eval()(x))


def test_checkpoint_around_a_planned_module():
    x = torch.randn(4, 8, requires_grad=True)
    run_both(pair(), lambda model: checkpoint(model, x, use_reentrant=False).sum().backward())


def test_forward_mode_is_refused():
    planned = ut.plan(make(), (torch.randn(4, 8),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ut.UndertowError, match="forward-mode"):
        planned(torch.autograd.forward_ad.make_dual(torch.randn(4, 8), torch.randn(4, 8)))


def test_making_a_planned_module_registers_no_subclass():
    registered = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, name):
            registered.append(name)

    class Named(Base, name="named"):
        def forward(self, x):
            return x * 2

    ut.plan(Named(), (torch.randn(2),))
    assert registered == ["named"]


def test_hooks_fire():
    def act(model):
        seen = []
        handles = [
            model[0].weight.register_hook(lambda ct: seen.append("before") or ct * 2),
            model[0].weight.register_post_accumulate_grad_hook(lambda item: seen.append("after")),
            model.register_forward_hook(lambda module, args, result: seen.append("forward")),
        ]
        model(torch.ones(4, 8)).sum().backward()
        for handle in handles:
            handle.remove()
        return seen

    left, right = run_both(pair(), act)
    assert left == right == ["forward", "before", "after"]


def test_gradients_arrive_as_they_are_completed():
    """A large last layer's gradient is there before the first layer's backward pass runs."""
    model = nn.Sequential(nn.Linear(8, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 600))
    planned = ut.plan(model, (torch.randn(2, 8),))
    order = []
    for name, item in planned.named_parameters():
        item.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    present = []
    planned[2].weight.register_hook(lambda ct: present.append(planned[4].weight.grad is not None))
    planned(torch.randn(2, 8)).sum().backward()
    assert present == [True]
    assert order.index("4.weight") < order.index("2.weight") < order.index("0.weight")


def test_deepcopy_is_independent_and_exact():
    eager, planned = pair()
    other = copy.deepcopy(planned)
    assert other[0].weight is not planned[0].weight
    run_both((eager, other), lambda model: model(torch.ones(4, 8)).sum().backward())


def test_state_dict_round_trip():
    _, planned = pair()
    buffer = io.BytesIO()
    torch.save(planned.state_dict(), buffer)
    buffer.seek(0)
    other = make()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(dict(planned.state_dict()), dict(other.state_dict()))


def test_output_changed_before_backward_is_an_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
    planned = ut.plan(model, (torch.randn(4, 8),))
    out = planned(torch.randn(4, 8))
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_parameter_changed_before_backward_is_an_error():
    _, planned = pair()
    out = planned(torch.randn(4, 8))
    with torch.no_grad():
        planned[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"4\.weight"):
        out.sum().backward()


def test_create_graph_is_refused():
    _, planned = pair()
    loss = planned(torch.randn(4, 8)).square().sum()
    with pytest.raises(ut.UndertowError, match="create_graph"):
        torch.autograd.grad(loss, planned[0].weight, create_graph=True)


def test_any_optimizer():
    def act(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return [item.detach().clone() for item in model.parameters()]

    left, right = run_both(pair(), act)
    assert all(map(same_bits, left, right))


def test_nothing_global_changes():
    before = (
        torch.get_default_dtype(), torch.get_num_threads(), torch.get_rng_state().tolist(),
        torch.autograd.Function.__dict__["apply"], torch.is_grad_enabled(), set(torch.utils._pytree.SUPPORTED_NODES),
    )  # fmt: skip
    ut.plan(make(), (torch.randn(4, 8, generator=torch.Generator()),))
    torch.set_rng_state(torch.get_rng_state())
    after = (
        torch.get_default_dtype(), torch.get_num_threads(), before[2],
        torch.autograd.Function.__dict__["apply"], torch.is_grad_enabled(), set(torch.utils._pytree.SUPPORTED_NODES),
    )  # fmt: skip
    assert before == after


def test_planning_leaves_generator_and_buffers_alone():
    model = make()
    buffers = {name: item.clone() for name, item in model.named_buffers()}
    x = torch.randn(4, 8)
    state = torch.get_rng_state()
    ut.plan(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(buffers, dict(model.named_buffers()))


def test_values_are_freed_at_their_last_use():
    planned = ut.plan(
        nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh()))), (torch.randn(8, 64),)
    )
    assert planned.plan.peak_bytes > 0
    source = planned.undertow_runner.variant_for((torch.randn(8, 64),), {}).step().code.source
    assert source.count("del ") > len(planned.plan.nodes) // 2


class Weighted(nn.Module):
    """`function(weight, x)`."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2.0, 1.0, 4))
        self.function = function

    def forward(self, x):
        return self.function(self.weight, x)


@pytest.mark.parametrize("budget", [None, "1MiB"])
@pytest.mark.parametrize(
    "function",
    [
        lambda weight, x: weight.norm(0),  # carries a gradient, but gives none to its argument
        lambda weight, x: (weight * x).norm(0),
        lambda weight, x: (weight.norm(0), (weight * x).sum()),
        lambda weight, x: weight.sign().sum(),  # the gradient does not depend on the cotangent
        lambda weight, x: weight,
        lambda weight, x: (weight.view(2, 2), weight),
        lambda weight, x: x,
        lambda weight, x: x * 2,
        lambda weight, x: (weight * 2).detach(),
        lambda weight, x: torch.ones(3),
        lambda weight, x: weight.argmax(),
        lambda weight, x: None,
        lambda weight, x: (),
    ],
)
def test_passes_without_operations(function, budget):
    def act(model):
        outputs = model(x)
        tensors = [item for item in (outputs if isinstance(outputs, tuple) else (outputs,)) if item is not None]
        carriers = [item for item in tensors if item.requires_grad]
        torch.autograd.backward(carriers, [torch.full_like(item, 0.5) for item in carriers])
        return tensors

    x = torch.linspace(-1.0, 1.0, 12).view(3, 4)
    eager, model = Weighted(function), Weighted(function)
    planned = ut.plan(model, (x,), budget=budget, costs="model")
    expected, found = run_both((eager, planned), act)
    assert all(same_bits(left, right) for left, right in zip(expected, found, strict=True))
    assert [item.requires_grad for item in expected] == [item.requires_grad for item in found]
    assert str(planned.plan)


def test_a_module_whose_outputs_carry_no_gradient_is_measured_forward():
    model, x = Weighted(lambda weight, x: (weight * x).detach()), torch.randn(3, 4)
    assert ut.measure(ut.plan(model, (x,)), x).peak_bytes == ut.measure(model, x).peak_bytes


def test_a_cotangent_without_memory():
    eager, model = (Weighted(lambda weight, x: weight.exp() * x * 3 * 2) for _ in range(2))
    planned = ut.plan(model, (torch.ones(3, 4),))
    run_both((eager, planned), lambda model: model(torch.ones(3, 4)).sgn().sum().backward())
