"""`ut.measure`: what it runs, what it counts, and that nobody notices it."""

import gc
import logging
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.api.reports import report_plan
from undertow.costs.usage import unwatched, watch_memory
from undertow.free_memory import FreeMemory
from undertow.runtime.measure import measure_call


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_planning_and_measuring_write_nothing(capfd):
    model, x = nn.Linear(59, 11), torch.randn(5, 59)
    step = ut.train_step(model, (x,), loss=torch.sum, budget="1MiB")  # which measures costs
    ut.measure(step, x)
    assert capfd.readouterr() == ("", "")


def test_an_operation_that_fails_without_data_and_works_prints_no_traceback():
    class Experts(nn.Module):
        def forward(self, x, weights, ends):
            return torch._grouped_mm(x, weights, ends)  # its meta kernel knows bfloat16 only

    arguments = torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 16), torch.tensor([3, 8], dtype=torch.int32)
    try:
        expected = Experts()(*arguments)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch does not run it on float32: {error}")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    try:
        assert torch.equal(ut.plan(Experts(), arguments)(*arguments), expected)
    finally:
        log.removeHandler(handler)
    assert records == []


def test_a_peak_is_what_was_held_at_once():
    def call():
        first = torch.empty(1000)
        del first
        second, third = torch.empty(300), torch.empty(500, 300)
        del second
        third.sum()

    assert measure_call(call, []).peak_bytes == 4 * (300 + 500 * 300)


def test_garbage_of_before_is_not_given_back_by_the_call():
    class Cycle:
        def __init__(self):
            self.itself, self.tensor = self, torch.empty(1_000_000)

    def call():
        gc.collect()
        torch.empty(1000)

    measure_call(Cycle, [])  # PyTorch reports only what is freed of blocks that a profiler saw allocated
    assert measure_call(call, []).peak_bytes == 4000


def test_a_watch_counts_what_is_left_of_an_inner_one_and_not_its_peak():
    before = torch.empty(10)
    with watch_memory() as outer:
        before = torch.empty(100)
        with unwatched():
            torch.empty(100_000)
            kept = torch.empty(1000)
            with watch_memory() as inner:
                torch.empty(7)
        after = torch.empty(100)
        del before
    assert (inner.held_bytes, inner.peak_bytes) == (0, 28)
    assert outer.peak_bytes == kept.nbytes + 2 * after.nbytes
    assert outer.held_bytes == kept.nbytes + after.nbytes


def test_the_time_of_a_module_is_a_median_without_the_first_call(monkeypatch):
    seconds = iter([100.0, 1.0, 1.5, 2.0, 3.0])  # the last under the profiler
    clock = {"now": 0.0}

    class Slow(nn.Linear):
        def forward(self, x):
            clock["now"] += next(seconds)
            return super().forward(x)

    monkeypatch.setattr("undertow.api.measuring.time.perf_counter", lambda: clock["now"])
    assert ut.measure(Slow(3, 3), torch.randn(2, 3)).step_s == 1.5


def test_nothing_is_measured_inside_a_profile_of_the_user():
    with torch.profiler.profile(), pytest.raises(ut.CallError, match="is already running"):
        ut.measure(nn.Linear(3, 3), torch.randn(2, 3))


def test_a_profile_of_the_user_inside_a_measured_step_says_so():
    def call():
        with torch.profiler.profile():
            torch.randn(100, 100)

    with pytest.raises(RuntimeError, match="already enabled"):
        measure_call(call, [])
    assert measure_call(lambda: torch.randn(10), []).peak_bytes == 40


@pytest.mark.parametrize("kind", ["plan", "train_step"])
def test_a_step_that_is_planned_at_every_call_is_measured(kind):
    """BatchNorm with momentum=None reads how many batches it has seen: another number at each call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64, momentum=None), nn.ReLU(), nn.Linear(64, 4))
    x = torch.randn(256, 8)
    if kind == "plan":
        step = ut.plan(model, (x,), budget="1MiB")
    else:
        step = ut.train_step(model, (x,), loss=torch.sum, budget="1MiB")
    for _ in range(2):
        measured = ut.measure(step, x).peak_bytes
        assert 0.9 * step.plan.peak_bytes <= measured <= step.plan.peak_bytes


def test_a_module_that_is_planned_inside_the_backward_pass_is_refused_in_one_line():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8, momentum=None)

        def forward(self, x):
            return self.norm(x), self.norm.weight * x

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = ut.plan(Two(), (torch.randn(32, 8),), budget="1MiB")

        def forward(self, x):
            return self.two(x)[0]

    with pytest.raises(ut.UndertowError, match="measure that module alone"):
        ut.measure(First(), torch.randn(32, 8))
    assert measure_call(lambda: torch.randn(10), []).peak_bytes == 40


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


RETURNS = {
    "dict": lambda loss, logits: {"logits": logits, "loss": loss},
    "dataclass": lambda loss, logits: Output(logits, loss),
    "tuple": lambda loss, logits: (loss, logits),
    "a tuple with an accuracy": lambda loss, logits: (loss, logits[0, 0].detach(), [logits]),
}


class Classifier(nn.Module):
    """Returns its loss and its logits, whose cotangent would take as much memory as they do."""

    def __init__(self, give):
        super().__init__()
        self.layers, self.give = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 999)), give

    def forward(self, x, labels):
        logits = self.layers(x)
        return self.give(cross_entropy(logits, labels), logits)


@pytest.mark.parametrize("give", RETURNS.values(), ids=RETURNS)
def test_a_model_is_differentiated_from_its_own_loss(give):
    model, x, labels = Classifier(give), torch.randn(64, 16), torch.randint(999, (64,))
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(model, (x, labels), budget=1)
    least = refusal.value.minimum_bytes
    planned = ut.plan(model, (x, labels), budget=least)
    assert ut.measure(planned, x, labels).peak_bytes <= least
    assert len(planned.plan.program.cotangents) == 1
    alone = Classifier(lambda loss, logits: loss)
    assert ut.measure(model, x, labels).peak_bytes == ut.measure(alone, x, labels).peak_bytes


def test_two_losses_are_differentiated_together():
    model = Classifier(lambda loss, logits: (loss, logits.square().mean()))
    x, labels = torch.randn(64, 16), torch.randint(999, (64,))
    planned = ut.plan(model, (x, labels), budget="8MiB")
    ut.measure(planned, x, labels)
    assert len(planned.plan.program.cotangents) == 2


def test_measuring_follows_the_outputs_that_were_differentiated_before():
    model = Classifier(lambda loss, logits: {"loss": loss, "logits": logits})
    x, labels = torch.randn(64, 16), torch.randint(999, (64,))
    planned = ut.plan(model, (x, labels), budget="8MiB")
    planned(x, labels)["logits"].sum().backward()
    planned.zero_grad()
    ut.measure(planned, x, labels)
    (cotangent,) = planned.plan.program.cotangents
    assert cotangent.value.tensor_type.shape == (64, 999)


def test_a_loss_that_is_kept_as_an_attribute_is_differentiated_too():
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            y = self.layer(x)
            self.extra_loss = y.square().mean()
            return y

    x = torch.randn(1024, 64)
    with pytest.raises(ut.InfeasibleBudget) as refusal:
        ut.plan(Expert(), (x,), budget=1)
    planned = ut.plan(Expert(), (x,), budget=refusal.value.minimum_bytes)
    assert ut.measure(planned, x).peak_bytes <= refusal.value.minimum_bytes
    assert len(planned.plan.program.cotangents) == 2


def test_an_output_that_a_hook_replaced_is_differentiated():
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    planned = ut.plan(model, (x,), budget="1MiB")
    planned.register_forward_hook(lambda module, args, output: 2 * output)
    reached = []
    model.weight.register_hook(lambda gradient: reached.append(gradient))
    ut.measure(planned, x)
    assert len(reached) > 2  # once for each run


class Ignoring(nn.Module):
    """Does not read `mask`, reads only the shape of `scores`, and its loss does not depend on `ids`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x, mask, scores=None, ids=None):
        ids.sum()
        return self.layer(x).tanh().sum() * scores.shape[0]


def test_arguments_that_are_not_read_are_counted_everywhere():
    model, x = Ignoring(), torch.randn(64, 16)
    others = {"scores": torch.randn(100, 30), "ids": torch.arange(4000)}
    mask = torch.ones(64, 64, dtype=torch.bool)
    unread_bytes = mask.nbytes + others["scores"].nbytes + others["ids"].nbytes
    planned = ut.plan(model, (x, mask), others)
    assert planned.plan.held["batch"] == x.nbytes + unread_bytes
    assert "%mask : argument, not read" in str(planned.plan)
    inspected = ut.inspect(model, (x, mask), others)
    assert inspected.training.batch_bytes == inspected.inference.batch_bytes == x.nbytes + unread_bytes
    for make in (ut.plan, ut.train_step):
        with pytest.raises(ut.InfeasibleBudget) as refusal:
            make(model, (x, mask), others, budget=1)
        least = refusal.value.minimum_bytes
        step = make(model, (x, mask), others, budget=least)
        assert 0.99 * least <= ut.measure(step, x, mask, **others).peak_bytes <= least


def test_two_arguments_in_one_memory_count_as_they_are_planned():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x, y):
            return self.layer(x).sum() + y.sum()

    x = torch.randn(64, 16)
    step = ut.train_step(Sum(), (x, x[:1]), budget="1MiB")
    assert step.plan.held["batch"] == x.nbytes + x[:1].nbytes
    assert ut.measure(step, x, x[:1]).peak_bytes == step.plan.peak_bytes


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent, self.output = nn.LSTM(32, 48, num_layers=2), nn.Linear(48, 8)

    def forward(self, x):
        return self.output(self.recurrent(x)[0][-1])


# With a workspace of kernels at the peak: by convolutions, by a recurrent layer, by an optimizer that steps afterwards.
WITH_WORKSPACE = {
    "convolutions": (
        nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 5), nn.Flatten()),
        (8, 3, 40, 40),
        {},
    ),
    "a recurrent layer": (Sequence(), (20, 16, 32), {}),
    "clipping": (nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)), (16, 64), {"clip_norm": 1.0}),
}


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x).square().mean()


@pytest.mark.parametrize("name", WITH_WORKSPACE)
def test_the_peak_is_predicted_without_a_budget_too(name):
    """Never below what is measured, and above it by no more than what an optimizer's step and buffers leave open."""
    model, sizes, options = WITH_WORKSPACE[name]
    x = torch.randn(sizes)
    optimizer = torch.optim.Adam(model.parameters())
    step = ut.train_step(WithLoss(model), (x,), optimizer=optimizer, **options)
    for planned in (step, ut.plan(WithLoss(model), (x,))):
        assert max(planned.plan.tables.workspace_bytes) > 0
        assert "not counted" not in str(planned.plan)
        assert 0.995 * planned.plan.peak_bytes <= ut.measure(planned, x).peak_bytes <= planned.plan.peak_bytes


def test_the_report_without_a_budget_is_of_the_step_that_runs():
    model = nn.Sequential(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(20, 50, 5), nn.Flatten())
    x = torch.randn(32, 1, 28, 28)
    report = report_plan(model, (x,))
    assert 0 <= report.plan.peak_bytes - report.measured.peak_bytes <= model(x).nbytes
    assert report.plan.peak_bytes == ut.plan(model, (x,)).plan.peak_bytes
    assert 0 < report.plan.lower_bound_us <= report.plan.step_us


def test_nothing_is_run_to_predict_a_peak_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("undertow.pipeline.find_free_memory", lambda device: FreeMemory(1 << 10, 1 << 30, "here"))
    monkeypatch.setattr("undertow.pipeline.find_workspaces", None)
    plan = ut.plan(nn.Conv2d(3, 8, 3), (torch.randn(2, 3, 16, 16),)).plan
    assert "(kernels' workspace not counted)" in str(plan)
