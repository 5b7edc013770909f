"""Parameters that are divided over ranks and gathered when they are read: bits, memory, and what a user sees of it."""

import copy
import hashlib
import os
import signal

import pytest
import torch
from rank_processes import divide_into_buckets_of, run_ranks, start_ranks
from sharded_loop import train_plainly
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api import shared_plans
from undertow.ops.divided_parameters import DividedParameter
from undertow.ops.gathering import START_GATHER

WIDTH = 192  # a weight has 144 KiB: more than what always stays whole
NUM_LAYERS, NUM_DEEP = 8, 20


class Deep(nn.Module):
    """Layers of which one weight is used in two places and one is frozen, dropout, batch normalisation."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        self.layers[3].weight = self.layers[1].weight
        self.layers[5].requires_grad_(False)
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.1)
        self.convolution = nn.Conv2d(64, 96, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = h + layer(h).tanh()
        h = self.dropout(self.norm(h))
        return h[:, :96] + self.convolution(h.view(len(h), 64, 1, 3)).mean((2, 3))


def digest_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def make_batches(num=4, num_examples=12):
    draw = torch.Generator().manual_seed(1)
    sizes = [num_examples] * (num - 1) + [num_examples - 1]
    return [
        ((torch.randn(size, WIDTH, generator=draw),), (torch.randint(96, (size,), generator=draw),)) for size in sizes
    ]


def make_step(mesh, model, optimizer, budget, num_shards, **options):
    divide_into_buckets_of(1 << 17)  # a weight or two in each
    (args, targets), *_ = make_batches()
    own = {} if mesh is None else {"shard_state": True, "budget": budget, "costs": "model"}
    settings = {"loss": functional.cross_entropy, "shards": num_shards, "parallel": mesh, **own, **options}
    return ut.train_step(model, args, targets=targets, optimizer=optimizer, **settings)


def divide_all(own, attempt):
    """A choice without a comparison: a budget with room for everything would divide nothing."""
    assert attempt(()).fits
    return sorted(own.pieces)


OPTIMIZERS = {
    "adamw": lambda items: torch.optim.AdamW(items, lr=0.003, amsgrad=True),
    "sgd": lambda items: torch.optim.SGD(items, lr=0.01, momentum=0.9),
}
CASES = {
    "plain": ("adamw", {}),
    "clipped": ("sgd", {"clip_norm": 0.2, "accumulate": 2}),
    "late": ("sgd", {"late_parameters": True, "numerics": "fast"}),
}


def train(mesh, num_shards, names):
    """Hashes of what training comes to, with all that can be divided."""
    shared_plans.choose_divided = divide_all
    found = {}
    for name in names:
        torch.manual_seed(0)
        model, (kind, options) = Deep(), CASES[name]
        optimizer = OPTIMIZERS[kind]([item for item in model.parameters() if item.requires_grad])
        if mesh is None:
            options = {key: item for key, item in options.items() if key != "late_parameters"}
        step = make_step(mesh, model, optimizer, "1GiB", num_shards, **options)
        losses = [float(step(*args, *targets)) for args, targets in make_batches()]
        if mesh is not None:
            divided = [isinstance(item, DividedParameter) for item in model.parameters()]
            assert sum(divided) == NUM_LAYERS - 2 + 1  # a weight twice, one frozen, the convolution's
        step.settle()
        state = step.optimizer_state()["state"]
        tensors = [entry[key] for _, entry in sorted(state.items()) for key in sorted(entry)]
        found[name] = losses, digest_of([*model.parameters(), *model.buffers(), *tensors])
    return found


@pytest.mark.parametrize(
    ("size", "num_shards", "names"),
    [
        (3, 4, ("plain", "clipped")),  # one rank has two shards, and gathers twice as often as the others
        pytest.param(2, 2, ("late",), marks=pytest.mark.exhaustive),
        pytest.param(4, 6, tuple(CASES), marks=pytest.mark.exhaustive),
        pytest.param(8, 8, tuple(CASES), marks=pytest.mark.exhaustive),
    ],
)
def test_bits_of_one_process(size, num_shards, names):
    torch.set_num_threads(1)
    expected = train(None, num_shards, names)
    assert run_ranks(train, size, num_shards, names) == [expected] * size


def make_wide(num_layers=NUM_LAYERS):
    torch.manual_seed(0)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 96))


def keep_to_budget(mesh, budget):
    model = make_wide(NUM_DEEP)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(mesh, model, optimizer, budget, 2, costs="measured")
    first, *others = make_batches()
    losses = [float(step(*first[0], *first[1]))]
    peaks = ut.measure(step, *first[0], *first[1]).peak_bytes, step.peak_bytes
    text, nodes = str(step.plan), step.plan.nodes
    losses += [float(step(*args, *targets)) for args, targets in others]
    step.settle()
    gathers = [node.args[2] for node in nodes if node.operation is START_GATHER]
    return losses, digest_of(model.parameters()), peaks, text, (len(gathers), len(set(gathers)))


def test_the_measured_peak_is_within_a_budget_that_the_whole_parameters_would_break():
    torch.set_num_threads(1)
    model = make_wide(NUM_DEEP)
    whole_bytes = sum(item.nbytes for item in model.parameters())
    budget = int(whole_bytes * 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = train_plainly(model, functional.cross_entropy, optimizer, make_batches(), 2)
    found = run_ranks(keep_to_budget, 2, budget)
    assert all(isinstance(item, tuple) for item in found), found
    for found_losses, digest, (peak, planned), text, (num_gathers, num_gathered) in found:
        assert peak <= planned <= budget < whole_bytes
        assert (found_losses, digest) == ([float(loss) for loss in losses], digest_of(model.parameters()))
        assert "parameters divided: bucket" in text
        assert num_gathers > num_gathered > 0  # made, freed, and made again


def stay_whole(mesh):
    model = make_wide()
    step = make_step(mesh, model, torch.optim.SGD(model.parameters(), lr=0.1), "1GiB", 2)
    (args, targets), *_ = make_batches()
    step(*args, *targets)
    return len(model.state_dict()), [node.name for node in step.plan.nodes].count("start_gather")


def test_what_fits_is_held():
    assert run_ranks(stay_whole, 2) == [(2 * NUM_LAYERS + 2, 0)] * 2


def touch(mesh):
    """What reading or writing a divided model says, and what it has after `settle`."""
    shared_plans.choose_divided = divide_all
    model = make_wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(mesh, model, optimizer, "1GiB", 2)
    (args, targets), *rest = make_batches()
    step(*args, *targets)
    weight = model[0].weight
    planned = ut.plan(make_wide(), args)
    refused = []
    for attempt in (
        model.state_dict,
        lambda: model(*args),
        lambda: copy.deepcopy(model),
        lambda: weight.norm(),
        lambda: weight.data,
        lambda: repr(weight),
        lambda: weight.numpy(),
        lambda: optimizer.step() or weight.add_(1),
        lambda: nn.utils.parameters_to_vector(model.parameters()),
        lambda: ut.plan(model, args)(*args),
    ):
        try:
            attempt()
        except ut.UndertowError as error:
            refused.append("call step.settle() on all ranks first" in str(error))
        else:
            refused.append(False)
    assert (weight.shape, weight.requires_grad, weight.grad) == ((WIDTH, WIDTH), True, None)
    step.settle()
    step.settle()
    first = digest_of(model.state_dict().values())
    outputs = planned(*args).shape == model(*args).shape
    # What is loaded while it is whole counts.
    model.load_state_dict({name: item * 0.5 for name, item in model.state_dict().items()})
    ut.measure(step, *args, *targets)  # leaves everything as it was
    losses = [float(step(*args, *targets)) for args, targets in rest]
    step.settle()
    return refused, first, outputs, losses, digest_of(model.parameters())


def test_a_model_that_is_touched_while_it_is_divided():
    torch.set_num_threads(1)
    model = make_wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = make_batches()
    train_plainly(model, functional.cross_entropy, optimizer, batches[:1], 2)
    first = digest_of(model.parameters())
    model.load_state_dict({name: item * 0.5 for name, item in model.state_dict().items()})
    losses = [float(loss) for loss in train_plainly(model, functional.cross_entropy, optimizer, batches[1:], 2)]
    for found in run_ranks(touch, 2):
        assert found == ([True] * len(found[0]), first, True, losses, digest_of(model.parameters()))


def lose_a_rank(mesh):
    shared_plans.choose_divided = divide_all
    model = make_wide()
    step = make_step(mesh, model, torch.optim.SGD(model.parameters(), lr=0.1), "1GiB", 2)
    for number, (args, targets) in enumerate(make_batches()):
        if number == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step(*args, *targets)


def test_a_rank_of_which_others_read_is_lost():
    processes, results = start_ranks(lose_a_rank, 2)
    rank, message = results.get(timeout=120)
    assert rank == 0
    assert "RankLost: rank 1" in message
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL]


def ask_for_too_little(mesh):
    model = make_wide()
    make_step(mesh, model, torch.optim.Adam(model.parameters()), 100_000, 2)


def test_a_budget_that_no_division_meets():
    for message in run_ranks(ask_for_too_little, 2):
        assert "the budget of 97.7 KiB (100000 bytes) cannot be met" in message
