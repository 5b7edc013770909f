"""`undertow train` with data options, through the command line: workers, augmentation, validation, class weights.

Whether torchvision is there or not, a stand-in for its transforms shows that draws depend on seed, epoch and place
alone. That `crop` and `flip` are torchvision's, and what else it does, is tested where it can be imported.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from training_commands import refuse, run, users_folder

from undertow.cli.workloads import load_workload
from undertow.data.augmentation import Augmentation, import_transforms
from undertow.data.images import decode_image
from undertow.data.preparation import Preparation
from undertow.errors import CallError
from undertow.train.config import TrainConfig
from undertow.train.feeding import EpochOrder, Feed, make_train_loader
from undertow.train.folder import RunFolder

MODELS = """
import torch
from torch import nn

def make():
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 3))
def vectors(): return nn.Linear(12, 4)
"""
LOADERS = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def part(count):
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 16)
def three(): return part(64), part(32), part(48)
def two(): return part(64), part(48)
def empty(): return part(64), [], part(48)
"""
# Draws as torchvision's transforms do, from torch's own generator.
STAND_IN = """
import types
import torch
import undertow.data.augmentation

def jitter(*unused): return lambda image: image + 0.1 * torch.rand(image.shape[-1])
class Box:
    def get_params(image, share, ratio):
        top, left = (int(torch.randint(side - 4, ())) for side in image.shape[-2:])
        return top, left, 4, 4
made = types.SimpleNamespace(ColorJitter=jitter, RandomResizedCrop=Box)
undertow.data.augmentation.import_transforms = lambda: made
"""
WORDS = ["train", "models.py:make", "--data", "images", "--image-size", "8", "--batch", "8", "--epochs", "3"]
CHANGED = [*WORDS, "--augment", "resized-crop,crop,flip,jitter", "--validation", "0.2", "--save-every", "1", "--json"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name, text in (("models", MODELS), ("loaders", LOADERS), ("stand_in", STAND_IN)):
        (tmp_path / f"{name}.py").write_text(text)
    x = numpy.random.default_rng(0).standard_normal((120, 12)).astype("float32")
    numpy.savez(tmp_path / "data.npz", x=x, y=x[:, :4].argmax(1))
    draw = numpy.random.default_rng(1)
    for label, name in enumerate(("a", "b", "c")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(10 + 10 * label):
            pixels = draw.integers(40 * label, 40 * label + 100, (9 + index % 2, 7, 3)).astype("uint8")
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{index}.png")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("undertow.data.augmentation.import_transforms", import_transforms)
    with users_folder(tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        yield tmp_path


def finish(capsys, *words):
    code, out, err = run(capsys, *words)
    assert code == 0, err
    return json.loads(out)["weights_sha256"]


def children():
    found = subprocess.run(["ps", "-o", "pid=,comm=", "--ppid", str(os.getpid())], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if "python" in line or "pytest" in line]


def test_workers_and_a_resume_change_no_bit(capsys):
    importlib.import_module("stand_in")
    before = children()
    whole = finish(capsys, *CHANGED, "--out", "whole")
    assert whole != finish(capsys, *WORDS, "--validation", "0.2", "--json", "--out", "plain")
    assert finish(capsys, *CHANGED, "--workers", "2", "--out", "two") == whole
    finish(capsys, *CHANGED, "--workers", "1", "--out", "parts", "--max-steps", "7")
    assert finish(capsys, "train", "--resume", "parts", "--max-steps", "1000", "--workers", "2", "--json") == whole
    assert children() == before


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)]
)
def test_a_run_with_workers_that_is_stopped(capsys, number):
    importlib.import_module("stand_in")
    whole = finish(capsys, *CHANGED, "--out", "whole")
    program = "import signal, sys, stand_in\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from undertow.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", program, *CHANGED, "--workers", "2", "--out", "a"]
    metrics = Path("a/metrics.jsonl")
    with subprocess.Popen(
        words, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") > 4):
            time.sleep(0.001)
        if number == signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, number)  # as a terminal does, and `timeout`
        out, err = process.communicate(timeout=60)  # ends when the last worker has closed its copy of stderr
    assert process.returncode in {signal.SIGKILL: (-9, 0), signal.SIGINT: (130, 0), signal.SIGTERM: (143, 0)}[number]
    assert "Traceback" not in err
    assert finish(capsys, "train", "--resume", "a", "--json") == whole


def test_a_config_of_before_has_none_of_the_options(capsys):
    whole = finish(capsys, *WORDS, "--json", "--out", "whole")
    finish(capsys, *WORDS, "--json", "--out", "a", "--max-steps", "5")
    config = json.loads(Path("a/config.json").read_text())
    for name in ("columns", "normalise", "augment", "validation", "class_weights", "workers"):
        del config[name]
    Path("a/config.json").write_text(json.dumps(config))
    assert finish(capsys, "train", "--resume", "a", "--max-steps", "1000", "--json") == whole
    refuse(
        capsys,
        2,
        "was started without augment, but now ['flip'] is given",
        "train",
        "--resume",
        "a",
        "--augment",
        "flip",
    )


def test_the_order_is_that_of_earlier_versions():
    # Before, a DataLoader drew a number for its workers and then the sampler drew the order, from torch's generator.
    feed = Feed(
        make_train_loader(load_workload(TrainConfig("models.py:vectors", data="data.npz")).train_loader.dataset, 8), 5
    )
    found = torch.cat([inputs for inputs, _ in feed.batches(2, 0)])
    order = feed.loader.batch_sampler
    torch.manual_seed(order.epoch_seed)
    torch.empty((), dtype=torch.int64).random_()
    examples = feed.loader.dataset
    expected, _ = examples.fetch(torch.randperm(len(examples))[: len(found)].tolist())
    assert torch.equal(found, expected)


def test_each_place_of_an_epoch_has_its_own_seed():
    order = EpochOrder(40, 8, is_drawing=True)
    order.epoch_seed = 3
    draws = [draw for batch in order for draw in batch]
    assert sorted(draw.example for draw in draws) == list(range(40)) and len({draw.seed for draw in draws}) == 40
    order.first = 3
    assert [draw for batch in order for draw in batch] == draws[24:]
    order.first, order.epoch_seed = 0, 4
    assert {draw.seed for batch in order for draw in batch}.isdisjoint(draw.seed for draw in draws)


def test_what_the_first_image_decides_is_said(capsys):
    words = ["train", "models.py:make", "--data", "images", "--batch", "8", "--max-steps", "1", "--out", "a"]
    code, _, err = run(capsys, *words)
    lines = [line for line in err.splitlines() if "resized to" in line]
    assert code == 0 and len(lines) == 1 and "--image-size was not given" in lines[0] and "images/" in lines[0], err
    code, _, err = run(capsys, *words[:-1], "b", "--image-size", "10x6")
    assert code == 0 and "resized" not in err
    assert RunFolder(Path("b")).read_checkpoint().about["data"]["preparation"]["shape"] == [3, 10, 6]


def test_validation_parts(capsys, folder):
    workload = load_workload(TrainConfig("models.py:make", data="images", image_size="8", validation="0.25", batch=8))
    train, validation = workload.train_loader.dataset, workload.validation_loader.dataset
    assert (len(train), len(validation), len(workload.test_loader.dataset)) == (36, 12, 12)
    # The mean is that of the training examples that are left.
    pixels = torch.cat([train.whole.sample([index]) for index in train.indices.tolist()]).double()
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(workload.preparation.mean, dtype=torch.float64))
    for index in range(6):
        (folder / "more" / "c").mkdir(parents=True, exist_ok=True)
        (folder / "more" / "c" / f"{index}.png").write_bytes((folder / "images" / "c" / f"{index}.png").read_bytes())
    workload = load_workload(TrainConfig("models.py:make", data="images", image_size="8", validation="more", batch=8))
    validation = workload.validation_loader.dataset
    # `more` has one class, which is number 2 of the training data, and all of its images are taken.
    assert validation.targets.tolist() == [2] * 6 and len(workload.train_loader.dataset) == 48
    assert {len(targets) for _, targets in workload.validation_loader} == {6}
    names = workload.describe()["fingerprint"]
    assert names["validation examples"] == 6 and "validation hash" in names
    (folder / "more" / "c").rename(folder / "more" / "d")
    refuse(capsys, 3, "has the class 'd', which the training data does not have", *WORDS, "--validation", "more")
    words = ["train", "models.py:vectors", "--data", "loaders.py:three", "--epochs", "1", "--json", "--out", "three"]
    assert run(capsys, *words)[0] == 0
    found = RunFolder(Path("three")).read_checkpoint().about["data"]["fingerprint"]
    assert (found["validation examples"], found["test examples"]) == (32, 48)


def test_class_weights():
    config = TrainConfig("models.py:make", data="images", image_size="8", class_weights="balanced", batch=8)
    workload = load_workload(config)
    counts = workload.train_loader.dataset.targets.bincount()
    from sklearn.utils.class_weight import compute_class_weight

    targets = workload.train_loader.dataset.targets.numpy()
    expected = compute_class_weight("balanced", classes=numpy.arange(len(counts)), y=targets)
    assert torch.equal(workload.class_weights, torch.from_numpy(expected).float())
    given = load_workload(TrainConfig("models.py:make", data="images", image_size="8", class_weights="1,2,0.5"))
    assert given.class_weights.tolist() == [1, 2, 0.5]


def test_statistics_can_be_given():
    words = {"data": "images", "image_size": "8", "batch": 8}
    workload = load_workload(TrainConfig("models.py:make", normalise="0.5,0.4,0.3/0.25,0.5,1", **words))
    plain = load_workload(TrainConfig("models.py:make", normalise="0/1", **words))
    (found, _), (stored, _) = (item.test_loader.dataset[0] for item in (workload, plain))
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.25, 0.5, 1]).view(3, 1, 1)
    assert stored.min() >= 0 and stored.max() <= 1 and torch.equal(found, (stored - mean) / std)


def test_a_file_that_a_worker_cannot_read_is_named(capsys, folder):
    # Only the first image and a sample are decoded before training; with one deviation given, only the first.
    path = folder / "images" / "b" / "7.png"
    path.write_bytes(path.read_bytes()[:-40])
    words = [*WORDS, "--normalise", "0/1", "--out", "a"]
    refuse(capsys, 3, "images/b/7.png cannot be decoded as an image: ", *words[:-1], "b", "--workers", "2")
    refuse(capsys, 3, "images/b/7.png cannot be decoded as an image: ", *words)


WRONG = {
    ("--image-size", "0"): (2, "--image-size 0: give one number of pixels"),
    ("--image-size", "8x8x8"): (2, "--image-size 8x8x8"),
    ("--augment", "crop,spin"): (2, "there is no 'spin'; it takes resized-crop, crop, flip, jitter"),
    ("--augment", "flip,flip"): (2, "a name is given twice"),
    ("--validation", "0"): (2, "a share is between 0 and 1"),
    ("--validation", "1.0"): (2, "a share is between 0 and 1"),
    ("--validation", "nan"): (2, "a share is between 0 and 1"),
    ("--validation", "0.03"): (3, "are 1 for validation; at least one for each of 3 classes is needed"),
    ("--validation", "nowhere"): (3, "there is no data 'nowhere'"),
    ("--class-weights", "1,2"): (3, "gives 2 numbers, but the data has 3 classes"),
    ("--class-weights", "1,-2,1"): (2, "one number of at least 0 per class"),
    ("--class-weights", "even"): (2, "give balanced, or one number"),
    ("--normalise", "0.5/0"): (2, "deviations of more than 0"),
    ("--normalise", "0.5,0.5/1,1"): (3, "gives 2 means, but images: inputs have 3"),
    ("--columns", "image,label"): (2, "images is no table"),
    ("--workers", "-1"): (2, "workers must be at least 0"),
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_options(capsys, words):
    start = WORDS if words[0] != "--image-size" else [*WORDS[:4], *WORDS[6:]]
    refuse(capsys, *WRONG[words], *start, *words, "--out", "a")
    assert not Path("a").exists()


def test_data_that_cannot_be_trained_on(capsys, folder):
    vectors = ["train", "models.py:vectors", "--data", "data.npz", "--out", "a"]
    refuse(capsys, 3, "holds no images, which --image-size is for", *vectors, "--image-size", "8")
    (folder / "images" / "empty").mkdir()
    refuse(capsys, 3, "images/empty has no images, but each folder in images is a class", *WORDS)
    (folder / "images" / "empty").rmdir()
    numpy.savez("one.npz", x=numpy.zeros((40, 12), "float32"), y=numpy.full(40, 3))
    refuse(capsys, 3, "all 32 training examples have the class 3", *vectors[:3], "one.npz", "--out", "a")
    refuse(capsys, 3, "class 0 has no training example", *vectors[:3], "one.npz", "--class-weights", "balanced")
    refuse(capsys, 3, "there are 2 class weights, but the model has 4 outputs", *vectors, "--class-weights", "1,2")
    loaders = ["train", "models.py:vectors", "--data", "loaders.py:two", "--out", "a"]
    for option in (("--validation", "0.1"), ("--workers", "2"), ("--augment", "flip"), ("--image-size", "8")):
        refuse(capsys, 2, f"{option[0]} is not for loaders of your own", *loaders, *option)
    refuse(capsys, 2, "balanced would have to read all", *loaders, "--class-weights", "balanced")
    refuse(capsys, 3, "the validation loader has no batches", *loaders[:3], "loaders.py:empty", "--out", "a")


def test_augmentation_without_torchvision(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.delitem(sys.modules, "torchvision.transforms", raising=False)
    for name in ("jitter", "flip,resized-crop"):
        refuse(capsys, 2, "torchvision, which is not installed: pip install torchvision", *WORDS, "--augment", name)
    finish(capsys, *WORDS, "--augment", "crop,flip", "--json", "--out", "a")


def transforms():
    try:
        return import_transforms()
    except CallError as error:
        pytest.skip(str(error))


def images_of(*shape):
    return torch.rand(64, *shape, generator=torch.Generator().manual_seed(0)), [17 * index for index in range(64)]


def test_crops_and_flips_of_a_batch():
    images, seeds = images_of(3, 16, 24)
    preparation = Preparation((3, 16, 24), 255.0)
    state = torch.get_rng_state()
    flipped = Augmentation(["flip"], preparation).apply(images, seeds)
    same = [bool(torch.equal(a, b)) for a, b in zip(flipped, images, strict=True)]
    mirrored = [bool(torch.equal(a, b.flip(-1))) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True)) and 0 < sum(same) < 64
    cropped = Augmentation(["crop"], preparation).apply(images, seeds)
    places = set()
    # Each is a piece of the padded image: two rows of black above and below, three columns at the sides.
    for found, image in zip(cropped, torch.nn.functional.pad(images, (3, 3, 2, 2)), strict=True):
        pieces = {(y, x): image[:, y : y + 16, x : x + 24] for y in range(5) for x in range(7)}
        places |= {place for place, piece in pieces.items() if torch.equal(found, piece)}
    assert len(places) > 20 and {y for y, _ in places} == set(range(5)) and {x for _, x in places} == set(range(7))
    both = Augmentation(["crop", "flip"], preparation)
    whole = both.apply(images, seeds)
    assert torch.equal(whole[40:], both.apply(images[40:], seeds[40:])) and torch.equal(torch.get_rng_state(), state)
    # An image whose sides are less than eight pixels has no padding.
    tiny = images[:, :, :7, :7]
    assert torch.equal(Augmentation(["crop"], Preparation((3, 7, 7), 255.0)).apply(tiny, seeds), tiny)


def test_crops_and_flips_are_torchvisions():
    v2 = transforms()
    images, seeds = images_of(3, 16, 24)
    makers = {"crop": lambda: v2.RandomCrop((16, 24), padding=[3, 2]), "flip": v2.RandomHorizontalFlip}
    for names in (["crop"], ["flip"], ["crop", "flip"], ["flip", "crop"]):
        own = Augmentation(names, Preparation((3, 16, 24), 255.0)).apply(images, seeds)
        for found, image, seed in zip(own, images, seeds, strict=True):
            torch.manual_seed(seed)
            for name in names:
                image = makers[name]()(image)
            assert torch.equal(found, image)


def test_torchvisions_transforms():
    v2 = transforms()
    images, seeds = images_of(3, 16, 24)
    preparation = Preparation((3, 16, 24), 255.0)
    state = torch.get_rng_state()
    every = Augmentation(["crop", "flip", "jitter"], preparation)
    whole = every.apply(images, seeds)
    assert torch.equal(whole[40:], every.apply(images[40:], seeds[40:])) and whole.min() >= 0 and whole.max() <= 1
    boxes = Augmentation(["resized-crop"], preparation)
    areas = [boxes.cut(image, seed)[0].numel() / (16 * 24) for image, seed in zip(images, seeds, strict=True)]
    assert min(areas) < 0.3 and max(areas) > 0.7 and torch.equal(torch.get_rng_state(), state)
    assert v2.RandomResizedCrop((16, 24)).scale == (0.08, 1.0)


def test_a_box_is_cut_before_the_image_is_resized():
    importlib.import_module("stand_in")
    workload = load_workload(
        TrainConfig("models.py:make", data="images", image_size="8", batch=8, augment=["resized-crop"], normalise="0/1")
    )
    augmented = workload.train_loader.dataset
    example = 5
    inputs, _ = augmented.fetch([(example, 3)])
    pixels = decode_image(Path(augmented.examples.paths[example])) / 255
    pieces = [pixels[None, :, y : y + 4, x : x + 4] for y in range(pixels.shape[1] - 4) for x in range(3)]
    resized = [workload.preparation.resize(piece) for piece in pieces]
    assert sum(torch.equal(inputs, item) for item in resized) == 1


def test_torchvision_on_the_command_line(capsys):
    transforms()
    words = [*WORDS, "--augment", "resized-crop,crop,flip,jitter", "--json"]
    whole = finish(capsys, *words, "--out", "whole")
    assert finish(capsys, *words, "--workers", "2", "--out", "two") == whole
    vectors = ["train", "models.py:vectors", "--data", "data.npz", "--out", "a"]
    refuse(capsys, 3, "the data has no images", *vectors, "--augment", "flip")
