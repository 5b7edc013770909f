"""The optimizer's state divided over ranks: the bits of one process, its bytes, and how parts become a whole again."""

import hashlib
import io
import os
import signal
import threading
import time

import pytest
import torch
from rank_processes import divide_into_buckets_of, run_ranks, start_ranks
from sharded_loop import train_plainly
from torch import nn
from torch.nn import functional

import undertow as ut
from undertow.api.state_pieces import StatePiece, join_pieces, own_pieces, take_pieces
from undertow.models import SMALL
from undertow.ops.clipping import BLOCK
from undertow.ops.own_parts import PARAMETER_TAGS
from undertow.ranks import ranks as ranks_module
from undertow.ranks.pieces import Piece, cut_pieces


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def adamw_in_groups(parameters):
    parameters = list(parameters)
    plain = [item for item in parameters if item.dim() < 2]
    decayed = [item for item in parameters if item.dim() > 1]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": decayed, "lr": 0.003}], lr=0.01)


CASES = {
    "lenet5": (adamw_in_groups, {"clip_norm": 0.5, "budget": "24MiB"}),
    "resnet50": (sgd, {}),
    "unet": (adam, {"numerics": "fast"}),
    "gpt": (adamw_in_groups, {"accumulate": 2, "clip_norm": 1.0}),
    "lstm": (adam, {"seed": 5, "gradient_norm": True}),
    "vgg_small": (sgd, {"accumulate": 2}),
}
DEFAULT_CASES = ("lenet5", "unet", "gpt", "lstm")


def digest_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tensors_of(state):
    """The optimizer's state in the order of the parameters."""
    return [entry[key] for _, entry in sorted(state["state"].items()) for key in sorted(entry)]


def digests(mesh, num_shards, names, **own):
    """A hash of losses, weights, buffers and the whole state of the optimizer after a few steps of each case."""
    if mesh is not None:
        divide_into_buckets_of(1 << 16)
    found = {}
    for name in names:
        (make_optimizer, options), entry = CASES[name], SMALL[name]
        torch.manual_seed(0)
        model = entry.build()
        optimizer = make_optimizer(model.parameters())
        draw = torch.Generator().manual_seed(3)
        batches = [(entry.example_inputs(size, draw), entry.example_targets(size, draw)) for size in (10, 10, 9)]
        (args, targets), settings = batches[0], {"shards": num_shards, "parallel": mesh, **options, **own}
        step = ut.train_step(model, args, targets=targets, loss=entry.loss, optimizer=optimizer, **settings)
        tensors = [step(*args, *targets) for args, targets in batches]
        norm = step.gradient_norm
        step.settle()
        tensors += [*model.parameters(), *model.buffers(), torch.tensor(0.0 if norm is None else norm)]
        found[name] = digest_of([*tensors, *tensors_of(step.optimizer_state())])
    return found


def digests_of_parts(mesh, num_shards, names, is_late):
    return digests(mesh, num_shards, names, shard_state=True, late_parameters=is_late)


@pytest.fixture(scope="module")
def expected():
    """What one process finds; each case is asked for once."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the ranks: bits depend on it
    found = {}

    def find(num_shards, names):
        missing = [name for name in names if (num_shards, name) not in found]
        found.update({(num_shards, name): item for name, item in digests(None, num_shards, missing).items()})
        return {name: found[num_shards, name] for name in names}

    yield find
    torch.set_num_threads(before)


SIZES = [(8, size, is_late) for size in (1, 2, 3, 4, 5, 8) for is_late in (False, True)] + [(6, 4, False)]


@pytest.mark.parametrize(
    ("num_shards", "size", "is_late", "names"),
    [(6, 4, True, DEFAULT_CASES)] + [pytest.param(*case, tuple(CASES), marks=pytest.mark.exhaustive) for case in SIZES],
)
def test_bits_of_one_process(expected, num_shards, size, is_late, names):
    assert run_ranks(digests_of_parts, size, num_shards, names, is_late) == [expected(num_shards, names)] * size


def make_model(width=96):
    torch.manual_seed(0)
    body = (nn.Linear(24, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2))
    return nn.Sequential(*body, nn.Linear(width, width), nn.Linear(width, 3))


def make_batches(num=4):
    draw = torch.Generator().manual_seed(1)
    return [((torch.randn(16, 24, generator=draw),), (torch.randint(3, (16,), generator=draw),)) for _ in range(num)]


def make_step(mesh, model, optimizer, **options):
    (args, targets), *_ = make_batches()
    settings = {"loss": functional.cross_entropy, "shards": 4, "parallel": mesh, "shard_state": True, **options}
    return ut.train_step(model, args, targets=targets, optimizer=optimizer, **settings)


def train_in_parts(mesh):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = make_step(mesh, model, optimizer, late_parameters=True)
    losses = [step(*args, *targets) for args, targets in make_batches()]
    step.settle()
    return [float(loss) for loss in losses], digest_of([*model.parameters(), model[1].running_var])


def test_the_plain_loop():
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train_plainly(model, functional.cross_entropy, optimizer, make_batches(), 4)
    expected = [float(loss) for loss in losses], digest_of([*model.parameters(), model[1].running_var])
    assert run_ranks(train_in_parts, 2) == [expected] * 2


class Odd(nn.Module):
    """A weight that is used in two places, a frozen one, channels last, a number, one that nobody uses, bfloat16."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.first = nn.Linear(130, 130)
        self.second = nn.Linear(130, 130)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(130, 130).requires_grad_(False)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.short = nn.Parameter(torch.full((130,), 0.5, dtype=torch.bfloat16))

    def forward(self, x):
        h = self.convolution(x.view(len(x), 4, 2, 3).repeat(1, 1, 2, 2)).mean((2, 3)).repeat(1, 17)[:, :130]
        h = self.second(self.first(h).relu()) * self.factor
        return self.frozen(h + self.short.float())[:, :3]


ODD_OPTIMIZERS = {
    "plain": lambda items: torch.optim.SGD(items, lr=0.05, maximize=True),
    "dampened": lambda items: torch.optim.SGD(items, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "foreach": lambda items: torch.optim.AdamW(items, lr=0.05, foreach=True),
    "fused": lambda items: torch.optim.Adam(items, lr=0.05, fused=True),
    "tensor": lambda items: torch.optim.Adam(items, lr=torch.tensor(0.05), weight_decay=0.1),
}


def train_odd(mesh):
    found = {}
    for number, (name, make_optimizer) in enumerate(ODD_OPTIMIZERS.items()):
        torch.manual_seed(0)
        model = Odd()
        optimizer = make_optimizer([item for item in model.parameters() if item.requires_grad])
        own = {"shard_state": mesh is not None, "late_parameters": mesh is not None}
        step = make_step(mesh, model, optimizer, gradient_norm=bool(number % 2), **own)
        losses = [float(step(*args, *targets)) for args, targets in make_batches()]
        step.settle()
        state = tensors_of(step.optimizer_state())
        found[name] = losses, digest_of([*model.parameters(), *state]), step.gradient_norm
        if number % 2 == 0:
            assert all(item.is_contiguous(memory_format=torch.channels_last) for item in state if item.dim() == 4)
    return found


def test_odd_models_and_optimizers():
    torch.set_num_threads(1)
    expected = train_odd(None)
    for found in run_ranks(train_odd, 3):
        assert found == expected


def count_state(mesh):
    model = make_model(width=300)
    optimizer = torch.optim.Adam(model.parameters())
    step = make_step(mesh, model, optimizer)
    for args, targets in make_batches():
        step(*args, *targets)
    found = [item for entry in optimizer.state.values() for item in entry.values() if item.dim()]
    counts = [item for entry in optimizer.state.values() for item in entry.values() if not item.dim()]
    own = sum(item.untyped_storage().nbytes() for item in found)
    return own, step.plan.held["optimizer state"] - sum(item.nbytes for item in counts)


@pytest.mark.parametrize("size", [2, 3])
def test_the_state_is_divided_by_the_ranks(size):
    whole = 2 * 4 * sum(item.numel() for item in make_model(width=300).parameters())
    found = run_ranks(count_state, size)
    assert sum(own for own, _ in found) == whole
    for own, planned in found:
        assert own == planned
        # A cut is at most half a block from where equal parts would be cut.
        assert abs(own - whole / size) <= 2 * 4 * BLOCK


def keep_to_budget(mesh, budget_bytes, shard_state):
    model = make_model(width=700)
    optimizer = torch.optim.Adam(model.parameters())
    own = {"shard_state": shard_state, "late_parameters": shard_state}
    step = make_step(mesh, model, optimizer, budget=budget_bytes, **own)
    first, *others = make_batches()
    step(*first[0], *first[1])
    # The ranks run the step as often as each other, whatever their clocks say, and nothing of it stays.
    peaks = ut.measure(step, *first[0], *first[1]).peak_bytes, step.peak_bytes
    for args, targets in others:
        step(*args, *targets)
    step.settle()
    return peaks, digest_of(model.parameters())


def test_the_measured_peak_is_within_a_budget_that_the_whole_state_would_break():
    # Parameters are 4 * 510,000 bytes, and Adam's state is twice that.
    budget_bytes = 11_000_000
    found = run_ranks(keep_to_budget, 2, budget_bytes, True)
    assert all(isinstance(item, tuple) for item in found), found
    torch.set_num_threads(1)
    _, expected = keep_to_budget(None, None, False)
    for (peak_bytes, planned_bytes), digest in found:
        assert peak_bytes <= planned_bytes <= budget_bytes
        assert digest == expected
    for message in run_ranks(keep_to_budget, 2, budget_bytes, False):
        assert "cannot be met" in message


def train_on(mesh, num_before, before, num_after, is_whole):
    """Train, on from `before` where there is one. The weights, and the whole state or this rank's pieces, as bytes."""
    model = make_model()
    optimizer = adamw_in_groups(model.parameters())
    if before is not None:
        weights, state = unpacked(before)
        model.load_state_dict(weights)
        if is_whole and mesh is not None and mesh.data == 2:
            optimizer.load_state_dict(state)  # before the step is made
    step = make_step(mesh, model, optimizer, shard_state=mesh is not None)
    if before is not None:
        step.start_at(num_before)
        if not is_whole:
            take_pieces(optimizer, step.training.own, state)
        elif mesh is None or mesh.data != 2:
            step.load_optimizer_state(state)
    for args, targets in make_batches(6)[num_before:num_after]:
        step(*args, *targets)
    kept = step.optimizer_state() if is_whole else own_pieces(optimizer, step.training.own)
    return packed((model.state_dict(), kept))


def packed(item):
    file = io.BytesIO()
    torch.save(item, file)
    return file.getvalue()


def unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_state_goes_on_with_another_number_of_ranks(is_whole):
    torch.set_num_threads(1)
    weights, state = unpacked(train_on(None, 0, None, 6, True))
    expected = digest_of([*weights.values(), *tensors_of(state)])
    on_three = list(map(unpacked, run_ranks(train_on, 3, 0, None, 2, is_whole)))
    weights, whole = on_three[0]
    pieces = [item for _, items in on_three for item in items]
    on_two = list(
        map(unpacked, run_ranks(train_on, 2, 2, packed((weights, whole if is_whole else pieces)), 4, is_whole))
    )
    weights, whole = on_two[0]
    if not is_whole:
        model = make_model()
        pieces = [item for _, items in on_two for item in items]
        whole = join_pieces(adamw_in_groups(model.parameters()), dict(model.named_parameters()), pieces)
    weights, state = unpacked(train_on(None, 4, packed((weights, whole)), 6, True))
    assert digest_of([*weights.values(), *tensors_of(state)]) == expected


def test_pieces_that_lack_elements_are_refused():
    parameter = nn.Parameter(torch.zeros(2, 5))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    given = [StatePiece(Piece("w", 0, 4), {"momentum_buffer": torch.ones(4)})]
    with pytest.raises(ut.CallError, match="state of w lacks the elements from 4 to 9"):
        join_pieces(optimizer, {"w": parameter}, given)


def test_pieces_cover_every_element_once():
    pieces = cut_pieces(["a", "b", "c"], [5, 0, 9], (0, 3, 3, 14))
    assert pieces == ((Piece("a", 0, 3),), (), (Piece("a", 3, 5), Piece("c", 0, 9)))


def see_late_parameters(mesh):
    """What rank 0 has when its call returns while rank 1 holds its parameters back, and after `settle`."""
    model = make_model(width=300)
    step = make_step(mesh, model, torch.optim.Adam(model.parameters()), late_parameters=True)
    batches = make_batches()
    own, messages = step.training.own, step.link.ranks.messages
    send, may_go = messages.send, threading.Event()

    def hold_back(tensor, to, tag, part, *urgency):
        if tag >= PARAMETER_TAGS and tag < PARAMETER_TAGS * 2 - 2:
            assert may_go.wait(60)
        return send(tensor, to, tag, part, *urgency)

    if mesh.data == 2 and os.environ["RANK"] == "1":
        messages.send = hold_back
        threading.Timer(3, may_go.set).start()
    (args, targets), *_ = batches
    before = digest_of(model.parameters())
    loss = step(*args, *targets)
    on_their_way = [transfer.is_done.is_set() for transfer in own._transfers.values()]
    at_return = digest_of(model.parameters())
    loss_of_next = step(*batches[1][0], *batches[1][1])  # waits for them
    step.settle()
    return before, on_their_way, at_return, [float(loss), float(loss_of_next)], digest_of(model.parameters())


def test_parameters_may_arrive_after_the_call_and_are_waited_for():
    first, second = run_ranks(see_late_parameters, 2)
    assert False in first[1]  # rank 1 held them back, and rank 0's call returned
    assert first[0] == second[0]
    assert first[2] != second[2]  # each has updated its own part so far
    torch.set_num_threads(1)
    model = make_model(width=300)
    optimizer = torch.optim.Adam(model.parameters())
    losses = train_plainly(model, functional.cross_entropy, optimizer, make_batches()[:2], 4)
    assert first[3:] == second[3:] == ([float(loss) for loss in losses], digest_of(model.parameters()))


def take_turns(mesh, is_late):
    """Two steps of one model, with an optimizer each: what one left on its way is there for the other."""
    model = make_model()
    own = {"shard_state": mesh is not None, "late_parameters": is_late}
    optimizers = [torch.optim.Adam(model.parameters()), sgd(model.parameters())]
    steps = [make_step(mesh, model, optimizer, **own) for optimizer in optimizers]
    losses = [float(steps[number % 2](*args, *targets)) for number, (args, targets) in enumerate(make_batches())]
    steps[1].settle()
    return losses, digest_of(model.parameters())


def test_two_steps_of_one_model():
    torch.set_num_threads(1)
    assert run_ranks(take_turns, 2, True) == [take_turns(None, False)] * 2


def save_and_load(mesh, path):
    model = make_model()
    step = make_step(mesh, model, torch.optim.Adam(model.parameters()), budget="8MiB", late_parameters=True)
    name = f"{path}/{os.environ['RANK']}"
    ut.save_plan(step, name)
    text = str(step.plan.program)
    assert "start_scatter" in text and "start_parameters" in text and "arrive" in text
    return str(ut.load_plan(name).program) == text


def test_plans_are_saved_and_checked(tmp_path):
    assert run_ranks(save_and_load, 2, str(tmp_path)) == [True, True]


def leave_early(mesh):
    """Rank 0 leaves as soon as its call returns; the others get its parameters all the same."""
    model = make_model(width=1500)
    own = {"shard_state": mesh is not None, "late_parameters": mesh is not None}
    step = make_step(mesh, model, torch.optim.Adam(model.parameters()), **own)
    (args, targets), *_ = make_batches()
    step(*args, *targets)
    if mesh is not None and os.environ["RANK"] == "0":
        return None
    time.sleep(1)
    step.settle()
    return digest_of(model.parameters())


def test_what_is_on_its_way_arrives_though_its_sender_leaves():
    torch.set_num_threads(1)
    assert run_ranks(leave_early, 2) == [None, leave_early(None)]


def refuse(mesh, options):
    model = make_model()
    optimizer = options.pop("optimizer", torch.optim.Adam)(model.parameters(), lr=0.1)
    if options.pop("with_hook", False):
        optimizer.register_step_post_hook(lambda *_: None)
    if options.pop("with_masks", False):
        options["masks"] = ut.Masks({"0.weight": torch.ones(96, 24, dtype=torch.bool)}, model)
    if options.pop("with_stranger", False):
        optimizer = torch.optim.Adam(list(model.parameters())[:2])
    make_step(mesh, model, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": torch.optim.Adagrad}, "Adagrad is not known to"),
        ({"with_hook": True}, "has step hooks"),
        ({"with_stranger": True}, "parameter 1.weight requires a gradient and is not the optimizer's"),
        ({"shard_state": False, "late_parameters": True}, "give shard_state=True as well"),
        ({"parallel": None}, "give parallel= as well"),
        ({"weights": (1, 2)}, "a positive number for each of the 1 ranks"),
        ({"weights": (0,)}, r"such as \(2,\), got \(0,\)"),
        ({"weights": (float("nan"),)}, "a positive number"),
        ({"weights": "2"}, "got '2'"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(ut.CallError, match=words):
        refuse(ut.Mesh(data=1), options)


def lose_a_rank(mesh):
    """Rank 1 dies when its call has returned: large messages of rank 0 to it may still wait to be sent."""
    model = make_model(width=1500)
    ranks_module.join(mesh, bound_s=20)
    step = make_step(mesh, model, torch.optim.Adam(model.parameters()), late_parameters=True)
    for number, (args, targets) in enumerate(make_batches()):
        if number == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        step(*args, *targets)


def test_a_lost_rank_with_parameters_on_their_way():
    processes, results = start_ranks(lose_a_rank, 2)
    start = time.monotonic()
    rank, message = results.get(timeout=120)
    assert rank == 0
    assert "RankLost: rank 1" in message
    processes[0].join(60)
    assert processes[0].exitcode == 0  # it ends, though messages to rank 1 were never taken
    assert processes[1].exitcode == -signal.SIGKILL
    assert time.monotonic() - start < 180
