"""The arena: values lie at the offsets that the plan gives them, and nothing outside the step changes."""

import copy
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from exactness import same_bits
from families import FAMILIES
from spread_cases import spread
from torch import nn
from torch.nn.functional import cross_entropy

import undertow as ut
from undertow.ir import Plan
from undertow.models import SMALL
from undertow.runtime.arena import Arena, ArenaMemory, Block


@pytest.fixture
def small_values_in_the_arena(monkeypatch):
    """The steps of these tests are small: without this their values would be left to the allocator."""
    monkeypatch.setattr("undertow.memory.destinations.FEWEST_BYTES", 1)


def share_in_arena(plan: Plan) -> float:
    """The share of the bytes that the step makes."""
    tables = plan.tables
    inputs = {tables.storage[item.value] for item in plan.program.inputs}
    made = [index for index in range(len(tables.storage_bytes)) if index not in inputs]
    placed = [index for index in made if tables.offsets[index] is not None]
    return sum(tables.storage_bytes[index] for index in placed) / sum(tables.storage_bytes[index] for index in made)


def train(model, kwargs, targets, loss, args, make_step):
    """Three steps with Adam: losses, parameters, buffers, generator state."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step = make_step(model, optimizer)
    torch.manual_seed(5)
    losses = [step(*args, *targets, **kwargs).detach().clone() for _ in range(3)]
    return [*losses, *model.parameters(), *model.buffers(), torch.get_rng_state()], step


def compare(model, args, kwargs, targets, loss):
    twin = copy.deepcopy(model)

    def eager(model, optimizer):
        def step(*values, **kwargs):
            optimizer.zero_grad()
            outputs = model(*values[: len(args)], **kwargs)
            found = outputs.loss if loss is None else loss(outputs, *values[len(args) :])
            found.backward()
            optimizer.step()
            return found

        return step

    def planned(model, optimizer):
        return ut.train_step(model, args, kwargs, targets=targets, loss=loss, optimizer=optimizer)

    expected, _ = train(model, kwargs, targets, loss, args, eager)
    found, step = train(twin, kwargs, targets, loss, args, planned)
    assert all(map(same_bits, expected, found))
    return step


@pytest.mark.parametrize("name", SMALL)
def test_zoo_trains_as_eager_does(name, small_values_in_the_arena):
    zoo = SMALL[name]
    step = compare(zoo.build(), zoo.example_inputs(3), {}, zoo.example_targets(3), zoo.loss)
    assert share_in_arena(step.plan) > (0 if name == "lstm" else 0.1)


@pytest.mark.parametrize("name", spread(list(FAMILIES), str, every=3))
def test_families_train_as_eager_does(name, small_values_in_the_arena):
    build, kwargs = FAMILIES[name]
    step = compare(build().train(), (), kwargs, (), None)
    assert share_in_arena(step.plan) > (0 if name == "resnet" else 0.4)


def make_mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.randn(128, 256), torch.randint(10, (128,))


def test_nothing_large_is_allocated():
    model, x, y = make_mlp()
    step = ut.train_step(
        model, (x,), targets=(y,), loss=cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    for _ in range(2):
        step(x, y)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(x, y)
    sizes = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert max(sizes) < 1 << 16
    assert step.plan.tables.arena_bytes > 4 << 20


def test_the_arena_is_held_and_given_back():
    model, x, y = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer)
    step(x, y)
    held = [tensor.nbytes for tensor in step.persistent_tensors()]
    assert step.plan.tables.arena_bytes in held
    assert ut.measure(step, x, y).peak_bytes == step.plan.peak_bytes
    step(x[:64], y[:64])  # another shape has an arena of its own, and the first is freed
    assert [tensor.nbytes for tensor in step.runner.persistent_tensors()] == [step.plan.tables.arena_bytes]
    assert step.plan.tables.arena_bytes not in held
    step.release()
    assert not step.runner.persistent_tensors()
    step(x, y)


def test_outputs_and_gradients_are_the_users_own(small_values_in_the_arena):
    model, x, y = make_mlp()
    evaluated = ut.plan(model.eval(), (x,))
    with torch.no_grad():
        first = evaluated(x)
        before = first.clone()
        assert evaluated.plan.tables.arena_bytes
        evaluated(x + 1)
    assert torch.equal(first, before)

    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy)
    step(x, y)
    gradients = [item.grad for item in model.parameters()]
    copies = [item.clone() for item in gradients]
    model.zero_grad(set_to_none=True)
    step(x + 1, y)
    assert all(map(torch.equal, gradients, copies))
    assert step.plan.tables.arena_bytes


KEPT = []


class Keeping(torch.autograd.Function):
    """Keeps a reference to its argument, which is allowed."""

    @staticmethod
    def forward(ctx, x):
        KEPT.append(x)
        return 2 * x

    @staticmethod
    def backward(ctx, ct):
        KEPT.append(ct)
        return 2 * ct


def test_what_a_custom_function_keeps_stays(small_values_in_the_arena):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.last(Keeping.apply(self.first(x).tanh()).tanh())

    torch.manual_seed(0)
    model, x, y = Model(), torch.randn(16, 32), torch.randint(10, (16,))
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy)
    assert step.plan.tables.arena_bytes
    KEPT.clear()
    step(x, y)
    kept = [item.detach() for item in KEPT]
    before = [item.clone() for item in kept]
    model.zero_grad(set_to_none=True)
    step(-x, y)
    assert len(kept) == 2 and all(map(torch.equal, kept, before))


def test_threads_do_not_share_it(small_values_in_the_arena):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8)).eval()
    inputs = [torch.randn(32, 64) for _ in range(4)]
    with torch.no_grad():
        planned = ut.plan(model, (inputs[0],))
        expected = [model(x) for x in inputs]
        planned(inputs[0])
        wrong = []

        def work(x, y):
            with torch.no_grad():
                wrong.extend(number for number in range(50) if not torch.equal(planned(x), y))

        threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(planned.undertow_runner.persistent_tensors()) == 1


def test_a_second_run_meanwhile_gets_its_own():
    model, x, y = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer)
    arena = Arena(step.plan, ArenaMemory())
    first, second = arena.take(), arena.take()
    assert first.memory.data_ptr() != second.memory.data_ptr()
    for block in (first, second):
        arena.memory.give_back(block)
    assert arena.memory.free == [second]
    places = [tensor.data_ptr() - second.memory.data_ptr() for tensor in second.tensors[arena]]
    assert places == [step.plan.tables.offsets[step.plan.tables.storage[value]] for value in arena.values]
    sizes = [tensor.untyped_storage().nbytes() for tensor in second.tensors[arena]]
    assert sizes == [value.type.num_bytes for value in arena.values]


def test_made_in_inference_mode_used_outside(small_values_in_the_arena):
    model, x, _ = make_mlp()
    planned = ut.plan(model.eval(), (x,))
    with torch.inference_mode():
        planned(x)
    with torch.no_grad():
        assert torch.equal(planned(x), model(x))


COUNT_FAULTS = """
import resource, sys, torch, undertow as ut
from torch import nn
from torch.nn.functional import cross_entropy
torch.manual_seed(0)
model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.GELU())), nn.Linear(1024, 10))
x, y = torch.randn(2048, 1024), torch.randint(10, (2048,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def eager(x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
step = eager
if sys.argv[1] == "planned":
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x, y)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(sorted(faults() for _ in range(3))[1])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page faults are counted as Linux does")
@pytest.mark.parametrize("malloc", ["on", pytest.param("off", marks=pytest.mark.exhaustive)])
def test_hardly_a_page_fault(malloc, monkeypatch):
    """Under 1 % of eager's, even if the allocator returns freed memory to the system: the arena is not freed."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UNDERTOW_MALLOC", malloc)
    counts = {}
    for which in ("eager", "planned"):
        command = [sys.executable, "-c", COUNT_FAULTS, which]
        counts[which] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert counts["eager"] > 1_000
    assert counts["planned"] < counts["eager"] / 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_batch_norm_in_a_region_of_low_precision(dtype, small_values_in_the_arena):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                return (self.norm(self.convolution(x)).relu() + x).float().flatten(1)

    torch.manual_seed(0)
    compare(Block(), (torch.randn(2, 4, 8, 8),), {}, (torch.randint(256, (2,)),), cross_entropy)


def test_a_model_converted_to_another_layout(small_values_in_the_arena):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    twin, x, y = copy.deepcopy(model), torch.randn(4, 3, 12, 12), torch.randint(10, (4,))
    optimizer, other = (torch.optim.SGD(item.parameters(), lr=0.1) for item in (model, twin))
    step = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer)
    for number in range(4):
        if number == 2:
            for item in (model, twin):
                item.to(memory_format=torch.channels_last)
        other.zero_grad()
        expected = cross_entropy(twin(x), y)
        expected.backward()
        other.step()
        assert same_bits(step(x, y), expected)
    assert all(map(same_bits, model.parameters(), twin.parameters()))


def test_arenas_that_take_turns_share_their_memory():
    """An arena takes memory that is a little too large, and not more than its budget leaves."""
    model, x, y = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = ut.train_step(model, (x,), targets=(y,), loss=cross_entropy, optimizer=optimizer).plan
    arena = Arena(plan, ArenaMemory())
    for spare_bytes, is_shared in ((0, True), (arena.num_bytes // 32, True), (arena.num_bytes // 16, False)):
        memory = Block(torch.empty(arena.num_bytes + spare_bytes, dtype=torch.uint8))
        arena.memory.give_back(memory)
        assert (arena.take() is memory) == is_shared
    within = Arena(replace(plan, budget_bytes=plan.peak_bytes + 64), ArenaMemory())
    for spare_bytes, is_shared in ((64, True), (128, False)):
        memory = Block(torch.empty(within.num_bytes + spare_bytes, dtype=torch.uint8))
        within.memory.give_back(memory)
        assert (within.take() is memory) == is_shared
