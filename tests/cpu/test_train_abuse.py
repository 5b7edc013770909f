"""`undertow train` and related commands, used carelessly or with malice: each case once gave a wrong answer."""

import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from training_commands import PLAN, refuse, run, train

from undertow.cli.workloads import load_trained
from undertow.data.images import decode_image
from undertow.errors import DataError
from undertow.train.checkpoint import save_checkpoint
from undertow.train.folder import RunFolder
from undertow.train.prediction import Prediction
from undertow.train.run import Run

MODELS = """
import torch
from torch import nn

print("loaded")

def make(): return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4))
def one(): return nn.Linear(12, 1)
def frozen(): return nn.Linear(12, 4).requires_grad_(False)

def broken():
    model = make()
    model[4].weight.data[2, 3] = float("nan")
    return model

def images(): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 3)), (torch.zeros(1, 3, 8, 8),)

class Steep(nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x) * 1e19

def steep(): return Steep(12, 4)
"""
WITHOUT_EXAMPLES = """
from torch import nn
def make(): return nn.Linear(12, 4)
def example_inputs(batch): raise ValueError("none")
"""
LOADERS = """
import random
import numpy
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

def draw():
    x = torch.randn(96, 12, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].argmax(1)

def loaders(x, y): return DataLoader(TensorDataset(x, y), 16), DataLoader(TensorDataset(x, y), 16)

def wrong():
    x, y = draw()
    y[40] = 9
    return loaders(x, y)

def wrong_test():
    x, y = draw()
    return loaders(x, y)[0], loaders(x, y + 1)[1]

def ignored():
    x, y = draw()
    y[40] = -100
    return loaders(x, y)

def infinite():
    x, y = draw()
    x[40, 3] = float("nan")
    return loaders(x, y)[0], loaders(*draw())[1]

def split():
    x, y = draw()
    order = numpy.random.permutation(96)
    return loaders(x[order[:64]] + random.random(), y[order[:64]])[0], loaders(x[order[64:]], y[order[64:]])[1]

class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(12), y

def persistent():
    data = Noisy(*draw())
    return DataLoader(data, 16, shuffle=True, num_workers=1, persistent_workers=True), loaders(*draw())[1]

def dictionaries(): return [{"x": 1}], [{"x": 1}]

def sampled():
    data = TensorDataset(*draw())
    order = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, 16, sampler=order), DataLoader(data, 16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in (("models", MODELS), ("loaders", LOADERS), ("without", WITHOUT_EXAMPLES)):
        (tmp_path / f"{name}.py").write_text(text)
    x = numpy.random.default_rng(0).standard_normal((120, 12)).astype("float32")
    numpy.savez(tmp_path / "data.npz", x=x, y=x[:, :4].argmax(1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with torch.random.fork_rng(devices=[]):
        yield tmp_path


def save_data(**changes):
    arrays = dict(numpy.load("data.npz"))
    numpy.savez("changed.npz", **{**arrays, **{name: change(arrays[name]) for name, change in changes.items()}})


@pytest.mark.parametrize("more", [("--save-every", "1"), ("--max-steps", "1"), ("--batch", "96")])
def test_weights_that_are_no_numbers_are_not_saved(capsys, more):
    # A gradient of about 1e19 times this rate overflows: the update is bad, and the loss before it was not.
    words = ["train", "models.py:steep", "--data", "data.npz", "--lr", "1e38", *more, "--out", "a"]
    refuse(capsys, 4, "the weights after step 1 are not finite: in step 1 the update made weights", *words)
    checkpoint = RunFolder(Path("a")).read_checkpoint()
    assert checkpoint.progress.step == 0 and all(item.isfinite().all() for item in checkpoint.weights().values())


def test_models_that_cannot_be_trained(capsys):
    message = "parameter 4.weight holds numbers that are not finite before the first step"
    refuse(capsys, 4, message, "train", "models.py:broken", "--data", "data.npz", "--out", "a")
    refuse(capsys, 2, "there is nothing to train", "train", "models.py:frozen", "--data", "data.npz", "--out", "a")
    words = ["train", "models.py:make", "--data", "loaders.py:dictionaries", "--out", "a"]
    refuse(capsys, 3, "must hold tensors with examples; the loader gave a dict of x", *words)
    assert not Path("a").exists()


def test_data_that_is_no_number_is_named(capsys):
    words = ["train", "models.py:make", "--data", "loaders.py:infinite", "--out", "a"]
    message = (
        "in step 3 the data itself holds numbers that are not finite, first in inputs of batch 1, example 8, column 3"
    )
    refuse(capsys, 4, message, *words)
    code, _, err = run(capsys, *words[:-1], "b")
    assert code == 4 and "(nan)" in err and "leave out that example" in err and "--lr" not in err
    save_data(x=lambda x: numpy.where(numpy.arange(120)[:, None] == 37, numpy.nan, x))
    words = ["train", "models.py:make", "--data", "changed.npz"]
    refuse(capsys, 3, "changed.npz: x[37,0] is nan, not a finite number", *words)


def test_one_process_trains_in_a_folder(capsys):
    train(capsys, "--out", "a")
    script = "import sys, pathlib, undertow.train.folder as f\nwith f.RunFolder(pathlib.Path('a')).lock():\n"
    script += "    print('held', flush=True)\n    sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        refuse(capsys, 2, "another process is training in a", "train", "--resume", "a", "--epochs", "4")
        assert run(capsys, "evaluate", "a")[0] == 0
        other.kill()
    assert run(capsys, "train", "--resume", "a", "--epochs", "4")[0] == 0


def test_two_runs_that_start_in_one_folder(capsys, monkeypatch):
    prepare = Run.prepare

    def slow(self):
        prepare(self)
        RunFolder(Path("a")).path.mkdir()
        Path("a/config.json").write_text("{}")  # as the other run does meanwhile

    monkeypatch.setattr(Run, "prepare", slow)
    refuse(capsys, 2, "already holds a run", *PLAN, "--out", "a")
    assert Path("a/config.json").read_text() == "{}"


def test_an_evaluation_is_recorded_once(capsys, monkeypatch):
    whole = train(capsys, "--out", "whole")
    save = Run.save

    def killed(self):
        if self.progress.epoch == 2:
            self._records.flush()  # the lines are written, the checkpoint that goes with them is not
            raise KeyboardInterrupt
        save(self)

    monkeypatch.setattr(Run, "save", killed)
    assert run(capsys, *PLAN, "--out", "a")[0] == 130
    monkeypatch.setattr(Run, "save", save)
    code, out, _ = run(capsys, "train", "--resume", "a", "--json")
    assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]
    found = [
        [record for record in RunFolder(Path(name)).read_metrics() if record["kind"] != "speed"]
        for name in ("a", "whole")
    ]
    assert found[0] == found[1]


def test_stdout_is_the_results_alone(capsys):
    words = ["train", "models.py:steep", "--data", "data.npz", "--lr", "1e-30", "--max-steps", "2", "--out", "a"]
    code, out, err = run(capsys, *words, "--json")
    assert code == 0 and json.loads(out)["steps"] == 2
    assert "loaded" in err and "forward" in err
    assert json.loads(run(capsys, "evaluate", "a", "--json")[1])["examples"] == 24


def test_a_run_whose_output_nobody_takes(capsys):
    whole = train(capsys, "--out", "whole")
    start = f"set -o pipefail; {sys.executable} -m undertow {' '.join(PLAN)}"
    done = subprocess.run(["bash", "-c", f"{start} --out a >/dev/full"], capture_output=True, text=True)
    assert done.returncode == 5 and done.stderr.endswith(
        "\nundertow: stdout cannot be written: No space left on device\n"
    )
    assert "Traceback" not in done.stderr
    done = subprocess.run(["bash", "-c", f"{start} --out b 2>&1 | true"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
    assert run(capsys, *PLAN, "--out", "b")[0] == 0  # the first run could not write its first line, and made no folder
    for name in ("a", "b"):
        code, out, _ = run(capsys, "export", name, "w.safetensors", "--json")
        assert code == 0 and json.loads(out)["weights_sha256"] == whole["weights_sha256"]


def test_an_export_does_not_replace_the_checkpoint(capsys):
    train(capsys, "--out", "a")
    refuse(capsys, 2, "the run's own checkpoint", "export", "a", "a/checkpoint.safetensors")
    assert run(capsys, "evaluate", "a")[0] == 0


@pytest.mark.parametrize("factory", ["split", "sampled", "persistent"])
def test_whatever_loaders_draw_from_is_seeded(capsys, factory):
    words = ["train", "models.py:make", "--data", f"loaders.py:{factory}", "--epochs", "3", "--json"]
    whole = json.loads(run(capsys, *words, "--out", "whole")[1])
    numpy.random.seed(None)
    random.seed()
    assert run(capsys, *words, "--out", "parts", "--max-steps", "6")[0] == 0
    numpy.random.seed(None)
    random.seed()
    code, out, err = run(capsys, "train", "--resume", "parts", "--max-steps", "100", "--json")
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == whole["weights_sha256"]


def test_labels_of_loaders_of_ones_own(capsys):
    start = ["train", "models.py:make", "--epochs", "1"]
    message = "training data, epoch 1, step 3: the label of example 8 is 9, out of range: the model has 4 outputs"
    refuse(capsys, 3, message, *start, "--data", "loaders.py:wrong", "--out", "a")
    refuse(capsys, 3, "test data, batch 1", *start, "--data", "loaders.py:wrong_test", "--out", "b")
    code, _, err = run(capsys, *start, "--data", "loaders.py:ignored", "--out", "c")
    assert code == 0, err
    save_data(y=lambda y: y + 1)
    assert run(capsys, *PLAN, "--out", "d")[0] == 0
    refuse(capsys, 3, "out of range: the model has 4 outputs", "evaluate", "d", "--data", "changed.npz")


@pytest.mark.parametrize(
    "model, loss, change, message",
    [
        ("make", "cross_entropy", lambda y: y.astype("float64"), "takes targets of shape [16], whole numbers; found"),
        ("make", "cross_entropy", lambda y: y[:, None], "takes targets of shape [16], whole numbers; found"),
        ("one", "mse_loss", lambda y: y.astype("float32"), "takes targets of shape [16, 1], floating-point numbers"),
        ("one", "mse_loss", lambda y: y[:, None], "takes targets of shape [16, 1], floating-point numbers; found"),
    ],
    ids=["float labels", "labels in a column", "broadcast", "whole numbers"],
)
def test_targets_that_are_not_for_the_loss(capsys, model, loss, change, message):
    save_data(y=change)
    refuse(capsys, 3, message, "train", f"models.py:{model}", "--loss", loss, "--data", "changed.npz")


def test_numbers_are_not_shown_as_probabilities(capsys):
    save_data(y=lambda y: y[:, None].astype("float32"))
    words = ["train", "models.py:one", "--loss", "mse_loss", "--data", "changed.npz", "--max-steps", "2", "--out", "a"]
    assert run(capsys, *words)[0] == 0
    code, out, _ = run(capsys, "predict", "a", "data.npz", "--json")
    found = json.loads(out)
    assert code == 0 and found[0].keys() == {"input", "outputs"}
    trained = load_trained("a", "cpu")
    inputs = trained.preparation(torch.from_numpy(numpy.load("data.npz")["x"][5:6]))
    with torch.no_grad():
        assert found[5]["outputs"] == trained.model.eval()(inputs)[0].tolist()
    assert run(capsys, "predict", "a", "data.npz")[1].startswith("data.npz[0]: [")


def test_classes_that_cannot_be_seen():
    assert (
        str(Prediction("a.txt", (("\n", 0.5), (" ", 0.25), ("a b", 0.25))))
        == "a.txt: '\\n' 50.00%, ' ' 25.00%, a b 25.00%"
    )


def write_npz(header):
    text = header.encode() + b"\n"
    with zipfile.ZipFile("bad.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)


@pytest.mark.parametrize("header", ["(((", "{'descr':" + "-" * 9000 + "1}", "[" * 500], ids=["open", "deep", "nested"])
def test_headers_that_are_no_headers(capsys, header):
    write_npz(header)
    refuse(capsys, 3, "bad.npz cannot be read as .npz", "train", "models.py:make", "--data", "bad.npz")


def test_arrays_that_are_no_rows(capsys):
    start = ["train", "models.py:make", "--data"]
    numpy.savez("zero.npz", x=numpy.float32(3), y=numpy.int64(1))
    refuse(capsys, 3, "it must hold rows of real numbers", *start, "zero.npz")
    save_data(x=lambda x: x.astype("complex64"))
    refuse(capsys, 3, "it must hold rows of real numbers", *start, "changed.npz")
    save_data(x=lambda x: numpy.zeros((120, 0, 5), "float32"))
    refuse(capsys, 3, "have no pixels", *start, "changed.npz")
    data = bytearray(Path("data.npz").read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = -1
        while (place := data.find(mark, place + 1)) >= 0:
            data[place + offset] |= 1  # the member says that it is encrypted
    Path("secret.npz").write_bytes(data)
    refuse(capsys, 3, "encrypted", *start, "secret.npz")


def test_words_that_cannot_be_meant(capsys):
    refuse(capsys, 2, "seed must be at most", *PLAN, "--seed", str(2**64))
    refuse(capsys, 2, "ValueError: none (without.py:4)", "train", "without.py:make", "--data", "data.npz")
    train(capsys, "--out", "a")
    refuse(capsys, 2, "but --out is b", "train", "--resume", "a", "--out", "b", "--epochs", "4")
    Path("word.yaml").write_text("model: lenet5\nlr: fast\n")
    refuse(capsys, 2, "lr must be a number, got 'fast'", "train", "--config", "word.yaml")
    Path("large.yaml").write_text("model: lenet5\nlr: " + "9" * 400 + "\n")
    refuse(capsys, 2, "lr must be a number, got 9999", "train", "--config", "large.yaml")
    # Each line holds the line before ten times: expanded, it would fill the memory.
    Path("laughs.yaml").write_text(
        "a0: &a0 [1]\n"
        + "".join(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(12))
        + "lr: *a12\n"
    )
    refuse(capsys, 2, "there is no option 'a0'", "train", "--config", "laughs.yaml")
    Path("laughs.yaml").write_text(
        "lr: [&a [1, 1], "
        + ", ".join(f"&{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]" for n in range(12))
        + "]\n"
    )
    refuse(capsys, 2, "lr must be a number, got [", "train", "--config", "laughs.yaml")
    Path("deep.yaml").write_text("[" * 5000)
    refuse(capsys, 2, "deep.yaml cannot be read", "train", "--config", "deep.yaml")


def test_a_page_that_cannot_be_written(capsys):
    train(capsys, "--out", "a")
    Path("a/report.html").mkdir()
    refuse(capsys, 5, "report.html cannot be written", "report", "a", "--html")


def make_images(root, names=("dark", "light")):
    for level, name in enumerate(names):
        Path(root, name).mkdir(parents=True)
        for index in range(10):
            pixels = numpy.random.default_rng(index).integers(0, 50, (9, 7, 3)) + 150 * level
            Image.fromarray(pixels.astype("uint8")).save(Path(root, name, f"{index}.png"))


def test_folders_of_images_as_people_have_them(capsys):
    make_images("data/train")
    Path("data/train/dark/._0.png").write_bytes(b"resource fork")
    Path("data/train/dark/thumbs.png").mkdir()
    words = ["train", "models.py:images", "--data", "data", "--batch", "4", "--epochs", "2", "--out", "a"]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    # Three outputs, two classes.
    code, out, _ = run(capsys, "predict", "a", "data/train/dark", "--top", "3", "--json")
    assert code == 0 and len(json.loads(out)) == 10
    assert {item["class"] for item in json.loads(out)[0]["classes"]} == {"dark", "light", "2"}
    refuse(capsys, 3, "this one has [12]", "predict", "a", "data.npz")


def test_pixels_of_more_than_eight_bits():
    Image.fromarray(numpy.full((4, 4), 30000, "uint16")).save("deep.png")
    assert decode_image(Path("deep.png")).unique().tolist() == [30000 >> 8]
    Image.fromarray(numpy.full((4, 4), 3.0, "float32")).save("float.tiff")
    with pytest.raises(DataError, match="no largest value"):
        decode_image(Path("float.tiff"))


def test_a_name_that_is_no_text(capsys):
    make_images("data")
    words = ["train", "models.py:images", "--data", "data", "--batch", "4", "--max-steps", "2", "--out", "a"]
    assert run(capsys, *words)[0] == 0
    Path("new").mkdir()
    Path("data/dark/0.png").rename(os.fsdecode(b"new/\xff.png"))
    assert run(capsys, "predict", "a", "new")[0] == 0


def rewrite(path, change):
    arrays = dict(numpy.load(path))
    change(arrays)
    numpy.savez(path, **arrays)


def drop_example(arrays):
    arrays.update(x=arrays["x"][:-1], y=arrays["y"][:-1])


def change_number(arrays):
    arrays["x"][77, 5] += 1


def change_label(arrays):
    arrays["y"][77] = 3 - arrays["y"][77]


@pytest.mark.parametrize(
    "change, message",
    [
        (drop_example, "test examples: 24 then, 23 now"),
        (change_number, "hash: "),
        (change_label, "hash: "),
    ],
)
def test_data_that_changed_since_the_run_began(capsys, change, message):
    train(capsys, "--out", "a")
    before = Path("a/checkpoint.safetensors").read_bytes()
    rewrite("data.npz", lambda arrays: None)  # the same numbers in another file
    assert run(capsys, "train", "--resume", "a", "--epochs", "3")[0] == 0
    rewrite("data.npz", change)
    refuse(capsys, 3, message, "train", "--resume", "a", "--epochs", "4")
    assert Path("a/checkpoint.safetensors").read_bytes() == before
    assert run(capsys, "evaluate", "a")[0] == 0


def test_files_and_loaders_that_changed_since_the_run_began(capsys):
    make_images("data")
    words = ["train", "models.py:images", "--data", "data", "--batch", "4", "--max-steps", "2"]
    assert run(capsys, *words, "--out", "a")[0] == run(capsys, "train", "--resume", "a", "--max-steps", "3")[0] == 0
    Path("data/dark/3.png").write_bytes(Path("data/light/3.png").read_bytes())
    refuse(capsys, 3, "hash: ", "train", "--resume", "a", "--max-steps", "4")

    Path("input.txt").write_text("to be or not to be, " * 200)
    words = ["train", "char_gpt", "--data", "input.txt", "--batch", "8", "--max-steps", "2"]
    assert run(capsys, *words, "--out", "b")[0] == 0
    Path("input.txt").write_text("TO BE OR NOT TO BE, " * 200)
    refuse(capsys, 3, "hash: ", "train", "--resume", "b", "--max-steps", "3")

    words = ["train", "models.py:make", "--data", "loaders.py:sampled", "--max-steps", "2"]
    assert run(capsys, *words, "--out", "c")[0] == 0
    Path("loaders.py").write_text(LOADERS.replace("randn(96", "randn(80"))
    message = "training batches: 6 then, 5 now; training examples: 96 then, 80 now"
    refuse(capsys, 3, message, "train", "--resume", "c", "--max-steps", "3")


def change_step(checkpoint):
    checkpoint.progress.step = -5


@pytest.mark.parametrize(
    "change",
    [
        lambda checkpoint: checkpoint.about.clear(),
        lambda checkpoint: checkpoint.about.pop("data"),
        lambda checkpoint: checkpoint.about["environment"].update(num_threads=0),
        lambda checkpoint: checkpoint.tensors.pop("generator/cpu"),
        lambda checkpoint: checkpoint.tensors.update({"optimizer/77/momentum_buffer": torch.zeros(3)}),
        lambda checkpoint: checkpoint.tensors.update({"optimizer/0/momentum_buffer": torch.zeros(3)}),
        change_step,
    ],
    ids=["empty", "data", "threads", "generator", "index", "shape", "step"],
)
def test_checkpoints_with_a_right_hash_and_a_wrong_state(capsys, change):
    train(capsys, "--out", "a")
    checkpoint = RunFolder(Path("a")).read_checkpoint()
    change(checkpoint)
    save_checkpoint(Path("a/checkpoint.safetensors"), checkpoint)
    refuse(capsys, 3, "is refused", "train", "--resume", "a", "--epochs", "4")


def test_records_that_somebody_changed(capsys):
    train(capsys, "--out", "a")
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 1, "kind": "test", "loss": "x", "train_loss": "y", "epoch": 0}\n' + "[" * 100_000 + "\n")
        for matrix in ('"x"', "[[1], [2, 3]]", "[[-1]]", "[[1.5]]", "[]", str([[1] * 25] * 25), "[[1e999]]"):
            file.write(f'{{"step": 1, "kind": "test", "loss": 1, "confusion": {matrix}}}\n')
        file.write('{"step": 1, "kind": "speed", "examples": "1", "seconds": -1}\n')
        file.write('{"step": 1, "kind": "speed", "examples": 9e9, "seconds": 0}\n')
        file.write('{"step": 1, "kind": "train", "lr": -1, "loss": -5, "gradient_norm": null}\n')
    for words in ((), ("--json",), ("--html",)):
        assert run(capsys, "report", "a", *words)[0] == 0
