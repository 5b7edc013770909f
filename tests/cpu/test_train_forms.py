"""`undertow train` with models of any signature, losses and metrics of one's own, weights to begin with, callbacks."""

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_commands import refuse, run, users_folder

from undertow.errors import CallError, DataError
from undertow.hashing import hash_tensors
from undertow.train.averaging import Average
from undertow.train.batches import Batch, make_empty, read_batch
from undertow.train.config import TrainConfig
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.initial_weights import freeze, load_initial
from undertow.train.metrics import Judged, make_metrics
from undertow.train.optimizing import find_optimizer, group_parameters, make_optimizer
from undertow.train.schedules import make_schedule

MODELS = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.label, self.number = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)
    def forward(self, x, z):
        hidden = self.drop(self.norm(torch.relu(self.a(x) + self.b(z))))
        return self.label(hidden), self.number(hidden)

class Own(Two):
    def forward(self, x, z, labels, numbers=None):
        label, number = super().forward(x, z)
        loss = nn.functional.cross_entropy(label, labels)
        return {"loss": loss, "logits": label}

class First(Two):
    def forward(self, x, z):
        return super().forward(x, z)[0]

def two(): return Two()
def own(): return Own()
def first(): return First()
def line(): return nn.Linear(6, 1)
def loss(outputs, labels, numbers):
    label, number = outputs
    return nn.functional.cross_entropy(label, labels) + nn.functional.mse_loss(number[:, 0], numbers)
def accuracy(outputs, labels, numbers): return (outputs[0].argmax(1) == labels).double().mean()
def failing(outputs, *targets): return [][1]
class Total:
    def __init__(self): self.total = 0
    def update(self, outputs, labels, numbers): self.total += len(labels)
    def compute(self): return self.total
def make_total(): return Total()
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

class Items(Dataset):
    def __init__(self, form, num):
        generator = torch.Generator().manual_seed(num)
        self.x, self.z = (torch.randn(num, size, generator=generator) for size in (6, 4))
        self.labels, self.numbers = self.x[:, :3].argmax(1), self.z.sum(1)
        self.form = form
    def __len__(self): return len(self.x)
    def __getitem__(self, index):
        parts = [getattr(self, name)[index] for name in ("x", "z", "labels", "numbers")]
        return self.form(*parts)

def loaders(form):
    return DataLoader(Items(form, 96), 16, shuffle=True), DataLoader(Items(form, 32), 16)

def several(): return loaders(lambda x, z, labels, numbers: ((x, z), (labels, numbers)))
def named(): return loaders(lambda x, z, labels, numbers: ({"x": x, "z": z}, (labels, numbers)))
def whole(): return loaders(lambda x, z, labels, numbers: {"x": x, "z": z, "labels": labels})
def flat(): return loaders(lambda x, z, labels, numbers: (x, z, labels))
def numbers(): return loaders(lambda x, z, labels, numbers: (x, numbers[None]))
"""
CALLBACKS = """
import json, time
from pathlib import Path
def note(**data):
    with open("notes.jsonl", "a") as file: file.write(json.dumps(data) + "\\n")
def on_start(config): note(hook="start", seed=config["seed"])
def on_step(record): record["loss"] = 0; note(hook="step", step=record["step"]); return record["step"] == 4
def on_evaluation(record): note(hook="evaluation", kind=record["kind"])
def on_end(result): note(hook="end", stopped=result["stopped"])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in (("models", MODELS), ("loaders", LOADERS), ("callbacks", CALLBACKS)):
        (tmp_path / f"{name}.py").write_text(text)
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


def start(capsys, model, data, *words):
    code, out, err = run(
        capsys, "train", f"models.py:{model}", "--data", f"loaders.py:{data}", "--epochs", "2", "--json", *words
    )
    assert code == 0, err
    return json.loads(out)


FORMS = {
    "several": ("two", "several", ("--loss", "models.py:loss")),
    "named": ("two", "named", ("--loss", "models.py:loss")),
    "whole": ("own", "whole", ()),
    "flat": ("own", "flat", ("--loss", "model")),
    "targets": ("first", "whole", ("--targets", "labels")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_batch_has_eagers_weights_and_resumes(capsys, form, monkeypatch):
    model, data, words = FORMS[form]
    words = (*words, "--optimizer", "adamw", "--clip-norm", "1", "--ema", "0.9", "--budget", "200KiB")
    result = start(capsys, model, data, *words, "--out", "whole")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    import loaders
    import models

    torch.manual_seed(0)
    feed = Feed(getattr(loaders, data)()[0], 0)
    torch.manual_seed(0)
    twin = getattr(models, model)()
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.0)
    losses = []
    for epoch in range(2):
        for raw in feed.batches(epoch, 0):
            if form == "several":
                loss = models.loss(twin(*raw[0]), *raw[1])
            elif form == "named":
                loss = models.loss(twin(**raw[0]), *raw[1])
            elif form == "whole":
                loss = twin(**raw)["loss"]
            elif form == "flat":
                loss = twin(*raw)["loss"]
            else:
                loss = nn.functional.cross_entropy(twin(raw["x"], raw["z"]), raw["labels"])
            losses.append(loss.item())
            loss.backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    records = RunFolder(Path("whole")).read_metrics()
    assert [record["loss"] for record in records if record["kind"] == "train"] == losses
    trained = RunFolder(Path("whole")).read_checkpoint().weights()
    assert [name for name, item in twin.state_dict().items() if not torch.equal(item, trained[name])] == []
    assert result["measured_peak_bytes"] <= 200 << 10
    start(capsys, model, data, *words, "--out", "parts", "--max-steps", "5")
    code, out, err = run(capsys, "train", "--resume", "parts", "--max-steps", "100", "--json")
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == result["weights_sha256"]
    kept = [RunFolder(Path(name)).read_trained(False, None).trained_weights() for name in ("whole", "parts")]
    assert hash_tensors(kept[0]) == hash_tensors(kept[1])
    for words in (("evaluate", "whole"), ("evaluate", "whole", "--last"), ("report", "whole")):
        assert run(capsys, *words)[0] == 0


def test_metrics_and_a_loss_of_ones_own(capsys):
    words = ("--loss", "models.py:loss", "--metric", "models.py:accuracy,models.py:make_total")
    start(capsys, "two", "several", *words, "--out", "a")
    found = json.loads(run(capsys, "evaluate", "a", "--json")[1])
    assert found["metrics"]["make_total"] == 32 and 0 <= found["metrics"]["accuracy"] <= 1
    records = [item for item in RunFolder(Path("a")).read_metrics() if item["kind"] == "test"]
    assert all(item["make_total"] == 32 for item in records)
    words = ["train", "models.py:two", "--data", "loaders.py:several", *words]
    refuse(capsys, 2, "the metric failing failed: IndexError", *words, "--metric", "models.py:failing", "--out", "b")
    assert RunFolder(Path("b")).read_checkpoint().progress.step == 6  # the epoch was saved
    refuse(
        capsys, 2, "the model returns tuple, but cross_entropy takes one tensor: give a loss", *words[:4], "--out", "c"
    )


def test_regression(capsys):
    start(
        capsys, "line", "numbers", "--loss", "mse_loss", "--metrics", "errors", "--out", "a", "--optimizer", "rmsprop"
    )
    found = json.loads(run(capsys, "evaluate", "a", "--json")[1])
    # The loss of two halves of equal size is the mean of squares.
    assert found["metrics"]["rmse"] ** 2 == pytest.approx(found["test_loss"], rel=1e-5)
    assert found["test_accuracy"] is None
    words = ["train", "models.py:line", "--data", "loaders.py:numbers", "--loss", "mse_loss", "--out", "b"]
    for name in ("f1", "errors,top5", "confusion"):
        refuse(capsys, 2, "it counts classes, but what the model returns is not scores", *words, "--metrics", name)
    assert not Path("b").exists()


def test_parts_of_a_batch_that_the_model_does_not_take(capsys):
    Path("named.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader\n"
        "class Net(nn.Linear):\n    def forward(self, x): return super().forward(x)\n"
        "def make(): return Net(3, 2)\n"
        "def loaders():\n    rows = [{'x': torch.ones(3), 'price': torch.ones(2)}] * 8\n"
        "    return DataLoader(rows, 4), DataLoader(rows, 4)\n"
    )
    words = ["train", "named.py:make", "--data", "named.py:loaders", "--out", "a"]
    refuse(capsys, 2, "go to it by name (x, price): Net.forward() got an unexpected keyword argument 'price'", *words)
    words += ["--targets", "price", "--loss", "mse_loss", "--epochs", "1"]
    assert run(capsys, *words)[0] == 0


def test_metrics_beside_their_definition():
    torch.manual_seed(0)
    outputs, labels = torch.randn(50, 7), torch.randint(7, (50,))
    labels[::9] = -100
    metrics = make_metrics(["f1", "confusion", "top5"], [])
    for rows in (slice(0, 20), slice(20, 50)):
        for metric in metrics:
            metric.add(Judged(outputs[rows], (labels[rows],), 20, class_dim=1))
    found = {name: value for metric in metrics for name, value in metric.compute().items()}
    valid = [(int(label), row) for label, row in zip(labels, outputs, strict=True) if label >= 0]
    matrix = [[0] * 7 for _ in range(7)]
    for label, row in valid:
        matrix[label][int(row.argmax())] += 1
    assert found["confusion"] == matrix
    assert found["top5"] == sum(label in row.topk(5).indices for label, row in valid) / len(valid)
    scores = []
    for index in range(7):
        right, wanted, given = matrix[index][index], sum(matrix[index]), sum(row[index] for row in matrix)
        precision, recall = right / max(given, 1), right / max(wanted, 1)
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert found["f1"] == pytest.approx(sum(scores) / 7, rel=1e-12)


def test_callbacks_see_the_run_and_can_end_it(capsys):
    result = start(capsys, "own", "whole", "--callbacks", "callbacks.py", "--out", "a")
    notes = [json.loads(line) for line in Path("notes.jsonl").read_text().splitlines()]
    assert result["stopped"] == "ended by a callback" and result["steps"] == 4 and result["final_loss"] > 0
    assert [note["hook"] for note in notes] == ["start", "step", "step", "step", "step", "end"]
    Path("callbacks.py").rename("gone.py")
    assert run(capsys, "evaluate", "a")[0] == 0  # callbacks are for training alone
    Path("gone.py").rename("callbacks.py")
    code, out, _ = run(capsys, "train", "--resume", "a", "--json", "--callbacks", "models.py")
    assert code == 2
    code, out, _ = run(capsys, "train", "--resume", "a", "--json")
    assert code == 0 and json.loads(out)["steps"] == 12


def test_callbacks_that_fail_or_hang(capsys, monkeypatch):
    words = ["train", "models.py:own", "--data", "loaders.py:whole", "--callbacks", "mine.py"]
    Path("mine.py").write_text("def on_step(record):\n    if record['step'] == 3: raise KeyError('tracker')\n")
    refuse(
        capsys, 2, "on_step in mine.py failed: KeyError: 'tracker' (mine.py:2); the run is saved", *words, "--out", "a"
    )
    assert RunFolder(Path("a")).read_checkpoint().progress.step == 3
    monkeypatch.setattr("undertow.train.callbacks.LIMIT_S", 0.2)
    text = "import time\ndef on_step(record):\n    try: time.sleep(600)\n    except Exception: pass\n"
    Path("mine.py").write_text(text)
    refuse(capsys, 2, "did not return within", *words, "--out", "b")
    Path("mine.py").write_text("")
    refuse(capsys, 2, "has none of the functions on_start", *words, "--out", "c")


def test_weights_to_begin_with(capsys):
    source = nn.Sequential()
    source.add_module("a", nn.Linear(6, 8))
    source.add_module("label", nn.Linear(8, 5))
    safetensors.torch.save_file({f"inner.{k}": v for k, v in source.state_dict().items()}, "w.safetensors")
    code, _, err = run(
        capsys, "train", "models.py:own", "--data", "loaders.py:whole", "--max-steps", "2", "--out", "a", "--init",
        "w.safetensors", "--freeze", "a.*,norm.*",
    )  # fmt: skip
    assert code == 0 and "2 tensors loaded, without their prefix 'inner.'" in err and "of another shape" in err
    weights = RunFolder(Path("a")).read_checkpoint().weights()
    assert torch.equal(weights["a.weight"], source.a.weight)
    assert weights["norm.num_batches_tracked"] == 0  # a frozen norm keeps its statistics
    assert not torch.equal(weights["norm.weight"], weights["norm.bias"])
    Path("w.safetensors").unlink()
    assert run(capsys, "train", "--resume", "a", "--max-steps", "3")[0] == 0
    safetensors.torch.save_file({"other": torch.ones(3)}, "w.safetensors")
    words = ["train", "models.py:own", "--data", "loaders.py:whole", "--out", "b"]
    refuse(capsys, 3, "no weight in w.safetensors fits the model", *words, "--init", "w.safetensors")
    refuse(capsys, 2, "--freeze 'c.*' matches no parameter", *words, "--freeze", "c.*")
    refuse(capsys, 2, "--lr-scale 'c.*' matches no parameter", *words, "--lr-scale", "c.*=2")


@pytest.mark.parametrize("prefix", ["", "bert.", "model.encoder."])
def test_prefixes_that_one_side_has(tmp_path, prefix):
    inner = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    outer = inner
    for name in reversed(prefix.split(".")[:-1]):
        outer = nn.ModuleDict({name: outer, "head": nn.Linear(2, 2)})
    given = {name: torch.randn_like(item) for name, item in inner.state_dict().items()}
    safetensors.torch.save_file(given, tmp_path / "inner.safetensors")
    found = load_initial(outer, tmp_path / "inner.safetensors")
    assert found.num_loaded == 4 and not found.unknown and not found.other_shape
    assert all(torch.equal(item, given[name]) for name, item in inner.state_dict().items())
    safetensors.torch.save_file({prefix + name: item for name, item in given.items()}, tmp_path / "outer.safetensors")
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert load_initial(plain, tmp_path / "outer.safetensors").num_loaded == 4


def test_a_network_of_timm_from_its_own_file(capsys):
    timm = pytest.importorskip("timm", reason="timm needs torchvision, which has no build for the CPU alone")
    Path("networks.py").write_text(
        "import timm\ndef make(): return timm.create_model('resnet18', num_classes=10, in_chans=1)\n"
    )
    source = timm.create_model("resnet18", num_classes=3, in_chans=1)
    safetensors.torch.save_file(source.state_dict(), "w.safetensors")
    words = [
        "train",
        "networks.py:make",
        "--data",
        "digits",
        "--max-steps",
        "2",
        "--out",
        "a",
        "--init",
        "w.safetensors",
    ]
    code, _, err = run(capsys, *words, "--freeze", "layer1.*,bn1.*")
    assert code == 0 and "2 of another shape, left as made: fc.bias" in err
    weights = RunFolder(Path("a")).read_checkpoint().weights()
    kept = [name for name, item in source.state_dict().items() if name.startswith(("layer1", "bn1"))]
    assert all(torch.equal(weights[name], source.state_dict()[name]) for name in kept)


def test_freezing_takes_out_of_training():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    still = freeze(model, ["0.*", "1.*"])
    assert still == [model[1]] and [item.requires_grad for item in model.parameters()] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "adafactor"])
def test_optimizers_by_name(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make_optimizer(TrainConfig("m", optimizer=name, lr=0.25, lr_scale={"1.*": 0.5}), model)
    assert type(optimizer) is find_optimizer(name)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.125, 0.25]
    with pytest.raises(CallError, match="has no option 'beta'"):
        make_optimizer(TrainConfig("m", optimizer=name, optimizer_args={"beta": 1}), model)


def test_decay_leaves_biases_and_norms_alone():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.BatchNorm1d(3), torch.nn.LSTM(4, 4))
    groups = group_parameters(model, decay_all=False, scales={})
    assert [tuple(item.shape) for item in groups[True, 1.0]] == [(3, 2, 3), (16, 4), (16, 4)]
    assert len(groups[False, 1.0]) == 5 and [*group_parameters(model, decay_all=True, scales={})] == [(True, 1.0)]


def test_rates():
    def rates_of(num_steps, **settings):
        schedule = make_schedule(TrainConfig("m", lr=1.0, **settings), [1.0])
        return [schedule.at(step, num_steps)[0] for step in range(num_steps)]

    rates = rates_of(110, schedule="cosine", warmup=10)
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and rates[60] == pytest.approx(0.5)
    assert rates[-1] < 0.001
    assert rates_of(4, schedule="step") == pytest.approx([1, 1, 0.1, 0.01])
    assert rates_of(4, schedule="linear")[1] == 0.75


def test_schedules_of_pytorch_are_functions_of_the_step():
    parameter = nn.Parameter(torch.zeros(1))
    for name, options in (("OneCycleLR", {"max_lr": 1.0}), ("CosineAnnealingLR", {}), ("StepLR", {"step_size": 3})):
        optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        more = {"OneCycleLR": {"total_steps": 20}, "CosineAnnealingLR": {"T_max": 20}}.get(name, {})
        expected = getattr(torch.optim.lr_scheduler, name)(optimizer, **options, **more)
        rates = []
        for _ in range(20):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            expected.step() if len(rates) < 20 else None
        schedule = make_schedule(TrainConfig("m", schedule=name, schedule_args=options), [0.5])
        assert [schedule.at(step, 20)[0] for step in range(20)] == rates
        assert schedule.at(7, 20)[0] == rates[7]  # an earlier step, as when a step is repeated
    with pytest.raises(CallError, match="OneCycleLR with no --schedule-args: .*max_lr"):
        make_schedule(TrainConfig("m", schedule="OneCycleLR"), [0.5])
    with pytest.raises(CallError, match="Nothing is not known"):
        make_schedule(TrainConfig("m", schedule="Nothing"), [0.5])


def test_an_average_is_its_definition():
    model = nn.Linear(3, 2)
    average = Average(model, 0.75)
    expected = None
    for _ in range(4):
        with torch.no_grad():
            model.weight.add_(torch.randn(2, 3))
        average.update()
        weight = model.weight.detach().double()
        expected = weight if expected is None else 0.75 * expected + 0.25 * weight
    # Three steps of a few roundings each.
    assert torch.allclose(average.model.weight.double(), expected, rtol=16 * 2**-24, atol=1e-6)
    other = Average(copy.deepcopy(model), 0.75)
    other.restore(average.state(), "the test")
    assert hash_tensors(other.state()) == hash_tensors(average.state())


@pytest.mark.parametrize(
    "raw, loss, names",
    [
        (torch.ones(3), None, ()),
        ((torch.ones(3),), None, ()),
        ((torch.ones(3), torch.ones(3), torch.ones(3)), None, ()),
        ({"x": 3}, None, ()),
        ({}, "model", ()),
        ({"x": torch.ones(3)}, None, ("y",)),
        ((torch.ones(3), 5), None, ()),
        (torch.ones(()), "model", ()),
        ("text", None, ()),
        (None, "model", ()),
    ],
)
def test_batches_that_are_none(raw, loss, names):
    with pytest.raises(DataError, match="batch"):
        read_batch(raw, loss, names)


def test_a_batch_is_described_and_made_again():
    batch = Batch(
        (torch.ones(2, 3), [torch.ones(2).long()]), {"mask": torch.ones(2).bool(), "n": 3}, ((torch.ones(2),),)
    )
    again = make_empty(json.loads(json.dumps(batch.describe())), torch.device("cpu"))
    assert str(again.map_tensors(torch.ones_like)) == str(batch.map_tensors(torch.ones_like))
    assert batch.num_examples == 2


OPTIONS = {
    ("--optimizer", "sgdd"): "there is no optimizer 'sgdd'; did you mean sgd?",
    ("--optimizer", "lbfgs"): "there is no optimizer 'lbfgs'",
    ("--optimizer-args", "betas"): "optimizer_args must be written as",
    ("--optimizer", "adam", "--optimizer-args", "betas=[2, 3]"): "Invalid beta",
    ("--schedule", "cosin"): "did you mean cosine?",
    ("--schedule", "cosine", "--schedule-args", "at=3"): "has no option 'at'; it takes least",
    ("--loss", "mse"): "did you mean mse_loss?",
    ("--loss", "models.py:lost"): "did you mean loss?",
    ("--metrics", "f2"): "there is no metric 'f2'",
    ("--metric", "accuracy"): "write file.py:function",
    ("--ema", "1.5"): "ema lies between 0 and 1",
    ("--device", "tpu"): "a device is cpu, cuda",
    ("--device", "cuda:99"): "this machine has",
    ("--batch", "few"): "batch must be a whole number or all",
    ("--lr-scale", "a.*"): "lr_scale must be patterns with factors",
    ("--callbacks", "nowhere.py"): "there is no file nowhere.py",
    ("--init", "nowhere.safetensors"): "nowhere.safetensors",
    ("--weight-decay", "0.1", "--optimizer", "rprop"): "has no weight decay",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_that_make_no_sense(capsys, words):
    code = 3 if words[0] == "--init" else 2
    refuse(capsys, code, OPTIONS[words], "train", "models.py:own", "--data", "loaders.py:whole", "--out", "a", *words)
    assert not Path("a").exists()


def test_an_average_has_the_bits_of_pytorchs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())
    average, expected = Average(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(4):
        for item in model.state_dict().values():
            item.add_(torch.randn(item.shape).to(item.dtype))
        average.update()
        expected.update_parameters(model)
    assert hash_tensors(average.model.state_dict()) == hash_tensors(expected.module.state_dict())
    assert int(average.state()["num_averaged"]) == 4
