"""The page of a plan: its content, that hostile names do no harm, its size, and how it behaves in a browser."""

import json
import re
import shutil
import time
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from schedules import convnet, problem_of, scheduled_plan

from undertow.api.planning import plan as plan_training
from undertow.errors import InfeasibleBudget
from undertow.ir import Gradient, Input, InputKind, Node, Origin, Outcome, Phase, Program, TensorType, Value
from undertow.ir.cost import Cost
from undertow.memory.tables import make_plan
from undertow.models import SMALL
from undertow.report.page import render_page, script_json
from undertow.report.page_bands import MAX_COLUMNS, make_picture
from undertow.report.plan_summary import explain, print_plan
from undertow.report.reasons import find_decisions
from undertow.report.run_curves import Evaluated, find_axis
from undertow.report.run_page import RunView, render_run_page
from undertow.report.timeline import Timeline
from undertow.runtime.measure import Measurement

aten = torch.ops.aten
MADE_AGAIN = ("convolution_1", "sigmoid_1", "empty_like_1", "bernoulli_1", "div_1")
ENCODED = ("max_pool2d_with_indices_2", "relu_1")
HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(2)>',
    "'-alert`1`-'",
    "<b>bold</b>",
    "<!--",
    "]]>&lt;\u2028",
    "日本語 ✓",
    "head",
)


def small_plan(names=None, **about):
    model = convnet() if names is None else convnet(names)
    problem = problem_of(model, (torch.randn(4, 3, 16, 16),))
    about = {"budget_bytes": 215_000, "lower_bound_ns": 200_000} | about
    return scheduled_plan(problem, recompute=MADE_AGAIN, encode=ENCODED, **about)


def long_plan(num_layers):
    """A chain of sigmoids and its backward pass, values of many sizes."""

    def value(name, index):
        size = 1000 + 97 * (index % 50)
        return Value(name, TensorType(torch.float32, (size,), (1,), torch.device("cpu")))

    x = value("x", 0)
    hidden = [x, *(value(f"h{index}", index) for index in range(num_layers))]
    cotangents = [value(f"ct{index}", index) for index in range(num_layers + 1)]
    nodes = []
    for index in range(num_layers):
        origin = Origin(f"layers.{index}.act", "deep.py", index + 1)
        nodes.append(Node(aten.sigmoid.default, (hidden[index],), {}, (hidden[index + 1],), origin))
    for index in reversed(range(num_layers)):
        origin = Origin(f"layers.{index}.act", "deep.py", index + 1, hidden[index + 1].name)
        read = (cotangents[index + 1], hidden[index + 1])
        nodes.append(Node(aten.sigmoid_backward.default, read, {}, (cotangents[index],), origin, Phase.BACKWARD))
    program = Program(
        inputs=(Input(x, InputKind.ARGUMENT, "x"),),
        nodes=tuple(nodes),
        outputs=(hidden[-1],),
        boundary=num_layers,
        cotangents=(Input(cotangents[-1], InputKind.COTANGENT, "h"),),
        gradients=(Gradient(x, cotangents[0]),),
    )
    return make_plan(program, cost_of=lambda node: Cost(5000, 64), budget_bytes=10**9, outcome=Outcome.FEASIBLE)


def page_of(plan, **options):
    return render_page(plan, **{"title": "a small network"} | options)


CURVE = [(150_000, 300.0), (200_000, 290.0), (300_000, 275.0)]
LOSSES = [(float(step), 2.3 / step) for step in range(1, 200)]
TESTS = [Evaluated(40 * (epoch + 1), epoch, 0.1, loss, 0.5) for epoch, loss in enumerate((6.72, 1.1, 0.9, 3.1))]


RATES = [(float(step), 0.1 * (1 - step / 200)) for step in range(1, 200)]
CLASSES = [f"class {index}" for index in range(10)]
MATRIX = [[40 if row == column else (3 * row + column) % 4 for column in range(10)] for row in range(10)]


def run_page(plan, losses=LOSSES, tests=TESTS, **options):
    rows = [("model", "m" * 90), ("data", "digits")]
    view = RunView(
        title="m on digits",
        verdict="finished",
        is_good=True,
        tiles=[("Test accuracy", "50 %", "")],
        losses=losses,
        judging="validation",
        tests=tests,
        best_step=120,
        tested="the best weights on the test data: loss 0.9",
        curves=[("Learning rate", RATES), ("Norm of the gradients", losses)] if losses else [],
        confusion=("Test data, the best weights.", MATRIX),
        classes=CLASSES,
        config=rows,
        environment=rows,
        budget_bytes=plan.budget_bytes,
        held_bytes=2**20,
        measured=Measurement(plan.peak_bytes, 3e-4),
        process_bytes=2**28,
    )
    return render_run_page(replace(view, **options), plan)


class Reader(HTMLParser):
    """Elements with their attributes, the text outside of scripts and styles, and the scripts."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self.scripts, self.open = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.open = tag

    def handle_endtag(self, tag):
        self.open = ""

    def handle_data(self, data):
        if self.open == "script":
            self.scripts.append(data)
        elif self.open != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def test_the_hand_made_plan_is_what_the_tests_think_it_is():
    total = find_decisions(small_plan()).total
    assert {item.value for item in total.recomputed} == {"sigmoid_1", "empty_like_1", "bernoulli_1", "div_1"}
    assert {item.value for item in total.encoded} == {"max_pool2d_with_indices_2", "relu_1"}
    assert {item.state_bytes for item in total.recomputed} == {0, 5056}


def test_page_has_what_the_plan_says():
    plan = small_plan()
    measured = Measurement(plan.peak_bytes, plan.step_us * 1.1e-6)
    page = page_of(
        plan,
        curve=[(150_000, 300.0), (300_000, 200.0)],
        measured=measured,
        process_bytes=2**28,
        cannot_see=["the loss"],
    )
    text = Reader(page).text
    for words in (
        "a small network",
        "Fits",
        "Memory over the step",
        "recomputed values",
        "%relu_1",
        "%sigmoid_1",
        "+10.00%",
        "256.0 MiB",
        "the loss",
        torch.__version__,
        "this plan",
        "budget 210.0 KiB",
        "forward",
        "backward",
    ):
        assert words in text, words


def test_page_of_a_plan_with_nothing_measured_and_no_budget():
    text = Reader(page_of(small_plan(budget_bytes=None, lower_bound_ns=0))).text
    assert "No budget" in text and "not measured" in text and "unknown" in text


def test_a_time_that_nobody_predicted_is_not_zero():
    x = torch.randn(2, 3)
    planned = plan_training(torch.nn.Linear(3, 3), (x,)).plan
    assert "time: not predicted" in print_plan(planned) and "0 us predicted" not in print_plan(planned)
    text = Reader(page_of(planned, measured=Measurement(planned.peak_bytes, 1e-4))).text
    assert "not predicted: without a budget nothing is timed" in text and "Predicted step unknown" in text
    assert "0 us predicted" not in text


def test_a_measured_time_far_off_is_a_factor():
    plan = small_plan()
    text = Reader(page_of(plan, measured=Measurement(plan.peak_bytes, 98.5e-6 * plan.step_us))).text
    assert "98 times" in text and "+9750" not in text


def test_page_of_a_plan_without_operations():
    plan = make_plan(Program((), (), ()))
    assert "runs no operation" in Reader(page_of(plan)).text


def test_same_plan_same_page():
    plan = small_plan()
    assert page_of(plan) == page_of(plan)


def test_nothing_is_loaded_from_elsewhere():
    reader = Reader(page_of(small_plan(), curve=[(1e5, 1.0)]))
    for tag, attributes in reader.elements:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video")
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "xlink:href", "action")}
        assert attributes.get("href", "data:").startswith("data:")
    assert "url(" not in page_of(small_plan()) and "@import" not in page_of(small_plan())


def test_hostile_names_stay_text():
    plan = small_plan(HOSTILE)
    title = "</title><script>1</script>"
    page = page_of(plan, title=title, cannot_see=["</ul><script>2</script>"])
    reader = Reader(page)
    plain = Reader(page_of(small_plan(), cannot_see=["x"]))
    assert sorted(tag for tag, _ in reader.elements) == sorted(tag for tag, _ in plain.elements)
    assert len(reader.scripts) == 2
    moments = json.loads(reader.scripts[0])
    assert HOSTILE[0] in {column["layer"] for column in moments["columns"]}
    assert HOSTILE[1] in reader.text and title in reader.text


def test_names_that_are_no_text_can_be_written():
    plan = small_plan(("first\udcff", *HOSTILE[1:]))
    page_of(plan).encode("utf-8")


def test_json_in_a_script_has_no_markup():
    assert not re.search("[<>&]", script_json({"</script>": "<!-- & -->"}))
    assert json.loads(script_json({"</script>": "<!-- & -->"})) == {"</script>": "<!-- & -->"}


def test_bands_sum_to_the_bytes_of_every_moment():
    for plan in (small_plan(), long_plan(1500)):
        picture = make_picture(Timeline(plan))
        for column, position in enumerate(picture.columns):
            assert sum(band.sizes[column] for band in picture.bands) == plan.live_bytes[position]
        assert plan.live_bytes.index(plan.peak_bytes) in picture.columns


@pytest.mark.parametrize("name", ["gpt", "lstm", "resnet50", "unet"])
def test_every_byte_of_a_network_is_accounted_for(name):
    planned = plan_training(SMALL[name].build(), SMALL[name].example_inputs(2)).plan
    decisions = find_decisions(planned)
    assert decisions.total.kept_bytes == sum(item.num_bytes for item in planned.kept)
    assert sum(size for _, size in decisions.peak.parts) == planned.peak_bytes
    picture = make_picture(Timeline(planned))
    totals = [sum(band.sizes[column] for band in picture.bands) for column in range(len(picture.columns))]
    assert totals == [planned.live_bytes[position] for position in picture.columns]


def heights(page, kind):
    """How far from the top each dot of a kind is in the wide drawing."""
    wide = re.findall(r'<svg [^>]*class="[a-z-]+ wide".*?</svg>', page)
    return [float(y) for svg in wide for y in re.findall(rf'<circle class="{kind}" cx="[^"]*" cy="([^"]*)"', svg)]


def test_losses_are_drawn_where_they_are():
    axis = find_axis([y for _, y in LOSSES] + [item.loss for item in TESTS])
    assert axis.is_log and axis.low < 2.3 / 199 and axis.high > 6.72
    found = heights(run_page(small_plan()), "test-point")[: len(TESTS)]
    # The highest loss is the highest dot, and the rise at the end shows: 3.1 is well above 1.1 and 0.9.
    assert sorted(found) == [found[0], found[3], found[1], found[2]]
    assert found[1] - found[3] > 20
    assert "logarithmic axis" in Reader(run_page(small_plan())).text


def test_an_axis_from_zero_is_in_proportion():
    axis = find_axis([2000.0, 3200.0], is_from_zero=True)
    assert axis.share(3200.0) / axis.share(2000.0) == pytest.approx(1.6) and axis.ticks()[0] == 0
    assert find_axis([0.0], is_from_zero=True).share(0.0) == 0
    assert find_axis([0.1, 0.1, 0.1, 90.0], is_from_zero=True).is_log


def test_the_page_of_a_run_says_what_judged_it():
    text = Reader(run_page(small_plan())).text
    for words in (
        "Validation accuracy",
        "validation loss",
        "the best weights on the test data",
        "Learning rate",
        "Norm of the gradients",
        "Which class was taken for which",
        "1.0 MiB for averaged weights",
        "best",
    ):
        assert words in text, words
    assert "Test accuracy" not in text.replace("Test accuracy 50 %", "")
    assert "test loss" in Reader(run_page(small_plan(), judging="test")).text


def test_the_confusion_matrix_names_and_counts_every_cell():
    page = run_page(small_plan(), classes=("<b>", "cat"))
    wide = re.search(r'<svg [^>]*class="confusion wide".*?</svg>', page)[0]
    cells = re.findall(r'<rect class="cell (right|wrong)".*?<title>(.*?) taken for (.*?): (\d+) of (\d+)</title>', wide)
    names = ["&lt;b&gt;", "cat", *map(str, range(2, 10))]
    expected = [
        ("right" if row == column else "wrong", names[row], names[column], str(count), str(sum(MATRIX[row])))
        for row in range(10)
        for column, count in enumerate(MATRIX[row])
    ]
    assert cells == expected
    counts = re.findall(r'<text class="count"[^>]*>(\d+)<', wide)
    assert counts == [str(count) for row in MATRIX for count in row if count]


@pytest.mark.parametrize("values", [[2.3, 2.0, 1.5, 3.4], [0.0, 0.01, 50.0], [-3.0, -1.0, 2.0], [1.0], [0.0]])
def test_an_axis_is_linear_unless_it_hides_something(values):
    axis = find_axis(values)
    assert not axis.is_log
    shares = [axis.share(value) for value in values]
    assert all(0 < share < 1 for share in shares) and axis.ticks()
    plain = run_page(small_plan(), [(float(step + 1), value) for step, value in enumerate(values)], ())
    assert "logarithmic" not in plain


@pytest.mark.parametrize("low, high", [(0.9, 30.0), (1e-4, 7.0), (1e-9, 1e5), (2.0, 45.0)])
def test_a_logarithmic_axis_has_ticks(low, high):
    axis = find_axis([low, low, low, high])
    assert axis.is_log and 2 <= len(axis.ticks()) <= 16
    assert axis.share(low) > 0 and axis.share(high) < 1


def test_times_of_other_plans_are_drawn_in_proportion():
    page = page_of(small_plan(), curve=CURVE)
    floor = 340 - 34 - 12
    drawn = [floor - y for y in heights(page, "point")]
    for (_, duration), height in zip(CURVE, drawn, strict=True):
        assert height / drawn[0] == pytest.approx(duration / CURVE[0][1], abs=1e-3)
    assert "+9.1%" in Reader(page).text


@pytest.mark.parametrize("name, budget", [("resnet50", None), ("gpt", None), ("vgg_small", "least")])
def test_layers_are_in_the_order_in_which_the_model_runs_them(name, budget):
    model, args = SMALL[name].build(), SMALL[name].example_inputs(2)
    if budget is not None:
        with pytest.raises(InfeasibleBudget) as refusal:
            plan_training(model, args, budget=1, costs="model")
        budget = refusal.value.minimum_bytes
    planned = plan_training(model, args, budget=budget, costs="model").plan
    names = [layer.path for layer in find_decisions(planned).layers]
    called = [""]
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: called.append(path))
    model(*args)
    leaves = [path for path in names if not any(other.startswith(f"{path}.") for other in called) and path]
    assert len(leaves) > 10 and leaves == sorted(leaves, key=called.index)


def test_a_long_program_stays_small_and_quick():
    plan = long_plan(2500)
    start = time.process_time()
    page = page_of(plan)
    assert len(plan.nodes) == 5000
    assert time.process_time() - start < 5
    assert len(page) < 2_000_000
    assert len(make_picture(Timeline(plan)).columns) <= MAX_COLUMNS
    # All the values are small: they share bands, each of a stretch of layers.
    assert 20 < page.count('class="band') < 80
    assert "layers.0.act to layers." in page


def test_text_for_the_terminal_is_within_80_columns():
    plan = small_plan(HOSTILE)
    for text in (print_plan(plan), explain(plan, HOSTILE[1]), print_plan(long_plan(400))):
        assert max(map(len, text.splitlines())) <= 80


@pytest.fixture(scope="module")
def browser():
    browser_path = shutil.which("chromium")
    if browser_path is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as tool:
        flags = ["--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
        found = tool.chromium.launch(executable_path=browser_path, args=flags)
        yield found
        found.close()


def open_page(browser, path, page, **options):
    """The page in a tab, and what went wrong or was asked for there."""
    path.write_text(page, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 1000}, **options)
    events = []
    tab.on("console", lambda message: events.append(message.text))
    tab.on("pageerror", lambda error: events.append(str(error)))
    tab.on("dialog", lambda dialog: (events.append(dialog.message), dialog.dismiss()))
    tab.on("request", lambda request: events.append(request.url))
    tab.goto(path.as_uri())
    assert events.pop(0) == path.as_uri()
    return tab, events


def hover(tab, column, size, picture="memory"):
    """Move the pointer to the middle of a column, at a height in bytes."""
    x, y = tab.evaluate(
        """([column, size, picture]) => {
            const svg = document.getElementById(picture), data = svg.dataset;
            const point = new DOMPoint(+data.left + (column + 0.5) * data.step, data.floor - size * data.scale);
            const place = point.matrixTransform(svg.getScreenCTM());
            return [place.x, place.y];
        }""",
        [column, size, picture],
    )
    tab.mouse.move(x, y)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hovering_names_every_band(browser, tmp_path, scheme):
    plan = small_plan()
    picture = make_picture(Timeline(plan))
    tab, events = open_page(browser, tmp_path / "page.html", page_of(plan), color_scheme=scheme)
    for column in (0, picture.boundary, find_decisions(plan).peak.position):
        below = 0
        for band in picture.bands:
            if band.sizes[column] > plan.peak_bytes / 100:
                hover(tab, column, below + band.sizes[column] / 2)
                tip = tab.locator("#tip").inner_text()
                assert tip.startswith(f"%{band.value.value}" if band.value else band.label)
                assert band.value is None or (band.value.made_by.location in tip and band.value.why in tip)
                assert f"operation {column} of {len(plan.nodes)}" in tip
            below += band.sizes[column]
    shot = tab.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
    assert shot.startswith(b"\x89PNG") and len(shot) > 50_000
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) > 384) == (scheme == "light")
    tab.mouse.move(2, 2)
    assert tab.locator("#tip").is_hidden()
    assert not events
    tab.close()


def test_arrow_keys_move_the_cursor(browser, tmp_path):
    tab, events = open_page(browser, tmp_path / "page.html", page_of(small_plan()))
    tab.locator("#memory").focus()
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    assert "operation 2 of" in tab.locator("#tip").inner_text()
    tab.keyboard.press("ArrowUp")
    assert tab.locator("#tip strong").inner_text().startswith(("parameters", "batch"))
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden() and not events
    tab.close()


def test_hostile_names_in_a_browser(browser, tmp_path):
    plan = small_plan(HOSTILE)
    page = page_of(plan, title="hostile")
    tab, events = open_page(browser, tmp_path / "page.html", page)
    for column in range(0, len(plan.nodes), 3):
        hover(tab, column, plan.live_bytes[column] * 0.97)
    assert tab.title() == "hostile" and tab.locator("img, b:not(.good):not(.bad)").count() == 0
    assert not events
    tab.close()


def test_a_long_program_is_fluid(browser, tmp_path):
    plan = long_plan(2500)
    tab, events = open_page(browser, tmp_path / "page.html", page_of(plan))
    milliseconds = tab.evaluate(
        """() => {
            const svg = document.getElementById("memory"), box = svg.getBoundingClientRect(), start = performance.now();
            for (let index = 0; index < 100; index++)
                svg.dispatchEvent(new PointerEvent("pointermove", {
                    clientX: box.left + box.width * (0.1 + 0.008 * index), clientY: box.top + box.height * 0.7 }));
            return (performance.now() - start) / 100;
        }"""
    )
    assert tab.locator("#tip").is_visible()
    assert milliseconds < 16, "slower than a frame"
    assert not events
    tab.close()


def test_tables_can_be_read_without_scripts(browser, tmp_path):
    tab, events = open_page(browser, tmp_path / "page.html", page_of(small_plan()), java_script_enabled=False)
    body = tab.locator("body").inner_text()
    assert "runs again at operation" in body and "Predicted and measured" in body
    assert tab.locator("#memory .band title").count() > 5
    assert not events
    tab.close()


PAGES = {
    "plan": lambda: page_of(
        small_plan(HOSTILE), curve=CURVE, measured=Measurement(200_000, 3e-4), process_bytes=2**28, cannot_see=["x"]
    ),
    "run": lambda: run_page(small_plan()),
}


@pytest.mark.parametrize("width", [320, 400])
@pytest.mark.parametrize("name", PAGES)
def test_everything_is_seen_on_a_narrow_screen(browser, tmp_path, name, width):
    tab, events = open_page(browser, tmp_path / "page.html", PAGES[name]())
    tab.set_viewport_size({"width": width, "height": 800})
    tab.evaluate("document.querySelectorAll('details').forEach((item) => { item.open = true; })")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    # Nothing has to be scrolled to inside the page, and nothing is cut at an edge.
    cut = tab.evaluate(
        """() => [...document.querySelectorAll("main *")].filter((item) => {
            const box = item.getBoundingClientRect();
            const scrolls = getComputedStyle(item).overflowX !== "visible";
            return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5
                || scrolls && item.scrollWidth > item.clientWidth + 1);
        }).map((item) => item.outerHTML.slice(0, 100))"""
    )
    assert not cut
    passes = tab.locator("svg.small.memory .pass")
    assert passes.all_text_contents() == ["forward", "backward"] and passes.last.is_visible()
    assert tab.locator("svg.small.memory .peak").is_visible() and not tab.locator("svg.wide.memory").is_visible()
    sizes = tab.evaluate(
        """() => [...document.querySelectorAll("svg.small text")].map((item) => item.getBoundingClientRect().height)"""
    )
    assert min(sizes) >= 9, "text that nobody can read"
    assert not events
    tab.close()


def test_the_narrow_picture_names_its_bands_too(browser, tmp_path):
    plan = small_plan()
    tab, events = open_page(browser, tmp_path / "page.html", page_of(plan))
    tab.set_viewport_size({"width": 400, "height": 800})
    tab.locator("#memory-small").scroll_into_view_if_needed()
    hover(tab, 3, plan.peak_bytes / 100, "memory-small")
    assert "operation 3 of" in tab.locator("#tip").inner_text() and not events
    tab.close()


def test_columns_have_their_names_on_a_narrow_screen(browser, tmp_path):
    tab, _ = open_page(browser, tmp_path / "page.html", page_of(small_plan()))
    tab.set_viewport_size({"width": 400, "height": 800})
    cell = tab.locator(".stacked td.number:visible").first
    name = cell.evaluate("item => getComputedStyle(item, '::before').content")
    assert name.strip('"') == cell.get_attribute("data-head") == "bytes"
    tab.close()
