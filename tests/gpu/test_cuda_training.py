"""`undertow train` on a GPU: eager's weights, resuming, budgets, averages, and loaders that are hidden."""

import json
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from undertow.cli import main
from undertow.hashing import hash_tensors
from undertow.train.batches import Batch
from undertow.train.devices import Batches
from undertow.train.feeding import Feed
from undertow.train.folder import RunFolder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODELS = """
from torch import nn
def make():
    hidden = [nn.Linear(12, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(512, 4))
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make()
    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
def own(): return Own()
class Convolving(nn.Module):
    def __init__(self, does_view):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
        self.out, self.does_view = nn.Linear(16 * 12 * 12, 4), does_view
    def forward(self, x):
        hidden = self.body(x)
        return self.out(hidden.view(len(x), -1) if self.does_view else hidden.flatten(1))
def flattening(): return Convolving(False)
def viewing(): return Convolving(True)
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
def pairs():
    x = torch.randn(128, 12, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 16)
class Named(TensorDataset):
    def __getitem__(self, index):
        x, labels = super().__getitem__(index)
        return {"x": x, "labels": labels}
def named():
    x = torch.randn(128, 12, generator=torch.Generator().manual_seed(0))
    data = Named(x, x[:, :4].argmax(1))
    return DataLoader(data, 16, shuffle=True), DataLoader(data, 16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "loaders.py").write_text(LOADERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield
    for name in ("models", "loaders"):
        sys.modules.pop(name, None)


def train(capsys, *words):
    code = main(["train", *words, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_weights_are_eagers(capsys, optimizer):
    words = ("models.py:make", "--data", "loaders.py:pairs", "--epochs", "2", "--optimizer", optimizer)
    result = train(capsys, *words, "--schedule", "cosine", "--out", "a", "--device", "cuda")
    import loaders
    import models

    torch.manual_seed(0)
    feed = Feed(loaders.pairs()[0], 0)
    torch.manual_seed(0)
    model = models.make().cuda()
    rate = torch.tensor(0.01 if optimizer == "sgd" else 1e-3, device="cuda")
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, fused=True),
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=True, capturable=True),
    }[optimizer]()
    from undertow.train.config import TrainConfig
    from undertow.train.schedules import make_schedule

    schedule = make_schedule(TrainConfig("m", schedule="cosine"), [float(rate)])
    step = 0
    for epoch in range(2):
        for x, y in feed.batches(epoch, 0):
            made.param_groups[0]["lr"].fill_(schedule.at(step, 16)[0])
            nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
            made.step()
            made.zero_grad()
            step += 1
    assert result["weights_sha256"] == hash_tensors(model.state_dict())


@pytest.mark.parametrize("model, data", [("make", "pairs"), ("own", "named")])
@pytest.mark.parametrize("numerics", ["exact", "bf16"])
def test_a_resumed_run_ends_in_the_same_bits(capsys, model, data, numerics):
    words = (f"models.py:{model}", "--data", f"loaders.py:{data}", "--epochs", "3", "--numerics", numerics)
    words = (*words, "--optimizer", "adamw", "--ema", "0.9", "--budget", "200MiB")  # of which cuBLAS takes 64
    whole = train(capsys, *words, "--out", "whole")
    assert whole["measured_peak_bytes"] <= 200 << 20
    train(capsys, *words, "--out", "parts", "--max-steps", "11")
    resumed = train(capsys, "--resume", "parts", "--max-steps", "1000")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    kept = [RunFolder(Path(name)).read_trained(False, None).trained_weights() for name in ("whole", "parts")]
    assert hash_tensors(kept[0]) == hash_tensors(kept[1])
    for words in (["evaluate", "whole"], ["evaluate", "whole", "--device", "cpu"], ["report", "whole"]):
        assert main(words) == 0
    assert main(["train", "--resume", "parts", "--device", "cpu"]) == 2


def test_a_step_with_a_changing_rate_is_one_graph(capsys):
    words = ("models.py:make", "--data", "loaders.py:pairs", "--epochs", "3", "--optimizer", "adamw")
    from undertow.train.run import Run

    steps = []
    plan = Run._plan

    def note(self, batch):
        plan(self, batch)
        steps.append(self.step)

    Run._plan = note
    try:
        train(capsys, *words, "--schedule", "cosine", "--out", "a")
    finally:
        Run._plan = plan
    assert any("captured as a CUDA graph, which holds" in line for line in steps[0].plan.notes)


def images(folder):
    draw = numpy.random.default_rng(0)
    numpy.savez(
        folder / "images.npz", x=draw.integers(0, 256, (200, 3, 16, 16)).astype("uint8"), y=numpy.arange(200) % 4
    )


@pytest.mark.parametrize("numerics", ["exact", "bf16"])
def test_images_with_augmentation_and_workers_resume_to_the_same_bits(capsys, tmp_path, numerics):
    images(tmp_path)
    words = ("models.py:flattening", "--data", "images.npz", "--augment", "crop,flip", "--nesterov", "--ema", "0.9")
    words = (*words, "--numerics", numerics, "--epochs", "3", "--schedule", "cosine", "--batch", "32")
    whole = train(capsys, *words, "--out", "whole")
    # The schedule follows from the length of the run, so it is stopped in the middle and not made shorter.
    Path("stop.py").write_text("def on_step(record): return record['step'] == 7")
    Path("go_on.py").write_text("def on_step(record): pass")
    stopped = train(capsys, *words, "--out", "parts", "--callbacks", "stop.py", "--workers", "2")
    assert stopped["steps"] < whole["steps"]
    resumed = train(capsys, "--resume", "parts", "--callbacks", "go_on.py", "--workers", "3")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    about = RunFolder(Path("whole")).read_checkpoint().about
    assert about.get("is_channels_last") is (True if numerics == "bf16" else None)
    for command in (["evaluate", "whole"], ["evaluate", "whole", "--device", "cpu"], ["report", "whole"]):
        assert main(command) == 0


def test_a_model_that_views_keeps_its_layout(capsys, tmp_path):
    images(tmp_path)
    words = ["train", "models.py:viewing", "--data", "images.npz", "--numerics", "bf16", "--max-steps", "2"]
    code = main([*words, "--out", "a"])
    _, err = capsys.readouterr()
    assert code == 0 and "the model keeps the layout of its factory: view size is not compatible" in err


def test_no_step_waits_for_the_gpu(capsys, monkeypatch):
    from undertow.train.run import Run

    start, num_checked = Run.start_update, []

    def strict(self, group):
        if self.progress.step < 8:  # kernels are chosen, and the graph is captured
            return start(self, group)
        torch.cuda.set_sync_debug_mode("error")
        try:
            num_checked.append(self.progress.step)
            return start(self, group)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Run, "start_update", strict)
    words = ("models.py:make", "--data", "loaders.py:pairs", "--epochs", "3", "--optimizer", "adamw", "--ema", "0.9")
    train(capsys, *words, "--schedule", "cosine", "--gradient-norm", "--out", "a")
    assert len(num_checked) == 16


def test_losses_are_read_one_step_late(capsys):
    Path("calls.py").write_text(
        "seen = []\ndef on_step(record):\n    seen.append(record['step'])\n    return record['step'] == 5\n"
        "def on_end(result): open('seen', 'w').write(repr(seen))\n"
    )
    words = ("models.py:make", "--data", "loaders.py:pairs", "--epochs", "3", "--callbacks", "calls.py")
    assert train(capsys, *words, "--out", "a")["steps"] == 6 and json.loads(Path("seen").read_text()) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


def test_a_loader_that_takes_half_a_step_is_hidden():
    matrix = torch.randn(8192, 8192, device="cuda")

    def compute():
        out = matrix
        for _ in range(8):
            out = out @ matrix
        return out.sum()

    compute()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        compute()
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - start) / 10

    def slow(num):
        for _ in range(num):
            time.sleep(step_s / 2)
            yield torch.randn(64, 3, 64, 64)

    def loop(batches):
        start = time.perf_counter()
        for _ in batches:
            value = compute()
            batches.fetch()
            float(value)
        return time.perf_counter() - start

    loop(Batches(slow(4), lambda raw: Batch((raw,), {}, ()), torch.device("cuda", 0)))
    hidden = loop(Batches(slow(20), lambda raw: Batch((raw,), {}, ()), torch.device("cuda", 0)))
    # Loading between the steps would take 1.5 times as long; a tenth is for copies and waits.
    assert hidden < 1.1 * (20.5 * step_s)


def test_copied_batches_are_what_the_loader_gave():
    given = [torch.randn(1000, 100) for _ in range(50)]
    batches = Batches(iter(given), lambda raw: Batch((raw,), {}, (raw[:1],)), torch.device("cuda", 0))
    found = []
    for batch in batches:
        batches.fetch()
        found.append(batch.args[0] * 1)
        del batch
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, given, strict=True))


def test_a_gpu_without_memory_left(capsys):
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (300 << 20), dtype=torch.uint8, device="cuda")
    Path("big.py").write_text("from torch import nn\ndef make(): return nn.Linear(12, 40_000_000)\n")
    code = main(["train", "big.py:make", "--data", "loaders.py:pairs", "--out", "a"])
    _, err = capsys.readouterr()
    assert code == 2 and "do not fit into the memory of" in err and "Traceback" not in err
    del hog
