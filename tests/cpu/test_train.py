"""`undertow train` and the commands after it, through the command line: bits, resuming, bad inputs, reports."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import safetensors.torch
import torch
from PIL import Image
from training_commands import PLAN, refuse, run, train, users_folder

from undertow.api.training import TrainStep
from undertow.cli.workloads import load_workload
from undertow.data.opening import open_data
from undertow.hashing import hash_tensors
from undertow.train.config import TrainConfig
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder
from undertow.train.interrupts import Interrupts
from undertow.train.objective import Objective
from undertow.train.optimizing import make_optimizer, set_learning_rates
from undertow.train.schedules import make_schedule

MODELS = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4))

class Diverging(nn.Linear):
    def forward(self, x):
        return torch.log(super().forward(x).relu() - 0.2)

def diverging(): return nn.Sequential(nn.Linear(12, 8), Diverging(8, 4))
def narrow(): return nn.Linear(12, 3)
def bfloat16(): return make().bfloat16()
def regression(): return nn.Linear(12, 1).bfloat16()
def images(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)), (torch.zeros(1, 3, 8, 8),)
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(12), y

def make():
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    return DataLoader(Noisy(x, y), 16, shuffle=True, drop_last=True), DataLoader(TensorDataset(x, y), 16)
def unsized(): return iter([]), iter([])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "loaders.py").write_text(LOADERS)
    x = numpy.random.default_rng(0).standard_normal((120, 12)).astype("float32")
    numpy.savez(tmp_path / "data.npz", x=x, y=x[:, :4].argmax(1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


def train_eagerly(config):
    workload = load_workload(config)
    optimizer = make_optimizer(config, workload.model)
    feed, loss_of = Feed(workload.train_loader, config.seed), Objective(accumulate=config.accumulate).training_loss
    schedule = make_schedule(config, [group["lr"] for group in optimizer.param_groups])
    num_steps = len(feed) // config.accumulate * config.epochs
    losses, num_calls = [], 0
    for epoch in range(config.epochs):
        workload.model.train()
        for index, (inputs, targets) in enumerate(feed.batches(epoch, 0)):
            if index >= len(feed) - len(feed) % config.accumulate:
                break
            set_learning_rates(optimizer, schedule.at(num_calls // config.accumulate, num_steps))
            loss = loss_of(workload.model(inputs), targets)
            loss.backward()
            losses.append(loss.item())
            num_calls += 1
            if num_calls % config.accumulate == 0:
                if config.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(workload.model.parameters(), config.clip_norm)
                optimizer.step()
                optimizer.zero_grad()
    return losses, hash_tensors(workload.model.state_dict())


@pytest.mark.parametrize(
    "words, changes",
    [
        ((), {}),
        (
            ("--optimizer", "adamw", "--weight-decay", "0.1", "--schedule", "cosine", "--warmup", "3"),
            {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "warmup": 3},
        ),
        (
            ("--accumulate", "4", "--clip-norm", "0.5", "--nesterov"),
            {"accumulate": 4, "clip_norm": 0.5, "nesterov": True},
        ),
    ],
    ids=["plain", "adamw", "accumulated"],
)
def test_the_weights_are_eagers(capsys, words, changes):
    result = train(capsys, "--out", "a", "--budget", "200KiB", *words)
    config = TrainConfig("models.py:make", data="data.npz", batch=16, epochs=3, seed=7, **changes)
    losses, weights = train_eagerly(config)
    assert result["weights_sha256"] == weights
    records = RunFolder(Path("a")).read_metrics()
    found = [record["loss"] for record in records if record["kind"] == "train"]
    size = config.accumulate
    assert found == [sum(losses[start : start + size]) for start in range(0, len(losses), size)]
    assert result["steps"] == len(found) and result["final_loss"] == found[-1]
    assert result["measured_peak_bytes"] <= 200 * 1024 and result["predicted_peak_bytes"] <= 200 * 1024
    assert [record["epoch"] for record in records if record["kind"] == "test"] == [0, 1, 2]


def test_a_resumed_run_ends_in_the_same_bits(capsys):
    # The first run measures its costs, the second finds them: neither may draw from the run's generator.
    whole = train(capsys, "--out", "whole", "--budget", "200KiB")
    train(capsys, "--out", "parts", "--budget", "200KiB", "--max-steps", "4")
    shutil.rmtree(Path("cache"))
    for more in (("--max-steps", "9"), ("--max-steps", "1000")):
        code, out, err = run(capsys, "train", "--resume", "parts", "--json", *more)
        assert code == 0, err
    result = json.loads(out)
    for name in ("weights_sha256", "final_loss", "test_loss", "steps", "predicted_peak_bytes"):
        assert result[name] == whole[name], name
    metrics = [
        [item for item in RunFolder(Path(name)).read_metrics() if item["kind"] == "train"]
        for name in ("whole", "parts")
    ]
    assert metrics[0] == metrics[1]
    ended = [RunFolder(Path(name)).read_checkpoint() for name in ("whole", "parts")]
    assert ended[0].costs == ended[1].costs and ended[0].costs
    assert all(torch.equal(ended[0].tensors[name], ended[1].tensors[name]) for name in ended[0].tensors)
    # Resuming a finished run changes nothing.
    code, out, _ = run(capsys, "train", "--resume", "parts", "--json")
    assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]


def test_a_resumed_run_shows_what_it_was_given(capsys):
    train(capsys, "--out", "a", "--epochs", "2")
    assert run(capsys, "train", "--resume", "a", "--epochs", "3")[0] == 0
    assert RunFolder(Path("a")).read_config().epochs == 3
    code, out, _ = run(capsys, "report", "a", "--json")
    assert code == 0 and json.loads(out)["config"]["epochs"] == 3 == json.loads(out)["place"]["epoch"]


def test_the_time_of_a_step_is_a_median_outside_the_profiler(capsys, monkeypatch):
    # The clock says that each step takes as many seconds as its number; the profiler runs during the second.
    clock = {"now": 0.0, "steps": 0}

    def slow(step, *batch, original=TrainStep.__call__):
        clock["steps"] += 1
        clock["now"] += clock["steps"]
        return original(step, *batch)

    monkeypatch.setattr(TrainStep, "__call__", slow)
    monkeypatch.setattr("undertow.train.run.time.perf_counter", lambda: clock["now"])
    train(capsys, "--out", "a", "--max-steps", "7")
    assert RunFolder(Path("a")).read_checkpoint().progress.measured_step_s == 5  # of 3, 4, 5, 6, 7


def test_loaders_of_ones_own_resume_too(capsys):
    words = ["train", "models.py:make", "--data", "loaders.py:make", "--epochs", "2", "--json"]
    whole = json.loads(run(capsys, *words, "--out", "whole")[1])
    assert run(capsys, *words, "--out", "parts", "--max-steps", "8")[0] == 0
    code, out, _ = run(capsys, "train", "--resume", "parts", "--json", "--max-steps", "100")
    assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]
    refuse(capsys, 2, "your own loaders", "predict", "whole", "data.npz")
    assert run(capsys, "evaluate", "whole")[0] == 0


@pytest.mark.parametrize("model", ["models.py:make", "models:make"])
def test_the_files_that_a_run_names_are_said(capsys, folder, model):
    words = ["train", model, "--data", "loaders.py:make", "--max-steps", "2", "--out", "a"]
    code, _, err = run(capsys, *words)
    assert code == 0 and str(folder) not in err
    names = [f"make is from {folder / name}.py" for name in ("models", "loaders")]
    for words in (("train", "--resume", "a", "--max-steps", "3"), ("evaluate", "a")):
        code, _, err = run(capsys, *words)
        assert code == 0 and [line for line in err.splitlines() if "is from" in line] == names
    code, _, err = run(capsys, "report", "a")
    assert code == 0 and err.splitlines() == names[:1]
    assert run(capsys, *PLAN[:4], "--max-steps", "2", "--out", "b")[0] == 0
    code, _, err = run(capsys, "predict", "b", "data.npz")
    assert code == 0 and err.splitlines() == names[:1]


def test_a_model_in_bfloat16(capsys):
    words = ["train", "models.py:bfloat16", "--data", "data.npz", "--epochs", "3", "--optimizer", "adamw", "--json"]
    code, out, err = run(capsys, *words, "--out", "whole", "--budget", "200KiB")
    assert code == 0, err
    config = TrainConfig("models.py:bfloat16", data="data.npz", epochs=3, optimizer="adamw")
    assert json.loads(out)["weights_sha256"] == train_eagerly(config)[1]
    assert run(capsys, *words, "--out", "parts", "--budget", "200KiB", "--max-steps", "4")[0] == 0
    code, resumed, _ = run(capsys, "train", "--resume", "parts", "--json", "--max-steps", "1000")
    assert code == 0 and json.loads(resumed)["weights_sha256"] == json.loads(out)["weights_sha256"]
    code, evaluated, _ = run(capsys, "evaluate", "whole", "--json")
    assert code == 0 and json.loads(evaluated)["test_loss"] == json.loads(out)["test_loss"]
    assert run(capsys, "predict", "whole", "data.npz")[0] == run(capsys, "report", "whole")[0] == 0
    x = numpy.load("data.npz")["x"]
    numpy.savez("numbers.npz", x=x, y=x[:, :1])
    words = ["train", "models.py:regression", "--data", "numbers.npz", "--loss", "mse_loss", "--out", "numbers"]
    assert run(capsys, *words)[0] == 0


def test_records_of_a_killed_run_are_cut_back(capsys):
    train(capsys, "--out", "a", "--max-steps", "5")
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "kind": "train", "loss": 9.0}\n{"step": 7, "ki')
    assert run(capsys, "train", "--resume", "a", "--max-steps", "8")[0] == 0
    records = RunFolder(Path("a")).read_metrics()
    assert [item["step"] for item in records if item["kind"] == "train"] == list(range(1, 9))
    assert all(item.get("loss") != 9.0 for item in records)


def test_kills():
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    done = subprocess.run([sys.executable, script, "--kills", "4"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["kills"] == 4


@pytest.fixture
def listening():
    """Ctrl-C as in a terminal: a process started in the background ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
def test_ctrl_c_saves_and_stops(capsys, monkeypatch):
    whole = train(capsys, "--out", "whole")
    from undertow.train.run import Run

    before = signal.getsignal(signal.SIGINT)
    plain = Run.start_update

    def interrupted(self, *batches):
        if self.progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *batches)

    monkeypatch.setattr(Run, "start_update", interrupted)
    code, out, err = run(capsys, *PLAN, "--out", "a", "--json")
    assert code == 130 and json.loads(out)["stopped"] == "interrupted" and json.loads(out)["steps"] == 4
    monkeypatch.setattr(Run, "start_update", plain)
    code, out, _ = run(capsys, "train", "--resume", "a", "--json")
    assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]

    def twice(self, *batches):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *batches)

    monkeypatch.setattr(Run, "start_update", twice)
    refuse(capsys, 130, "stopped immediately", *PLAN, "--out", "b")
    assert signal.getsignal(signal.SIGINT) is before


def test_sigterm_saves_and_stops_however_often(capsys, monkeypatch):
    from undertow.train.run import Run

    whole = train(capsys, "--out", "whole")
    before, plain = signal.getsignal(signal.SIGTERM), Run.start_update

    def terminated(self, *group):
        if self.progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *group)

    monkeypatch.setattr(Run, "start_update", terminated)
    code, out, err = run(capsys, *PLAN, "--out", "a", "--json")
    assert code == 143 and json.loads(out)["stopped"] == "terminated" and json.loads(out)["steps"] == 4
    assert signal.getsignal(signal.SIGTERM) is before
    monkeypatch.setattr(Run, "start_update", plain)
    code, out, _ = run(capsys, "train", "--resume", "a", "--json")
    assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]


def test_signals_that_are_ignored_stay_so(capsys, monkeypatch):
    # As when a shell without a terminal starts a command in the background.
    from undertow.train.run import Run

    plain = Run.start_update

    def interrupted(self, *group):
        os.kill(os.getpid(), signal.SIGINT)
        return plain(self, *group)

    monkeypatch.setattr(Run, "start_update", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, out, _ = run(capsys, *PLAN, "--out", "a", "--json")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 0 and json.loads(out)["stopped"] == "finished"


def test_a_process_that_a_loader_forked_dies_of_sigterm():
    with Interrupts() as interrupts:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not interrupts.reason


def test_early_stopping(capsys):
    result = train(capsys, "--out", "a", "--lr", "0", "--epochs", "50", "--patience", "2")
    assert result["stopped"] == "no lower test loss" and result["epochs"] <= 4


def test_a_loss_that_is_no_number(capsys):
    words = ["train", "models.py:diverging", "--data", "data.npz", "--batch", "16", "--lr", "3", "--out", "a"]
    found, out, err = run(capsys, *words)
    (line,) = [line for line in err.splitlines() if line.startswith("undertow: ")]
    assert (found, out) == (4, "")
    assert "log (1 models.py:10) made the first value that is not finite" in line
    checkpoint = RunFolder(Path("a")).read_checkpoint()
    assert f"the last good checkpoint, of step {checkpoint.progress.step}" in line
    assert all(tensor.isfinite().all() for tensor in checkpoint.weights().values())


def test_a_budget_that_cannot_be_met_leaves_nothing_behind(capsys):
    refuse(capsys, 1, "cannot be met", *PLAN, "--budget", "1KiB", "--out", "a")
    assert not Path("a").exists()


def test_a_full_disk(capsys, monkeypatch):
    train(capsys, "--out", "a", "--max-steps", "5")
    before = Path("a/checkpoint.safetensors").read_bytes()
    # A limit on the size of files, which the kernel enforces in the middle of a write.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        refuse(
            capsys,
            5,
            "cannot be written: File too large; what was there before is unharmed",
            "train",
            "--resume",
            "a",
            "--max-steps",
            "9",
        )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path("a/checkpoint.safetensors").read_bytes() == before
    assert run(capsys, "train", "--resume", "a", "--max-steps", "9")[0] == 0


def test_a_place_where_no_folder_can_be(capsys):
    Path("file").write_text("")
    refuse(capsys, 5, "cannot be made or written: Not a directory", *PLAN, "--out", "file/a")


WRONG = {
    ("train", "models.py:make", "--data", "nowhere"): (3, "there is no data 'nowhere'"),
    ("train", "models.py:narrow", "--data", "data.npz"): (3, "is 3, out of range: the model has 3 outputs"),
    ("train", "models.py:make", "--data", "data.npz", "--batch", "500"): (3, "fewer than a batch of 500"),
    ("train", "models.py:make", "--data", "data.npz", "--accumulate", "50"): (3, "an update takes 50"),
    ("train", "lenet5", "--data", "data.npz"): (3, "the model takes inputs of shape [1, 28, 28], found [12]"),
    ("train", "models.py:make", "--data", "loaders.py:unsized"): (2, "a training and a test loader"),
    ("train", "models.py:make", "--data", "loaders.py:nothing"): (2, "has no function 'nothing'"),
    ("train", "models.py:images", "--data", "data.npz"): (3, "shape [3, 8, 8], found [12]"),
    ("train", "lenett5"): (2, "did you mean lenet5"),
    ("train", "lenet5", "--numerics", "quick"): (2, "numerics 'quick' is not known; can be exact, fast"),
    ("train", "lenet5", "--optimiser", "sgd"): (2, "--optimiser"),
    ("train", "lenet5", "--config", "wrong.toml"): (2, "no option 'learning_rat'"),
    ("train", "lenet5", "--config", "near.toml"): (2, "did you mean weight_decay?"),
    ("train", "lenet5", "--budget", "50%"): (2, "budget"),
    ("train",): (2, "no model is named"),
    ("train", "--resume", "nowhere"): (2, "nowhere holds no run"),
    ("evaluate", "nowhere"): (2, "holds no run"),
    ("predict", "nowhere", "x.png"): (2, "holds no run"),
    ("export", "nowhere", "x.bin"): (2, "weights are written as safetensors"),
    ("report", "nowhere"): (2, "holds no run"),
    ("train", "lenet5", "--data", "input.txt"): (2, "is not a language model"),
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_calls(capsys, words):
    Path("wrong.toml").write_text("learning_rat = 1\n")
    Path("near.toml").write_text("weight_dcay = 1\n")
    Path("input.txt").write_text("abcdef" * 200)
    refuse(capsys, *WRONG[words], *words)
    assert not Path("runs").exists()


def test_after_training(capsys):
    result = train(capsys, "--out", "a", "--budget", "200KiB")
    refuse(capsys, 2, "already holds a run", *PLAN, "--out", "a")
    refuse(capsys, 2, "was started with lr 0.01, but now 0.5 is given", "train", "--resume", "a", "--lr", "0.5")

    code, out, _ = run(capsys, "evaluate", "a", "--json")
    assert code == 0 and json.loads(out)["test_accuracy"] == result["test_accuracy"]
    assert json.loads(out)["test_loss"] == result["test_loss"]

    code, out, _ = run(capsys, "export", "a", "w.safetensors", "--json")
    assert code == 0 and json.loads(out)["weights_sha256"] == result["weights_sha256"]
    weights = safetensors.torch.load_file("w.safetensors")
    model = load_workload(TrainConfig("models.py:make", data="data.npz")).model
    model.load_state_dict(weights)

    numpy.savez("new.npz", x=numpy.load("data.npz")["x"][:3])
    code, out, _ = run(capsys, "predict", "a", "new.npz", "--top", "2", "--json")
    found = json.loads(out)
    assert code == 0 and len(found) == 3 and len(found[0]["classes"]) == 2
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(numpy.load("new.npz")["x"])).softmax(1)
    for item, row in zip(found, expected, strict=True):
        assert item["classes"][0]["class"] == str(int(row.argmax()))
        # A softmax in float32 beside one in float64: four outputs, a few roundings each.
        assert item["classes"][0]["probability"] == pytest.approx(float(row.max()), rel=16 * 2**-24)

    code, out, _ = run(capsys, "report", "a")
    assert code == 0 and "within its budget" in out and "at the peak" in out
    # The loss is no line of the user's here: neither typer's nor this test's, which called the command.
    assert "%nll_loss_forward" in out and "main.py" not in out and "training_commands.py" not in out
    code, out, _ = run(capsys, "report", "a", "--json")
    data = json.loads(out)
    assert data["plan"]["peak_bytes"] == result["predicted_peak_bytes"] and len(data["tests"]) == 3
    code, out, _ = run(capsys, "report", "a", "--html")
    page = Path(out.strip()).read_text()
    assert page.startswith("<!DOCTYPE html>") and "Test accuracy" in page and "Memory over the step" in page
    assert "http://" not in page and "https://" not in page and f"{result['measured_peak_bytes']:,} B" in page

    for path in (Path("a/checkpoint.safetensors"), Path("a/best.safetensors")):
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    for words in (("train", "--resume", "a"), ("evaluate", "a"), ("export", "a", "w.safetensors"), ("report", "a")):
        refuse(capsys, 3, "is damaged", *words)


def test_images_from_folders_to_predictions(capsys):
    for name, level in (("dark", 40), ("light", 200)):
        Path("images", name).mkdir(parents=True)
        for index in range(20):
            pixels = numpy.random.default_rng(index).integers(level - 30, level + 30, (9, 7, 3)).astype("uint8")
            Image.fromarray(pixels).save(f"images/{name}/{index}.png")
    words = ["train", "models.py:images", "--data", "images", "--batch", "4", "--epochs", "2", "--out", "a"]
    assert run(capsys, *words)[0] == 0
    code, out, _ = run(capsys, "predict", "a", "images/light", "--json")
    assert code == 0 and {item["classes"][0]["class"] for item in json.loads(out)} == {"light"}
    code, out, _ = run(capsys, "predict", "a", "images/dark/3.png", "--top", "4")
    assert code == 0 and out.startswith("images/dark/3.png: dark ") and "light" in out
    refuse(capsys, 3, "there is no input", "predict", "a", "missing.png")
    refuse(capsys, 3, "cannot be decoded", "predict", "a", "models.py")


def test_an_array_file_means_the_same_to_every_command(capsys):
    # The pixels of digits go up to 16. An array of bytes would otherwise be taken to go up to 255.
    words = ["train", "lenet300", "--batch", "32", "--epochs", "2", "--out", "a", "--json"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    test = open_data("digits", (1, 28, 28)).test
    arrays = {"x_train": test.inputs, "y_train": test.targets, "x_test": test.inputs, "y_test": test.targets}
    numpy.savez("digits.npz", **{name: item.numpy() for name, item in arrays.items()})
    code, evaluated, _ = run(capsys, "evaluate", "a", "--data", "digits.npz", "--json")
    assert code == 0 and json.loads(evaluated)["test_loss"] == json.loads(out)["test_loss"]
    code, predicted, _ = run(capsys, "predict", "a", "digits.npz", "--json")
    right = [
        item["classes"][0]["class"] == str(int(label))
        for item, label in zip(json.loads(predicted), test.targets, strict=True)
    ]
    assert code == 0 and sum(right) / len(right) == json.loads(out)["test_accuracy"]


def test_a_character_model(capsys):
    Path("input.txt").write_text("to be or not to be, " * 200)
    words = ["train", "char_gpt", "--data", "input.txt", "--batch", "8", "--max-steps", "3", "--optimizer", "adamw"]
    code, out, err = run(capsys, *words, "--out", "a", "--json")
    assert code == 0 and json.loads(out)["steps"] == 3, err
    Path("start.txt").write_text("to be or no\n")
    code, out, _ = run(capsys, "predict", "a", "start.txt", "--top", "3", "--json")
    assert code == 0 and len(json.loads(out)[0]["classes"]) == 3
    Path("start.txt").write_text("Zebra\n")
    refuse(capsys, 3, "character 'Z', which the model was not trained on", "predict", "a", "start.txt")
    # The output layer is the embedding: it is exported under both names, as any reader expects.
    assert run(capsys, "export", "a", "w.safetensors")[0] == 0
    weights = safetensors.torch.load_file("w.safetensors")
    assert torch.equal(weights["head.weight"], weights["token_embedding.weight"])


def test_flags_and_files_say_the_same(capsys):
    Path("plan.toml").write_text('model = "models.py:make"\ndata = "data.npz"\nbatch = 16\nepochs = 3\nseed = 1\n')
    code, out, err = run(capsys, "train", "--config", "plan.toml", "--seed", "7", "--json", "--out", "a")
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == train(capsys, "--out", "b")["weights_sha256"]
    Path("a/config.json").rename("again.json")
    config = json.loads(Path("again.json").read_text())
    assert config["seed"] == 7 and config["epochs"] == 3


def test_an_order_can_be_taken_up_anywhere():
    source = open_data("data.npz", None)
    config = TrainConfig("models.py:make", data="data.npz", batch=16, seed=3)
    feed = Feed(load_workload(config).train_loader, 3)
    before = torch.get_rng_state()
    whole = [targets.tolist() for _, targets in feed.batches(2, 0)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(whole) == len(source.train) // 16
    for first in range(len(whole)):
        assert [targets.tolist() for _, targets in feed.batches(2, first)] == whole[first:]
    assert [targets.tolist() for _, targets in feed.batches(1, 0)] != whole


def test_the_page_of_a_run_judged_by_validation_data(capsys):
    words = (
        "--validation",
        "0.2",
        "--metrics",
        "f1,confusion",
        "--gradient-norm",
        "--ema",
        "0.9",
        "--schedule",
        "cosine",
    )
    result = train(capsys, "--out", "a", *words, "--schedule", "cosine", "--budget", "300KiB")
    records = RunFolder(Path("a")).read_metrics()
    tested = [item for item in records if item["kind"] == "test"]
    assert len(tested) == 1 and sum(map(sum, tested[0]["confusion"])) > 0
    assert run(capsys, "report", "a", "--html")[0] == 0
    page = Path("a/report.html").read_text()
    for text in (
        "Validation accuracy",
        "<dt>Test accuracy</dt>",
        f"<dd>{result['best_epoch'] + 1} of 3<small>validation loss {result['best_loss']:.4f}</small>",
        "Norm of the gradients",
        "Learning rate",
        "Which class was taken for which",
        "Test data, the best weights.",
        "<td>lr</td>",
        f"{result['predicted_peak_bytes']:,} bytes",
        f"f1 {tested[0]['f1']:.4g}",
        "307,200 bytes",
    ):
        assert text in page, text
    assert "Test loss" not in page and "test loss" not in page
    code, out, _ = run(capsys, "report", "a")
    assert code == 0 and "validation loss" in out and "The best weights on the test data" in out
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_held_beside_the_step_is_in_the_peak(capsys):
    result = train(capsys, "--out", "a", "--ema", "0.9")
    assert result["measured_peak_bytes"] <= result["predicted_peak_bytes"]


def test_the_page_of_a_run_with_a_hostile_name(capsys, folder):
    name = "<script>alert(1)</script>"
    (folder / f"{name.replace('/', '')}.npz").write_bytes((folder / "data.npz").read_bytes())
    words = ["--data", f"{name.replace('/', '')}.npz", "--out", "a", "--max-steps", "2"]
    assert run(capsys, *PLAN[:2], *words)[0] == 0
    assert run(capsys, "report", "a", "--html")[0] == 0
    page = Path("a/report.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_the_page_tells_the_passes_apart(capsys):
    train(capsys, "--out", "a", "--budget", "200KiB")
    code, out, _ = run(capsys, "report", "a", "--json")
    assert code == 0 and json.loads(out)["plan"]["peak"]["parts"]["kept activations"] > 0
