"""`train_step`: the same weights as eager's loop, at every budget, updating inside the backward pass or later."""

import copy
import itertools
from collections import namedtuple

import pytest
import torch
from exactness import same_bits
from spread_cases import spread
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.models import SMALL
from undertow.runtime.measure import Measurement

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),  # steps after the backward pass
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def groups_of(model):
    """Weight decay on weights and not on biases, as two groups."""
    weights = [item for item in model.parameters() if item.dim() > 1]
    others = [item for item in model.parameters() if item.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]


def make():
    torch.manual_seed(0)
    entry = SMALL["vgg_small"]
    return entry.build(), entry.example_inputs(4), entry.example_targets(4)


def train_eager(model, x, y, optimizer, clip_norm=None, accumulate=1, num_steps=4):
    losses = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch.manual_seed(5)
    for number in range(num_steps):
        loss = cross_entropy(model(*x), *y)
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % accumulate == 0:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return losses


def train_planned(model, x, y, optimizer, budget, num_steps=4, **settings):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # replaces the optimizer's step by a function
    step = ut.train_step(model, x, targets=y, loss=cross_entropy, optimizer=optimizer, budget=budget, **settings)
    torch.manual_seed(5)
    losses = []
    for _ in range(num_steps):
        losses.append(step(*x, *y))
        schedule.step()
    return step, losses


SETTINGS = {"plain": {}, "clipped": {"clip_norm": 0.1}, "accumulated": {"accumulate": 2}}


@pytest.mark.parametrize("case", spread([*itertools.product(OPTIMIZERS, SETTINGS)], "-".join, every=4))
def test_the_weights_are_eagers(case):
    name, settings = case[0], SETTINGS[case[1]]
    model, x, y = make()
    eager = copy.deepcopy(model)
    expected = train_eager(eager, x, y, OPTIMIZERS[name](groups_of(eager)), **settings)
    state = torch.get_rng_state()
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        twin = copy.deepcopy(model)
        train_planned(twin, x, y, OPTIMIZERS[name](groups_of(twin)), 1, **settings)
    for budget in (None, refusal.value.minimum_bytes):
        trained = copy.deepcopy(model)
        step, losses = train_planned(trained, x, y, OPTIMIZERS[name](groups_of(trained)), budget, **settings)
        assert all(map(torch.equal, losses, expected))
        assert torch.equal(torch.get_rng_state(), state)
        for key, item in eager.state_dict().items():
            assert same_bits(item, trained.state_dict()[key]), key
        assert step.training.updates_inside == (name != "rmsprop" and not settings)
        assert ("the optimizer steps after the backward pass" in str(step.plan)) == (not step.training.updates_inside)
        if budget is not None:
            assert ut.measure(step, *x, *y).peak_bytes <= budget


def test_updating_inside_takes_less():
    model, x, y = make()
    peaks = {}
    for settings in ({}, {"clip_norm": 1e9}):
        twin = copy.deepcopy(model)
        with pytest.raises(ut.InfeasibleBudget) as refusal:
            train_planned(twin, x, y, torch.optim.SGD(twin.parameters(), lr=0.1), 1, **settings)
        peaks[len(settings)] = refusal.value.minimum_bytes
    assert peaks[0] < peaks[1]


def test_prediction_is_what_the_allocator_sees():
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters())
    step, _ = train_planned(model, x, y, optimizer, "10MiB")
    assert ut.measure(step, *x, *y).peak_bytes == pytest.approx(step.plan.peak_bytes, rel=0.005)


def test_the_models_own_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ut.train_step(model, (), {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)
    assert step(input_ids=tokens, labels=tokens) > step(input_ids=tokens, labels=tokens)
    assert "transformer.h.0" in step.plan.explain("transformer.h.0")
    with pytest.raises(ut.CallError, match="no module"):
        step.plan.explain("transformer.g")


class Returning(nn.Module):
    """A network that computes its own loss."""

    def __init__(self, give):
        super().__init__()
        self.layer, self.give = nn.Linear(4, 3), give

    def forward(self, x, labels):
        logits = self.layer(x)
        return self.give(cross_entropy(logits, labels), logits)


Result = namedtuple("Result", "logits loss")


@pytest.mark.parametrize(
    ("give", "loss_of"),
    [
        (lambda loss, logits: loss, lambda out: out),
        (lambda loss, logits: (loss, logits), lambda out: out[0]),
        (lambda loss, logits: [loss, logits.detach().mean(), logits], lambda out: out[0]),
        (lambda loss, logits: Result(logits, loss), lambda out: out.loss),
        (lambda loss, logits: {"logits": logits, "loss": loss}, lambda out: out["loss"]),
    ],
    ids=["scalar", "tuple", "list", "namedtuple", "dict"],
)
def test_a_models_own_loss_is_trained_on(give, loss_of):
    torch.manual_seed(0)
    eager = Returning(give)
    x, labels = torch.randn(8, 4), torch.randint(3, (8,))
    model = copy.deepcopy(eager)
    step = ut.train_step(model, (x, labels), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(3):
        loss = loss_of(eager(x, labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(x, labels), loss)
    assert all(map(torch.equal, eager.parameters(), model.parameters()))


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda loss, logits: (loss, logits.square().mean()), r"a tuple with tensors of shapes \[\], \[\]"),
        (lambda loss, logits: (logits, loss), r"a tuple with tensors of shapes \[8, 3\], \[\]"),
        (lambda loss, logits: loss.detach(), r"a tensor of shape \[\].*depends on a parameter"),
        (lambda loss, logits: {"total": loss}, r"a dict with tensors of shapes \[\]"),
        (lambda loss, logits: None, "a NoneType, and no loss"),
    ],
    ids=["two losses", "not first", "detached", "another name", "nothing"],
)
def test_what_is_not_surely_the_loss_is_refused(give, message):
    with pytest.raises(ut.CallError, match=message):
        ut.train_step(Returning(give), (torch.randn(8, 4), torch.randint(3, (8,))))


def test_wrong_calls():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 4), torch.randint(3, (2,))
    with pytest.raises(ut.CallError, match="targets must be a tuple"):
        ut.train_step(model, (x,), targets=y, loss=cross_entropy, optimizer=optimizer)
    with pytest.raises(ut.CallError, match=r"returns a tensor of shape \[2, 3\], and no loss of its own"):
        ut.train_step(model, (x,), optimizer=optimizer)
    with pytest.raises(ut.CallError, match="scalar"):
        ut.train_step(model, (x,), loss=lambda out: out * 2, optimizer=optimizer)
    with pytest.raises(ut.CallError, match="accumulate"):
        ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer, accumulate=0)
    with pytest.raises(ut.CallError, match="clip_norm"):
        ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer, clip_norm=-1)
    with pytest.raises(ut.CallError, match="clip_norm"):
        ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer, clip_norm="1")
    with pytest.raises(ut.CallError, match="loss must be a function"):
        ut.train_step(model, (x,), targets=(y,), loss="cross_entropy", optimizer=optimizer)
    with pytest.raises(ut.CallError, match="targets must be a tuple"):
        ut.tradeoff(model, (x,), targets=y, loss=cross_entropy)
    with pytest.raises(ut.CallError, match="make_batch must be a function"):
        ut.largest_batch(model, 5, budget="1MiB", loss=cross_entropy)
    with pytest.raises(ut.CallError, match=r"make_batch must return \(args, targets\).*Tensor"):
        ut.largest_batch(model, lambda count: torch.randn(count, 4), budget="1MiB", loss=cross_entropy)


@pytest.mark.parametrize(
    ("make_optimizer", "reason"), [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "dense: SparseAdam")]
)
def test_optimizers_that_cannot_step(make_optimizer, reason):
    model = nn.Linear(4, 3)
    with pytest.raises(ut.CallError, match=reason):
        ut.train_step(model, (torch.randn(2, 4),), loss=torch.sum, optimizer=make_optimizer(model.parameters()))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_capturable_optimizers_are_for_gpus(kind):
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    optimizer = kind(model.parameters(), capturable=True)
    with pytest.raises(ut.CallError, match="capturable=True.* leave capturable out"):
        ut.train_step(model, (x,), loss=torch.sum, optimizer=optimizer)
    with pytest.raises(ut.CallError, match="capturable=True.* leave capturable out"):
        ut.plan(model, (x,), optimizer=optimizer)


def test_the_refusal_of_a_step_without_an_optimizer_asks_for_one():
    wanted = r"with an optimizer \(SGD, Adam, AdamW; SGD has no state\) and neither clip_norm"
    with pytest.raises(ut.InfeasibleBudget, match=wanted):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])  # 65 KiB of parameters, as much of gradients
        ut.train_step(model, (torch.randn(2, 64),), loss=torch.sum, budget=100_000, costs="model")


def test_a_refused_call_leaves_the_plan_as_it_was():
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    step = ut.train_step(model, (x,), loss=torch.sum, budget="64KiB", costs="model")
    before = step.plan
    with pytest.raises(ut.InfeasibleBudget):
        step(torch.randn(8192, 16))
    assert step.plan is before
    step(x)
    assert step.plan is before


def test_the_curve_and_the_largest_batch():
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))

    def make_batch(count):
        return (torch.randn(count, 64),), (torch.randint(8, (count,)),)

    args, targets = make_batch(512)
    curve = ut.tradeoff(model, args, targets=targets, loss=cross_entropy)
    peaks, times = [point.peak_bytes for point in curve.points], [point.step_us for point in curve.points]
    assert peaks == sorted(peaks) and times == sorted(times, reverse=True)
    assert curve.lower_bound_bytes <= curve.minimum_bytes == peaks[0]
    found = ut.largest_batch(model, make_batch, budget="2MiB", loss=cross_entropy)
    assert found.measured.peak_bytes <= 2**21
    # The least memory found may not grow with each example, but it grows over a few.
    args, targets = make_batch(found.batch + found.batch // 4)
    with pytest.raises(ut.InfeasibleBudget):
        ut.train_step(model, args, targets=targets, loss=cross_entropy, budget="2MiB")


class Clamped(nn.Module):
    """Writes one of its parameters in the forward pass, and reads an embedding that renormalises its rows."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20, 8, max_norm=0.5)
        self.output = nn.Linear(8, 5)

    def forward(self, x):
        with torch.no_grad():
            self.output.weight.clamp_(-0.1, 0.1)
        return self.output(self.rows(x).mean(1))


@pytest.mark.parametrize("settings", [{}, {"budget": "1MiB"}, {"clip_norm": 1.0}])
def test_a_parameter_that_the_forward_pass_writes_is_updated_from_there(settings):
    torch.manual_seed(0)
    eager, x, y = Clamped(), torch.randint(20, (6, 3)), torch.randint(5, (6,))
    model = copy.deepcopy(eager)
    train_eager(eager, (x,), (y,), torch.optim.Adam(eager.parameters()), settings.get("clip_norm"))
    optimizer = torch.optim.Adam(model.parameters())
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(4):
        step(x, y)
        schedule.step()
    assert all(same_bits(a, b) for a, b in zip(eager.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, weight_decay=0.1),
        lambda p: torch.optim.ASGD(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Adam(list(p)[2:]),  # the others' gradients add up from call to call
    ],
)
@pytest.mark.parametrize("clip_norm", [None, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_every_optimizer_keeps_to_the_budget(make_optimizer, clip_norm):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    x, y = torch.randn(8, 256), torch.randn(8, 256)
    optimizer = make_optimizer(model.parameters())
    given = {"targets": (y,), "loss": nn.functional.mse_loss, "optimizer": optimizer, "clip_norm": clip_norm}
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.train_step(model, (x,), **given, budget=1)
    least = refusal.value.minimum_bytes
    assert refusal.value.lower_bound_bytes <= least
    step = ut.train_step(model, (x,), **given, budget=least)
    step(x, y)
    measured = ut.measure(step, x, y).peak_bytes
    assert measured <= least
    assert measured >= 0.99 * least


def test_hooks_and_foreign_gradients_are_not_passed_over():
    model, x, y = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ut.train_step(model, x, targets=y, loss=cross_entropy, optimizer=optimizer)
    weight = next(model.parameters())
    handle = weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ut.CallError, match="gradient hook"):
        step(*x, *y)
    handle.remove()
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ut.CallError, match="from elsewhere"):
        step(*x, *y)
    weight.grad = None
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    with pytest.raises(ut.CallError, match="step hook"):
        step(*x, *y)
    step = ut.train_step(model, x, targets=y, loss=cross_entropy, optimizer=optimizer)
    step(*x, *y)
    assert called == [1]
    assert "step hooks" in str(step.plan)


def test_what_the_optimizer_is_told_needs_an_optimizer():
    model, x, y = make()
    with pytest.raises(ut.CallError, match="give optimizer="):
        ut.train_step(model, x, targets=y, loss=cross_entropy, clip_norm=1.0)


def test_a_part_of_a_data_set_is_measured_as_it_is_planned():
    data, model = torch.randn(4096, 64), nn.Linear(64, 8)
    step = ut.train_step(model, (data[:32],), loss=torch.sum, costs="model")
    assert ut.measure(step, data[:32]).peak_bytes == ut.measure(step, data[:32].clone()).peak_bytes < data.nbytes // 8


def test_the_largest_part_of_a_data_set_with_batch_normalisation():
    data, model = torch.randn(4096, 64), nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
    asked = []

    def make_batch(count):
        asked.append(count)
        return (data[:count],), ()

    found = ut.largest_batch(model, make_batch, budget="96KiB", loss=torch.sum, costs="model")
    assert found.measured.peak_bytes <= 96 * 2**10 and found.batch > 100
    assert len(asked) < 24 and 1 not in asked
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ut.InfeasibleBudget):  # of two examples: one cannot be normalised
        ut.largest_batch(model, make_batch, budget="1KiB", loss=torch.sum, costs="model")


def test_more_than_was_predicted_is_halved_away(monkeypatch):
    measured = []

    def measure(step, x):
        measured.append(len(x))
        return Measurement(len(x) * 500, 0.0)

    monkeypatch.setattr("undertow.api.tradeoffs.measure", measure)
    model = nn.Linear(64, 8)
    found = ut.largest_batch(model, lambda n: ((torch.randn(n, 64),), ()), budget=16_000, loss=torch.sum, costs="model")
    assert found.batch == 32 and len(measured) < 9


def test_planning_leaves_a_running_profiler_alone():
    model, x = nn.Linear(53, 7), torch.randn(3, 53)
    with torch.profiler.profile(profile_memory=True) as profiler:
        with pytest.raises(ut.CallError, match="is already running"):
            ut.train_step(model, (x,), loss=torch.sum, budget="1MiB")
        torch.randn(100)
    assert any(event.name == "aten::randn" for event in profiler.events())


class Sums(nn.Module):
    """Parameters whose gradients are one tensor, views of it, an expanded number, or are read again later."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 6))
        self.flat, self.inner = nn.Parameter(torch.randn(18)), nn.Parameter(torch.randn(6, 3))

    def forward(self, x):
        return self.first + self.second.t() + self.flat.view(6, 3) + torch.tanh(x * self.inner)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}])
@pytest.mark.parametrize("loss", [torch.sum, lambda output: (output**2).sum()])
def test_gradients_in_one_memory_are_given_apart(loss, settings):
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(6, 3)
    eager, planned = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.1, momentum=0.9) for item in (eager, planned)]
    step = ut.train_step(planned, (x,), loss=loss, optimizer=optimizers[1], budget="1MiB", costs="model", **settings)
    for number in range(1, 5):
        loss(eager(x)).backward()
        if "clip_norm" in settings:
            nn.utils.clip_grad_norm_(eager.parameters(), settings["clip_norm"])
        if number % settings.get("accumulate", 1) == 0:
            optimizers[0].step()
            optimizers[0].zero_grad()
        step(x)
    assert all(map(same_bits, planned.parameters(), eager.parameters()))


def test_gradients_lie_as_their_parameters():
    model, x = Sums(), torch.randn(6, 3)
    ut.train_step(model, (x,), loss=torch.sum, costs="model")(x)
    assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    assert len({parameter.grad.data_ptr() for parameter in model.parameters()}) == 4


def replace_parameter(model, optimizer):
    old, new = model[0].weight, nn.Parameter(2 * model[0].weight.detach())
    model[0].weight = new
    for group in optimizer.param_groups:
        group["params"] = [new if item is old else item for item in group["params"]]


def tie(model, optimizer):
    model[2].weight = model[0].weight


def add_group(model, optimizer):
    optimizer.add_param_group({"params": list(model[0].parameters())})


def leave_out(model, optimizer):
    optimizer.param_groups[0]["params"] = list(model[2].parameters())


@pytest.mark.parametrize("change", [replace_parameter, tie, add_group, leave_out])
def test_other_parameters_in_model_or_optimizer(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    twin, x, y = copy.deepcopy(model), torch.randn(16, 8), torch.randn(16, 8)
    first = 2 if change is add_group else 0
    optimizers = [torch.optim.SGD(item[first:].parameters(), lr=0.1) for item in (model, twin)]
    step = ut.train_step(model, (x,), targets=(y,), loss=nn.functional.mse_loss, optimizer=optimizers[0])

    def train():
        step(x, y)
        model.zero_grad()
        twin.zero_grad()
        nn.functional.mse_loss(twin(x), y).backward()
        optimizers[1].step()

    train()
    change(model, optimizers[0])
    change(twin, optimizers[1])
    before = [item.detach().clone() for item in model.parameters()]
    for _ in range(3):
        train()
    assert all(map(same_bits, model.parameters(), twin.parameters()))
    assert not all(map(torch.equal, model.parameters(), before))
