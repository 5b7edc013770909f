"""Steps within a budget: measured peak, predicted peak, bits, and the refusal of less than the least budget."""

import copy
import gc
import math
import multiprocessing
import os
from dataclasses import replace

import pytest
import torch
from exactness import same_bits
from families import FAMILIES
from spread_cases import spread
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.api.budgets import parse_budget
from undertow.api.reports import report_plan
from undertow.api.training import make_step
from undertow.costs import cache as cost_cache
from undertow.costs.cache import cache_path, keep_costs, load_costs
from undertow.ir.check_plan import check_plan
from undertow.ir.cost import Cost
from undertow.ir.structure import tensors_in
from undertow.memory.placement import ALIGNMENT
from undertow.models import SMALL, ZOO
from undertow.pipeline import derive, find_planner, record, search_plan
from undertow.runtime.measure import measure_call
from undertow.runtime.step import Step
from undertow.terms import Terms

NUM_BUDGETS = pytest.param(3, id="3"), pytest.param(20, id="20", marks=pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(autouse=True)
def small_values_in_the_arena(monkeypatch):
    """The steps of these tests are small: without this their values would be left to the allocator."""
    monkeypatch.setattr("undertow.memory.destinations.FEWEST_BYTES", 1)


def zoo_case(name):
    entry = SMALL[name]
    return entry.build(), entry.example_inputs(3), {}, entry.example_targets(3), entry.loss


def family_case(name):
    build, kwargs = FAMILIES[name]
    return build().train(), (), kwargs, (), None


CASES = {name: (zoo_case, name) for name in SMALL} | {f"hf-{name}": (family_case, name) for name in FAMILIES}


class Planned:
    """A step whose curve is found once. It is then planned and run for many budgets."""

    def __init__(self, model, args, kwargs, targets, loss):
        self.model, self.args, self.kwargs, self.targets = model, (*args, *targets), kwargs, targets
        self.request = make_step(model, len(args), loss, None, Terms()).request
        self.captured = record(self.request, self.args, kwargs)
        self.planner = find_planner(self.request, derive(self.request, self.captured.program, ()), self.captured.live)

    def run(self, plan):
        """Loss, gradients, buffers and generator state after one step by `plan`, and the measured peak."""
        modules = dict(self.model.named_modules())
        tensors = [tensor for _, tensor in tensors_in((self.args, self.kwargs))]
        start = {name: item.clone() for name, item in self.model.named_buffers()}
        runner = Step(plan, (), self.captured.live)
        results = []

        def act():
            # A runner saves these states too, to start again with another variant at a branch.
            states = [generator.get_state() for generator in runner.generators if runner.has_guards]
            inputs = [self.captured.tensor_behind(item, tensors, modules) for item in runner.program.inputs]
            with torch.enable_grad():
                results.append(runner.run_forward(inputs)[0][0])
            del states

        torch.manual_seed(5)
        act()
        observed = observe(self.model, results.pop())
        reset(self.model, start)
        gc.collect()
        persistent = [*self.model.parameters(), *self.model.buffers(), *self.captured.constants.values(), *tensors]
        persistent += [block.memory for block in runner.arena.memory.free]
        torch.manual_seed(5)
        peak_bytes = measure_call(act, persistent).peak_bytes
        results.clear()
        reset(self.model, start)
        return observed, peak_bytes


def observe(model, loss):
    found = {"loss": loss.detach().clone(), "generator": torch.get_rng_state()}
    found |= {f"gradient {name}": item.grad for name, item in model.named_parameters()}
    return found | {f"buffer {name}": item.clone() for name, item in model.named_buffers()}


def reset(model, buffers):
    model.zero_grad(set_to_none=True)
    for name, item in model.named_buffers():
        item.copy_(buffers[name])


def eager_step(model, args, kwargs, targets, loss):
    torch.manual_seed(5)
    outputs = model(*args, **kwargs)
    value = outputs.loss if loss is None else loss(outputs, *targets)
    value.backward()
    return observe(model, value)


@pytest.mark.parametrize("num_budgets", NUM_BUDGETS)
@pytest.mark.parametrize("name", spread(list(CASES), str, every=4))
def test_every_budget(name, num_budgets):
    make, key = CASES[name]
    torch.manual_seed(0)
    model, args, kwargs, targets, loss = make(key)
    expected = eager_step(copy.deepcopy(model), args, kwargs, targets, loss)
    torch.manual_seed(5)  # so that branches on random numbers are captured as they will run
    planned = Planned(model, args, kwargs, targets, loss)
    points = planned.planner.curve.points
    least, most = planned.planner.smallest.peak_bytes, points[-1].peak_bytes
    slowest = math.inf
    for number in range(num_budgets):
        budget = least + (most - least) * number // (num_budgets - 1)
        plan = check_plan(planned.planner.plan_within(budget))
        observed, measured_bytes = planned.run(plan)
        assert [item for item in expected if not same_bits(expected[item], observed[item])] == [], budget
        assert measured_bytes <= budget
        # Kernels may allocate a few bytes more or less than when they were measured alone.
        assert abs(measured_bytes - plan.peak_bytes) <= 0.005 * plan.peak_bytes
        assert plan.step_us <= slowest
        assert plan.lower_bound_us <= plan.step_us
        slowest = plan.step_us
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        search_plan(replace(planned.request, terms=Terms(budget_bytes=least - ALIGNMENT)), planned.captured, ())
    assert refusal.value.minimum_bytes == least >= refusal.value.lower_bound_bytes


class Tricky(nn.Module):
    """Dropout, BatchNorm, a shared layer, tied weights, an in-place module and a custom Function."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.activation = nn.ReLU(inplace=True)
        self.last = nn.Linear(32, 32)
        self.last.weight = self.first.weight

    def forward(self, x):
        for _ in range(3):
            x = nn.functional.dropout(self.activation(self.norm(self.first(x))), 0.2)
            x = Cube.apply(x) + torch.tanh(x)
        return self.last(x)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, ct):
        return 3 * ct * ctx.saved_tensors[0] ** 2


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_bits_hold_through_all_of_it(autocast):
    torch.manual_seed(0)
    eager, x, y = Tricky(), torch.randn(64, 32), torch.randint(32, (64,))
    start = copy.deepcopy(eager.state_dict())

    def train(model, run):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(3)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = cross_entropy(run(x).float(), y)
            loss.backward()
            optimizer.step()
        return {name: item.clone() for name, item in model.state_dict().items()} | {"state": torch.get_rng_state()}

    expected = train(eager, eager)
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        least = minimum_of(lambda: ut.plan(copy.deepcopy(eager), (x,), budget=1))
        most = ut.plan(copy.deepcopy(eager), (x,), budget="1GiB").plan.peak_bytes
    for budget in (least, (least + most) // 2, most):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            planned = ut.plan(copy.deepcopy(eager), (x,), budget=budget)
        found = train(planned, planned)
        assert [name for name in expected if not same_bits(expected[name], found[name])] == []


def minimum_of(call):
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        call()
    return refusal.value.minimum_bytes


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def test_the_refusal_says_what_would_fit():
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(small(), (torch.randn(512, 64),), budget="900KiB")
    message = str(refusal.value)
    for part in ("cannot be met", "At the peak", "parameters", "What would fit: a batch of", "may help", "bfloat16"):
        assert part in message
    assert f"({refusal.value.minimum_bytes} bytes)" in message


def refused_calls():
    """Calls whose budget may not be met, with their batch and their budget in KiB."""
    for size in (100, 600, 900, 1700):
        for x in (torch.randn(512, 64), torch.randn(1, 64)):
            yield lambda x=x, size=size: ut.plan(small(), (x,), budget=size << 10), x, size
            network = small()
            words = {"loss": torch.sum, "optimizer": torch.optim.Adam(network.parameters()), "budget": size << 10}
            yield lambda x=x, network=network, words=words: ut.train_step(network, (x,), **words), x, size


def test_what_would_fit_does():
    tried = set()
    for call, x, size in refused_calls():
        try:
            call()
            continue
        except ut.InfeasibleBudget as refusal:
            ways = refusal.ways
        for way in ways:
            assert way.peak_bytes <= size << 10
            kind, words = " ".join(way.change.split()[:3]), way.change.split()
            tried.add(kind)
            network = small()
            sgd = torch.optim.SGD(network.parameters(), lr=0.1)
            if kind == "a batch of":
                assert 1 <= int(words[3]) < len(x)
                ut.plan(network, (x[: int(words[3])],), budget=size << 10)
            else:
                ut.train_step(network, (x,), loss=torch.sum, optimizer=sgd, budget=size << 10)
    assert tried == {"a batch of", "an optimizer without", "ut.train_step with an"}


def test_a_model_whose_first_dimension_is_no_batch_is_refused_without_one():
    class Fixed(nn.Linear):
        def forward(self, x):
            return super().forward(x.reshape(8, 4, 64))

    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(Fixed(64, 64), (torch.randn(32, 64),), budget="1KiB")
    assert not refusal.value.ways and "no single change that was planned" in str(refusal.value)


@pytest.mark.parametrize("text, size", [("6M", 6 << 20), ("6MB", 6 * 10**6), ("6 MiB", 6 << 20), ("1.5k", 1536)])
def test_sizes_as_people_write_them(text, size):
    assert parse_budget(text).num_bytes == size


@pytest.mark.parametrize(
    "budget", [0, -5, float("nan"), "8G B", "50%", "", "GiB", True, None.__class__, [1], 10**30, "9" * 400, "\uff19MiB"]
)
def test_budgets_that_make_no_sense(budget):
    with pytest.raises(ut.CallError, match="budget"):
        ut.plan(small(), (torch.randn(8, 64),), budget=budget)


def test_units():
    given = ["6GB", "1.5 MiB", "17", 17, 17.0]
    assert [parse_budget(size).num_bytes for size in given] == [6 * 10**9, 3 * 2**19, 17, 17, 17]


def test_a_budget_beyond_the_machine_is_a_warning():
    with pytest.warns(UserWarning, match="is more than there is"):
        ut.plan(small(), (torch.randn(8, 64),), budget="4096TiB")


def test_planning_goes_on_without_a_place_for_the_cache(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(UserWarning, match="could not be kept"):
        assert ut.plan(small(), (torch.randn(8, 64),), budget="1MiB").plan.peak_bytes <= 2**20


def test_the_same_costs_give_the_same_printed_plan():
    texts = {str(ut.plan(small(), (torch.randn(512, 64),), budget="2.5MiB", costs="model").plan) for _ in range(2)}
    assert len(texts) == 1


def test_costs_of_a_wrong_name():
    with pytest.raises(ut.CallError, match="costs"):
        ut.plan(small(), (torch.randn(8, 64),), budget="1MiB", costs="guessed")


def test_planning_leaves_the_generator_alone():
    network = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    state = torch.get_rng_state()
    ut.plan(network, (torch.ones(64, 8),), budget="1MiB")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_small_step_with_draws_runs_at_its_stated_minimum():
    network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 2))
    x = torch.randn(16, 8)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(network, (x,), loss=torch.sum, budget=64)
    assert refusal.value.lower_bound_bytes <= refusal.value.minimum_bytes
    step = ut.train_step(network, (x,), loss=torch.sum, budget=refusal.value.minimum_bytes)
    assert step.plan.peak_bytes <= refusal.value.minimum_bytes


class Drawing(nn.Module):
    """Draws by `draw` between layers, and two dropouts."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(8, 8), nn.Linear(8, 8), draw

    def forward(self, x):
        h = functional.dropout(self.first(x))
        return self.second(functional.dropout(self.draw(h)))


@pytest.mark.parametrize(
    "draw",
    [
        lambda h: h * torch.empty_like(h).normal_(),
        lambda h: h * torch.empty_like(h).uniform_(),
        lambda h: h * torch.empty_like(h).exponential_(),
        lambda h: h * h.clone().bernoulli_(0.5),
        lambda h: functional.gumbel_softmax(h),
        lambda h: functional.rrelu(h.clone(), training=True, inplace=True),
        lambda h: torch.distributions.Normal(h, h.exp()).rsample(),
        lambda h: torch.distributions.Gamma(functional.softplus(h) + 0.1, 1.0).rsample(),  # its rule is autograd's
    ],
    ids=["normal", "uniform", "exponential", "bernoulli", "gumbel", "rrelu", "Normal", "Gamma"],
)
def test_draws_of_every_kind_keep_their_bits(draw):
    torch.manual_seed(0)
    model, x = Drawing(draw), torch.randn(64, 8)

    def observe(call):
        model.zero_grad()
        torch.manual_seed(1)
        call(x).square().mean().backward()
        return [*(parameter.grad.clone() for parameter in model.parameters()), torch.get_rng_state()]

    expected = observe(model)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(model, (x,), budget=1, costs="model")
    least = refusal.value.minimum_bytes
    for budget in (least, least + least // 5, 2**26):
        found = observe(ut.plan(model, (x,), budget=budget, costs="model"))
        assert all(map(torch.equal, found, expected))


def test_a_planned_module_keeps_to_the_budget_under_measure():
    network = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(1024, 64)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(network, (x,), budget=64)
    planned = ut.plan(network, (x,), budget=refusal.value.minimum_bytes)
    assert ut.measure(planned, x).peak_bytes <= refusal.value.minimum_bytes


@pytest.mark.parametrize("num_channels", [1, 12])
def test_layouts_that_fake_tensors_get_wrong_keep_bits_and_budget(num_channels):
    """One channel lies in both layouts at once; batch normalisation makes a transposed input contiguous."""
    torch.manual_seed(0)
    if num_channels == 1:
        layers = [nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1), nn.ReLU()]
        x = torch.randn(16, 1, 16, 16).to(memory_format=torch.channels_last)
    else:
        layers = [nn.BatchNorm1d(12), nn.ReLU(), nn.MaxPool1d(2)]
        x = torch.randn(64, 80, 12).transpose(1, 2)
    network = nn.Sequential(*layers, *copy.deepcopy(layers))
    expected = eager_step(copy.deepcopy(network), (x,), {}, (), torch.sum)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(network, (x,), loss=torch.sum, budget=64)
    step = ut.train_step(copy.deepcopy(network), (x,), loss=torch.sum, budget=refusal.value.minimum_bytes)
    torch.manual_seed(5)
    observed = observe(step.model, step(x))
    assert [item for item in expected if not same_bits(expected[item], observed[item])] == []
    measured_bytes = ut.measure(step, x).peak_bytes
    assert 0.995 * step.plan.peak_bytes <= measured_bytes <= refusal.value.minimum_bytes


class Ending(nn.Module):
    """A layer, and a function of its outputs and of an argument."""

    def __init__(self, end):
        super().__init__()
        self.layer, self.end = nn.Linear(6, 64), end

    def forward(self, x, other):
        return self.end(self.layer(x), other)


def assign(y, mask):
    y = y * 1
    y[mask[:, 0]] = y[mask[:, 0]].tanh()
    return y


class Picky:
    """A kernel with workspace that refuses the numbers that costs are measured with."""

    library = torch.library.Library("undertow_tests", "DEF")
    library.define("picky(Tensor x) -> Tensor")

    @staticmethod
    def run(x):
        if x.max() < 10:
            raise RuntimeError("too small")
        return x.sin() + x.cos()


Picky.library.impl("picky", Picky.run, "CPU")
Picky.library.impl("picky", torch.empty_like, "Meta")

MASK = torch.arange(400 * 64).view(400, 64) % 10 != 0
ENDS = {
    "labels in a range": (nn.MultiLabelMarginLoss(), torch.arange(64).expand(400, 64).clone()),
    "probabilities": (lambda y, _: nn.functional.binary_cross_entropy(y.sigmoid(), MASK.float()), torch.ones(1)),
    "draws": (lambda y, _: torch.bernoulli(y.sigmoid()) * y, torch.ones(1)),
    "a mask that takes": (lambda y, mask: y[mask], MASK),
    "a mask that selects": (torch.masked_select, MASK),
    "a mask that assigns": (assign, MASK),
    "a kernel that refuses": (lambda y, other: y * torch.ops.undertow_tests.picky(other), torch.full((400, 64), 20.0)),
}


@pytest.mark.parametrize("name", ENDS)
def test_workspace_is_known_of_kernels_that_do_not_take_any_numbers(name):
    torch.manual_seed(0)
    end, other = ENDS[name]
    model, x = Ending(end), torch.randn(400, 6)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(model, (x, other), budget=1)
    planned = ut.plan(model, (x, other), budget=refusal.value.minimum_bytes)
    assert ut.measure(planned, x, other).peak_bytes <= refusal.value.minimum_bytes


def test_what_is_kept_to_run_the_forward_pass_again_is_counted():
    """The earlier value of a buffer that the forward pass reads and then writes."""

    class Drift(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("drift", torch.zeros(1024, 64))

        def forward(self, x):
            y = torch.tanh(x @ self.weight + self.drift)
            self.drift.mul_(0.9).add_(x)
            return y

    model, x = Drift(), torch.randn(1024, 64)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(model, (x,), budget=1)
    planned = ut.plan(model, (x,), budget=refusal.value.minimum_bytes)

    def step():
        y = planned(x)
        y.backward(torch.ones_like(y))

    assert planned.plan.held["earlier buffers"] == model.drift.nbytes
    persistent = [model.weight, model.drift, x]
    assert measure_call(step, persistent).peak_bytes <= refusal.value.minimum_bytes


def test_a_model_whose_gradients_are_cotangents_alone_is_planned():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.amount = nn.Parameter(torch.randn(8000))

        def forward(self, x):
            return x + self.amount

    shift, x = Shift(), torch.ones(8000)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(shift, (x,), budget=1)
    least = refusal.value.minimum_bytes
    assert least == refusal.value.lower_bound_bytes
    planned = ut.plan(shift, (x,), budget=least)
    assert ut.measure(planned, x).peak_bytes <= planned.plan.peak_bytes == least
    shift.zero_grad()
    planned(x).sum().backward()
    assert torch.equal(shift.amount.grad, torch.ones(8000))


def test_a_model_without_gradients_keeps_to_the_budget_too():
    network = nn.Linear(1000, 1000).requires_grad_(False)
    with pytest.raises(ut.InfeasibleBudget):
        ut.plan(network, (torch.randn(8, 1000),), budget=100)


def test_complex_products_keep_their_bits():
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(11, 32, dtype=torch.complex64))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.weight, n=20, dim=1)

    torch.manual_seed(0)
    network = Filter()
    x = torch.randn(64, 20, 32)
    planned = ut.plan(copy.deepcopy(network), (x,), budget=1_300_000)
    for item in (network, planned):
        item(x).square().mean().backward()
    assert same_bits(network.weight.grad, planned.weight.grad)


@pytest.mark.parametrize("time_limit_s", [-1, float("nan"), "5", None])
def test_time_limits_that_make_no_sense(time_limit_s):
    with pytest.raises(ut.CallError, match="time_limit_s"):
        ut.plan(small(), (torch.randn(8, 64),), budget="1MiB", costs="model", time_limit_s=time_limit_s)


@pytest.mark.parametrize(
    "text",
    ["{", "[1, 2]", "null", '{"a": [1]}', '{"a": [-1, 0]}', '{"a": [1, 1e999]}', '{"a": ["1", 0]}', "[" * 100_000]
    + [f'{{"a": [1{"0" * count}, 0]}}' for count in (30, 5000)],
)
def test_a_cost_cache_that_was_not_written_here_is_measured_again(text, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert load_costs(path) == {}


def test_a_cost_cache_that_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == {}


def test_costs_are_read_as_they_were_written(tmp_path, monkeypatch):
    costs = {"mm": Cost(10, 0), "addmm": Cost(7, 4096)}
    keep_costs(tmp_path / "costs.json", costs)
    monkeypatch.setattr(cost_cache, "_REMEMBERED", {})
    assert load_costs(tmp_path / "costs.json") == costs


def test_the_stated_minimum_stands_whatever_other_processes_measure(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    network, x = small(), torch.randn(512, 64)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(network, (x,), budget=1)
    path = cache_path(torch.device("cpu"))
    measured = load_costs(path)
    monkeypatch.setattr(cost_cache, "_REMEMBERED", {})  # as in another process, which measured the same operations
    others = {key: Cost(2 * cost.duration_ns, cost.workspace_bytes + 4096) for key, cost in measured.items()}
    assert keep_costs(path, others) == measured
    ut.plan(network, (x,), budget=refusal.value.minimum_bytes)


def _keep_one_by_one(path, name, start):
    start.wait()  # a process takes seconds to start, and all the writing takes less
    for index in range(50):
        keep_costs(path, {f"{name} {index}": Cost(index, 0)})


def test_processes_that_share_the_cache_lose_nothing(tmp_path):
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(3)
    arguments = [(tmp_path / "costs.json", name, start) for name in "abc"]
    processes = [context.Process(target=_keep_one_by_one, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(load_costs(tmp_path / "costs.json")) == 150


def test_no_time_is_spent_on_memory_where_there_is_room():
    torch.manual_seed(0)
    totals = report_plan(ZOO["resnet50"].build(), (torch.randn(4, 3, 64, 64),), costs="model").to_dict()["totals"]
    assert (totals["num_encoded"], totals["num_recomputed"]) == (0, 0)
