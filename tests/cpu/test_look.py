"""`undertow look`: units and their strongest examples against brute force, pixels against autograd, the page itself."""

import json
import re
import shutil
import sys
import weakref
from html.parser import HTMLParser
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_commands import refuse, run

from undertow.data.preparation import Preparation
from undertow.errors import CallError, DataError
from undertow.look import looking
from undertow.look.filters import draw_filter, filter_of
from undertow.look.inputs import Inputs
from undertow.look.layers import find_layers
from undertow.look.looking import look_at
from undertow.look.page import render_look
from undertow.look.pixels import character_gradients, pixel_gradients
from undertow.look.responses import Strongest
from undertow.look.windows import find_windows
from undertow.models import SMALL, lenet5
from undertow.train.batches import read_batch

HOSTILE = ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "<b>bold</b>", "日本語")
OPTIONS = {
    "read": read_batch,
    "device": torch.device("cpu"),
    "title": "a network",
    "preparation": None,
    "classes": None,
    "num_units": 3,
    "num_samples": 4,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def same_numbers():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def loader_of(*shape, num_examples=50, batch=8):
    inputs = torch.randn(num_examples, *shape, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, torch.arange(num_examples) % 4), batch)


def small_convnet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(5 * 4 * 4, 4),
    )


def trained_norm(model):
    """A batch normalisation with statistics and weights of both signs, as training makes them."""
    norm = model[1]
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        norm.weight.normal_()
    return model


def test_strongest_examples_are_those_of_brute_force():
    model, loader = trained_norm(small_convnet()).eval(), loader_of(3, 12, 12)
    look = look_at(model, loader, **OPTIONS | {"num_units": 99})
    x = loader.dataset.tensors[0]
    with torch.no_grad():
        first = model[:2](x)
        expected = {"0": first.flatten(2), "4": model[:5](x).flatten(2), "7": model(x)[..., None]}
    assert [view.layer.path for view in look.views] == list(expected)
    for view in look.views:
        best = expected[view.layer.path].amax(2)
        assert [item.unit for item in view.units] == list(range(best.shape[1]))
        for item in view.units:
            wanted = best[:, item.unit].sort(descending=True)
            assert [sample.example for sample in item.samples] == wanted.indices[:4].tolist()
            for sample, response in zip(item.samples, wanted.values, strict=False):
                at = expected[view.layer.path][sample.example, item.unit, sample.position]
                # A sum of at most 80 products in batches of 8 and of 50, in float32.
                assert abs(sample.response - response) <= 80 * 1.2e-7 * best.abs().max() and torch.isclose(at, response)


def test_units_that_stand_out_are_chosen():
    """The last of four stands out most but is never above 0; the second is the same for every example."""
    x = torch.randn(1000, 4)
    x[:, 1], x[:, 3] = 5.0, -2.0 - torch.rand(1000)
    x[7, 0], x[9, 2], x[11, 3] = 50.0, 100.0, -0.001
    strongest = Strongest.none(4)
    for start in range(0, 1000, 64):
        strongest.add(x[start : start + 64, :, None], start, 2)
    assert torch.equal(strongest.examples[[0, 2, 3], 0], torch.tensor([7, 9, 11]))
    assert [strongest.choose(count) for count in (1, 2, 3, 4)] == [[2], [0, 2], [0, 1, 2], [0, 1, 2, 3]]


def test_pixels_have_autograds_bits():
    model, x = trained_norm(small_convnet()).eval(), torch.randn(6, 3, 12, 12)
    for layer in find_layers(model, Inputs.of(x)):
        units = torch.arange(6) % layer.num_units
        depth = int(layer.path) + (2 if layer.path == "0" else 1)
        leaf = x.clone().requires_grad_()
        responses = layer.responses(model[:depth](leaf))
        positions = torch.arange(6) % responses.shape[2]
        chosen = responses[torch.arange(6), units, positions]
        (expected,) = torch.autograd.grad(chosen.sum(), leaf)
        found = pixel_gradients(model, layer, Inputs.of(x), units, positions, chosen.detach())
        assert torch.equal(found, expected) and found.any()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["char_gpt", "lstm"])
def test_characters_have_autograds_derivative(name):
    model = SMALL[name].build().eval()
    (tokens,) = SMALL[name].example_inputs(3)
    layers = find_layers(model, Inputs.of(tokens))
    embedding = next(layer for layer in layers if layer.is_embedding)
    assert embedding.reads_input and embedding.reader is None
    kinds = {"char_gpt": ["Embedding", "Embedding", *["Linear"] * 5], "lstm": ["Embedding", "LSTM", "Linear"]}
    assert [layer.kind for layer in layers] == kinds[name]
    layer, units, positions = layers[-1], torch.tensor([0, 5, 9]), torch.tensor([2, 7, 4])
    vectors = []
    handle = embedding.module.register_forward_hook(lambda module, args, output: vectors.append(output))
    chosen = model(tokens)[torch.arange(3), positions, units]
    handle.remove()
    (expected,) = torch.autograd.grad(chosen.sum(), vectors[0])
    found = character_gradients(model, layer, embedding.module, Inputs.of(tokens), units, positions, chosen.detach())
    assert torch.equal(found, expected.norm(dim=-1))
    assert all(not row[position + 1 :].any() for row, position in zip(found, positions, strict=True))  # both are causal


def test_where_layers_read_and_what_they_were_flattened_from():
    first, second, last = find_layers(small_convnet().eval(), Inputs.of(torch.randn(4, 3, 12, 12)))
    assert (first.reads_input, second.reads_input, last.reads_input) == (True, False, False)
    assert type(first.reader) is nn.BatchNorm2d and second.reader is second.module
    assert last.input_shape == (5, 4, 4)
    assert filter_of(last, 2).equal(last.module.weight[2].detach().view(5, 4, 4))
    (mlp, *_) = find_layers(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)).eval(), Inputs.of(torch.randn(4, 3, 8, 8))
    )
    assert mlp.reads_input and mlp.input_shape == (3, 8, 8)
    assert draw_filter(mlp, 0, (3, 8, 8))[1] == "its filter, in the colours of the image"


def test_a_window_is_the_receptive_field():
    """LeNet-5: 5x5, then through 2x2 pooling 5 + 1 + 2 * 4 = 14. Pooling picks one of four, so a box may be smaller."""
    model, x = lenet5().eval(), torch.randn(9, 1, 28, 28)
    conv1, conv2, *_ = find_layers(model, Inputs.of(x))
    for layer, field in ((conv1, 5), (conv2, 14)):
        units = torch.zeros(9, dtype=torch.int64)
        positions = torch.full((9,), 3)  # the fourth position of the first row
        with torch.no_grad():
            output = model.conv1(x) if layer is conv1 else model.conv2(model.pool(model.conv1(x)))
        expected = layer.responses(output)[:, 0, 3]
        gradients = pixel_gradients(model, layer, Inputs.of(x), units, positions, expected)
        step = 1 if layer is conv1 else 2
        for window in find_windows(gradients):
            top, left, height, width = window.box
            assert top >= 0 and top + height <= field
            assert 3 * step <= left and left + width <= 3 * step + field
            assert field - 2 < max(height, width) <= field
            assert (window.height, window.width) == (14, 14)
    everywhere = find_windows(torch.ones(1, 1, 28, 28))[0]
    assert (everywhere.top, everywhere.left, everywhere.height, everywhere.width) == (0, 0, 28, 28)


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)


def preparation_of(*shape, vocabulary=None):
    return Preparation(shape, mean=(0.5,) * shape[0] if vocabulary is None else (0.0,), vocabulary=vocabulary)


@pytest.mark.parametrize("name", ["mlp", "lenet300", "lenet5", "vgg_small", "resnet50", "unet", "char_gpt", "lstm"])
def test_every_kind_of_network_has_a_page(name):
    entry = SMALL[name]
    model = entry.build()
    (x,) = entry.example_inputs(10)
    loader = DataLoader(TensorDataset(x, torch.arange(10) % 4), 4)
    before = [parameter.clone() for parameter in model.state_dict().values()]
    pages = [render_look(look_at(model, loader, **OPTIONS | {"num_units": 2, "num_samples": 2})) for _ in range(2)]
    assert pages[0] == pages[1]
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True)) and model.training
    page = Page(pages[0])
    sources = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert sources and all(source.startswith("data:image/png;base64,") for source in sources)
    assert not any(tag == "script" for tag, _ in page.tags)
    assert "https://" not in pages[0] and "http://" not in pages[0]


def test_hostile_names_do_no_harm():
    look = look_at(small_convnet(), loader_of(3, 12, 12), **OPTIONS | {"classes": HOSTILE, "title": HOSTILE[0]})
    page = Page(render_look(look))
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "b" + "old"})
    assert not any("onerror" in attributes for _, attributes in page.tags)
    assert any(HOSTILE[0] in words for words in page.words)
    characters = "".join(sorted("<>&\"'\n ab")) + "cdefgh"
    model = SMALL["char_gpt"].build(vocabulary=len(characters))
    tokens = torch.randint(len(characters), (10, 16))
    options = OPTIONS | {"preparation": preparation_of(16, vocabulary=characters), "classes": tuple(characters)}
    text = render_look(look_at(model, DataLoader(TensorDataset(tokens, tokens), 4), **options))
    assert "&lt;" in text and "↵" in text


def test_batches_stream_by():
    """No batch of the test data is alive when the next but one is made; only the examples shown are kept."""
    alive, most = [], []

    class Watched:
        def __len__(self):
            return 30

        def __iter__(self):
            for number in range(30):
                most.append(sum(item() is not None for item in alive))
                batch = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(number))
                alive.append(weakref.ref(batch))
                yield batch, torch.zeros(4, dtype=torch.int64)
                del batch

    look_at(small_convnet(), Watched(), **OPTIONS)
    assert max(most) <= 2 < 30


def test_of_much_data_the_first_examples_are_read(monkeypatch):
    monkeypatch.setattr(looking, "MAX_EXAMPLES", 20)
    monkeypatch.setattr(looking, "MAX_LAYERS", 2)
    look = look_at(small_convnet(), loader_of(3, 12, 12), **OPTIONS)
    assert look.num_examples == 20 and look.num_layers == 3
    assert [view.layer.path for view in look.views] == ["0", "7"]
    assert "1 in between are left out" in render_look(look)


def test_a_shuffled_loader_is_read_in_one_order():
    inputs, targets = loader_of(3, 12, 12).dataset.tensors
    loader = DataLoader(TensorDataset(inputs, targets), 8, shuffle=True)
    model, state = small_convnet(), torch.get_rng_state()
    look = look_at(model, loader, **OPTIONS)
    assert look.num_examples == 50 and torch.equal(torch.get_rng_state(), state)


class Several(nn.Module):
    """A table and an image, by name; the shown input is not the first."""

    def __init__(self):
        super().__init__()
        self.table, self.image = nn.Linear(5, 6), nn.Conv2d(3, 4, 3)
        self.both = nn.Linear(6 + 4, 3)

    def forward(self, table, image, scale):
        seen = torch.relu(self.image(image)).amax((2, 3)) * scale
        return self.both(torch.cat([torch.relu(self.table(table)), seen], 1))


def test_a_model_of_several_inputs():
    torch.manual_seed(0)
    table, images, labels = torch.randn(20, 5), torch.rand(20, 3, 8, 8), torch.arange(20) % 3
    scale = torch.tensor(2.0)  # has no part for each example
    rows = [
        ({"table": table[i : i + 6], "image": images[i : i + 6], "scale": scale}, labels[i : i + 6])
        for i in (0, 6, 12, 18)
    ]
    model = Several().eval()
    look = look_at(model, rows, **OPTIONS)
    assert [view.layer.path for view in look.views] == ["image", "table", "both"] and look.num_examples == 20
    assert look.input_name == "image" and "image is shown; the others are those" in render_look(look)
    with torch.no_grad():
        scores = model(table, images, scale)
    for unit in look.views[2].units:
        best = unit.samples[0]
        assert best.example == int(scores[:, unit.unit].argmax()) and torch.equal(best.inputs, images[best.example])
        image = images[best.example, None].clone().requires_grad_()
        model(table[best.example, None], image, scale)[0, unit.unit].backward()
        # The example was differentiated in a batch of others: sums of at most 27 products, in another order.
        bound = 64 * torch.finfo(torch.float32).eps * float(image.grad.abs().max())
        assert float((best.gradient - image.grad[0]).abs().max()) <= bound
    # A table does not depend on the image.
    assert all(not sample.gradient.any() for unit in look.views[1].units for sample in unit.samples)


def test_what_cannot_be_shown_is_refused():
    vectors, deep = loader_of(12), loader_of(2, 3, 4, 4)
    with pytest.raises(CallError, match="nothing can be shown: the model calls no convolution"):
        look_at(nn.Sequential(nn.LayerNorm(12), nn.Tanh()), vectors, **OPTIONS)
    with pytest.raises(CallError, match=r"nothing can be shown: inputs are input 1: torch.float32 \[8, 2, 3, 4, 4\]"):
        look_at(nn.Conv3d(2, 2, 1), deep, **OPTIONS)
    with pytest.raises(DataError, match="no test data"):
        look_at(nn.Linear(12, 2), [], **OPTIONS)

    class Restless:
        number = 0

        def __len__(self):
            return 3

        def __iter__(self):
            for _ in range(3):
                Restless.number += 1
                generator = torch.Generator().manual_seed(Restless.number)
                yield torch.randn(8, 12, generator=generator), torch.zeros(8, dtype=torch.int64)

    with pytest.raises(DataError, match="gave other examples when it was read again"):
        look_at(nn.Linear(12, 2), Restless(), **OPTIONS)


MODELS = """
import torch
from torch import nn
def example_inputs(batch): return torch.zeros(batch, 1, 8, 8)
def make(): return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
def bare(): return nn.Sequential(nn.Flatten(), Scale())
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Linear(64, 3).weight.detach()])
    def forward(self, x): return x @ self.weights[0].t()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "models.py").write_text(MODELS)
    x = numpy.random.default_rng(0).integers(0, 256, (60, 8, 8)).astype("uint8")
    numpy.savez(tmp_path / "images.npz", x=x, y=x[:, 0, 0] % 3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_look_at_a_run(folder, capsys):
    for name, out in (("make", "a"), ("bare", "b")):
        words = ("train", f"models.py:{name}", "--data", "images.npz", "--batch", "8", "--epochs", "1", "--out", out)
        assert run(capsys, *words)[0] == 0
    code, out, err = run(capsys, "look", "a", "--units", "2", "--examples", "3")
    assert (code, out) == (0, "a/look.html\n"), err
    first = Path("a/look.html").read_bytes()
    code, out, _ = run(capsys, "look", "a", "--json", "--units", "2", "--examples", "3")
    data = json.loads(out)
    assert code == 0 and data["page"] == "a/look.html" and Path("a/look.html").read_bytes() == first
    assert [(layer["path"], layer["units"]) for layer in data["layers"]] == [("0", 4), ("3", 3)]
    shown = data["layers"][0]["shown"]
    assert len(shown) == 2 and all(len(item["strongest"]) == 3 for item in shown)
    refuse(capsys, 2, "nothing can be shown", "look", "b")
    refuse(capsys, 2, "holds no run", "look", "nowhere")
    refuse(capsys, 3, "there is no data", "look", "a", "--data", "missing.npz")
    Path("a/look.html").unlink()
    Path("a/look.html").mkdir()
    refuse(capsys, 5, "cannot be written", "look", "a")


def test_the_page_fits_every_screen(tmp_path):
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    characters = "".join(map(chr, range(97, 114)))
    tokens = torch.randint(17, (10, 16))
    text = OPTIONS | {"preparation": preparation_of(16, vocabulary=characters), "classes": tuple(characters)}
    pages = {
        "images": look_at(small_convnet(), loader_of(3, 12, 12), **OPTIONS),
        "text": look_at(SMALL["char_gpt"].build(), DataLoader(TensorDataset(tokens, tokens), 4), **text),
    }
    with playwright.sync_playwright() as tool:
        flags = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        browser = tool.chromium.launch(executable_path=path, args=flags)
        for name, look in pages.items():
            file = tmp_path / f"{name}.html"
            file.write_text(render_look(look), encoding="utf-8")
            for width in (1280, 400):
                tab = browser.new_page(viewport={"width": width, "height": 900})
                events = []
                tab.on("console", lambda message, events=events: events.append(message.text))
                tab.on("request", lambda request, events=events: events.append(request.url))
                tab.goto(file.as_uri())
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                assert tab.evaluate("[...document.images].every((item) => item.naturalWidth && item.width >= 14)")
                others = [event for event in events if not event.startswith(("data:", file.as_uri()))]
                assert not others, others
        browser.close()
    assert re.search(r"<svg[^>]*class=\"[^\"]*small", render_look(pages["text"]))
