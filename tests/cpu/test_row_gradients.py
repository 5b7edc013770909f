"""Sparse gradients of embeddings: recorded, derived, planned and run with eager PyTorch's bits and within the bytes."""

import pytest
import torch
from torch import nn

import undertow as ut

LOSS = nn.functional.cross_entropy


class Bags(nn.Module):
    """Reads rows of a table once or twice; `is_tied` also multiplies with it."""

    def __init__(self, mode=None, padding=None, has_head=True, is_twice=False, is_tied=False):
        super().__init__()
        options = {"padding_idx": padding, "sparse": True}
        self.table = nn.Embedding(60, 8, **options) if mode is None else nn.EmbeddingBag(60, 8, mode=mode, **options)
        self.head = nn.Linear(8, 3) if has_head else None
        self.is_twice, self.is_tied = is_twice, is_tied

    def read(self, rows):
        x = self.table(rows)
        return x.mean(1) if x.dim() == 3 else x

    def forward(self, rows):
        x = self.read(rows)
        if self.is_twice:
            x = x * self.read(rows + 1)
        if self.is_tied:
            return x @ self.table.weight.t()
        return x.cumsum(1) if self.head is None else self.head(x)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, lr_decay=0.01),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.1),
}
MODELS = {
    "embedding": {},
    "padding": {"padding": 3},
    "twice": {"is_twice": True, "padding": 0},
    "tied": {"is_tied": True, "is_twice": True, "has_head": False},
    "sums": {"mode": "sum"},
    "means": {"mode": "mean", "padding": 2, "is_twice": True},
}


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        rows = torch.randint(0, 59, (16, 5), generator=generator)
        yield rows, torch.randint(0, 3, (16,), generator=generator)


def train(optimizer_name, options, how, **step_options):
    torch.manual_seed(0)
    model = Bags(**options)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    first = next(batches())
    losses = []
    if how == "step":
        step = ut.train_step(model, first[:1], targets=first[1:], loss=LOSS, optimizer=optimizer, **step_options)
        losses = [step(*batch).detach() for batch in batches()]
    else:
        planned = ut.plan(model, first[:1], **step_options) if how == "plan" else model
        for rows, targets in batches():
            optimizer.zero_grad()
            loss = LOSS(planned(rows), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    state = [torch.as_tensor(item) for entry in optimizer.state.values() for item in entry.values()]
    gradients = [item.grad for item in model.parameters()] if how != "step" else []
    return [*losses, *model.parameters(), *state], gradients


CASES = [*(("sgd", name) for name in MODELS), *(("adagrad", name) for name in ("tied", "means"))]
CASES += [("sparse_adam", name) for name in ("twice", "means")]


@pytest.mark.parametrize(("optimizer", "model"), CASES)
def test_bits_are_eagers(optimizer, model):
    options = {**MODELS[model], "has_head": False} if optimizer == "sparse_adam" else MODELS[model]  # it takes no dense
    expected, gradients = train(optimizer, options, "eager")
    for how, more in (("plan", {}), ("step", {}), ("step", {"budget": "60KiB"})):
        found, found_gradients = train(optimizer, options, how, **more)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        if how == "plan":
            assert [item.is_sparse for item in found_gradients] == [item.is_sparse for item in gradients]
            for one, other in zip(found_gradients, gradients, strict=True):
                if one.is_sparse:
                    assert torch.equal(one._indices(), other._indices()) and torch.equal(one._values(), other._values())


class LargeTable(nn.Module):
    def __init__(self, is_sparse=True):
        super().__init__()
        self.table, self.head = nn.Embedding(20_000, 64, sparse=is_sparse), nn.Linear(64, 3, bias=False)

    def forward(self, rows):
        return self.head(self.table(rows).mean(1))


def large_step(make, is_sparse=True, **options):
    torch.manual_seed(0)
    model = LargeTable(is_sparse)
    batch = torch.randint(0, 20_000, (64, 10)), torch.randint(0, 3, (64,))
    optimizer = make(model.parameters())
    return ut.train_step(model, batch[:1], targets=batch[1:], loss=LOSS, optimizer=optimizer, **options), batch


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd"], OPTIMIZERS["adagrad"]])
def test_bytes_count_rows_and_are_enough(make):
    dense_bytes = large_step(make, is_sparse=False)[0].peak_bytes
    free = large_step(make)[0].peak_bytes
    step, batch = large_step(make, budget=free)
    rows_bytes = 640 * (64 * 4 + 8)
    assert free < dense_bytes - 20_000 * 64 * 4 + 6 * rows_bytes
    step(
        *batch
    )  # Adagrad's state is there from the start; what the first call of a process allocates is not the step's
    assert ut.measure(step, *batch).peak_bytes <= step.peak_bytes
    everywhere_else = torch.ones(20_000, dtype=torch.bool)
    everywhere_else[batch[0].unique()] = False
    before = step.model.table.weight.detach().clone()
    step(*batch)
    after = step.model.table.weight.detach()
    assert torch.equal(before[everywhere_else], after[everywhere_else]) and not torch.equal(before, after)


def test_more_different_rows_than_when_planned():
    """The plan holds for any indices: it was made for one row, and then all rows differ."""
    model = LargeTable()
    few, many = torch.zeros(64, 10, dtype=torch.int64), torch.randperm(20_000)[:640].view(64, 10)
    targets = torch.zeros(64, dtype=torch.int64)
    optimizer = torch.optim.Adagrad(model.parameters())
    step = ut.train_step(model, (few,), targets=(targets,), loss=LOSS, optimizer=optimizer, budget="12MiB")
    step(few, targets)
    assert ut.measure(step, many, targets).peak_bytes <= step.peak_bytes


def test_saved_plan_runs(tmp_path):
    step, batch = large_step(OPTIMIZERS["sgd"], budget="6MiB")
    ut.save_plan(step, tmp_path / "plan")
    again, _ = large_step(OPTIMIZERS["sgd"], budget="6MiB", saved_plan=tmp_path / "plan")
    assert torch.equal(step(*batch), again(*batch))
    assert torch.equal(step.model.table.weight, again.model.table.weight)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}, "momentum keeps the rows of all steps"),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1), {}, r"add\(sparse, dense\) is not supported"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), {}, "weight_decay option is not compatible with sparse"),
        (torch.optim.Adam, {}, "Adam does not support sparse gradients"),
        (torch.optim.RMSprop, {}, "RMSprop does not support sparse gradients"),
        (lambda p: torch.optim.SparseAdam(list(p)), {}, "gradient of head.weight, which is dense: SparseAdam does not"),
        (torch.optim.SGD, {"clip_norm": 1.0}, "no norm of sparse gradients"),
        (torch.optim.SGD, {"accumulate": 2}, "grow with every call"),
        (torch.optim.SGD, {"shards": 2}, "gradients of shards are added up in dense memory"),
    ],
)
def test_refusals_are_one_line(make, options, message):
    with pytest.raises(ut.CallError, match=message) as caught:
        large_step(make, **options)
    assert "\n" not in str(caught.value)


class Renormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4, sparse=True, max_norm=1.0)

    def forward(self, rows):
        return self.table(rows).sum(1)


def test_tables_that_are_computed_are_refused():
    rows = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(ut.CaptureError, match="sparse=False"):
        ut.plan(Renormalised(), (rows,))


def test_sparse_adams_state_is_counted_before_its_first_step():
    model = Bags(has_head=False)
    (rows, targets), *_ = batches()
    optimizer = OPTIMIZERS["sparse_adam"](model.parameters())
    step = ut.train_step(model, (rows,), targets=(targets,), loss=LOSS, optimizer=optimizer)
    assert step.plan.held["optimizer state"] == 2 * 60 * 8 * 4
    step(rows, targets)
    assert sum(item.nbytes for item in optimizer.state[model.table.weight].values() if hasattr(item, "nbytes")) == 3840
