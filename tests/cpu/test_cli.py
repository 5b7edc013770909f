"""The command line: what it prints, its exit codes, and one line for each wrong call."""

import json
import os
import pty
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from training_commands import users_folder

from undertow.cli import main
from undertow.models import ZOO

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "undertow"

MODELS = """
import torch
from neighbour import WIDTH
from torch import nn

def alone(): return nn.Linear(WIDTH, 4)
def with_args(): return nn.Linear(WIDTH, 4), (torch.randn(2, WIDTH),)
def with_kwargs(): return nn.Linear(WIDTH, 4), (), {"input": torch.randn(2, WIDTH)}
module = nn.Linear(WIDTH, 4)
def two_inputs(): return nn.Bilinear(WIDTH, WIDTH, 4)
def tokens(): return nn.Embedding(10, 4)

def raises():
    raise ValueError("no weights\\nwere found")
def returns_number(): return 3
def returns_list(): return nn.Linear(WIDTH, 4), [torch.randn(2, WIDTH)]
def returns_four(): return nn.Linear(WIDTH, 4), (), {}, None
def leaves(): raise SystemExit(0)
number = 3
def lazy(): return nn.LazyLinear(4), (torch.randn(2, WIDTH),)

class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x
    @staticmethod
    def backward(ctx, ct):
        return 3 * ct * ctx.saved_tensors[0]

class Mistaken(nn.Linear):
    def forward(self, x):
        return Wrong.apply(super().forward(x))

class NotFinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x
    @staticmethod
    def backward(ctx, ct):
        return ct / 0

class Infinite(nn.Linear):
    def forward(self, x):
        return NotFinite.apply(super().forward(x))

def mistaken(): return Mistaken(WIDTH, 4), (torch.randn(2, WIDTH),)
def infinite(): return Infinite(WIDTH, 4), (torch.randn(2, WIDTH),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A user's folder. State of this process that a command changes is put back."""
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    (tmp_path / "with_examples.py").write_text(
        "import torch\n"
        "def make(): return torch.nn.Linear(3, 4)\n"
        "def example_inputs(batch): return torch.randn(batch, 3)\n"
    )
    (tmp_path / "broken.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "needy.py").write_text("import no_such_library\n")
    with users_folder(tmp_path, monkeypatch):
        yield tmp_path


def run(capsys, *words):
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *words):
    code, out, err = run(capsys, *words, "--json")
    assert not err
    return code, json.loads(out, parse_constant=pytest.fail)


def test_inspect_prints_tables(capsys):
    code, out, err = run(capsys, "inspect", "lenet5", "--batch", "8", "--optimizer", "adam")
    assert (code, err) == (0, "")
    assert "431,080 parameters" in out and "conv1 Conv2d" in out
    assert "training / inference memory" in out and "for Adam" in out


def test_inspect_json_holds_the_batch(capsys):
    sizes = {}
    for batch in ("1", "4"):
        code, data = run_json(capsys, "inspect", "lenet5", "--batch", batch)
        assert code == 0
        sizes[batch] = data["layers"][0]["output_bytes"]
        assert data["num_parameters"] == 431_080
    assert sizes["4"] == 4 * sizes["1"] == 4 * 20 * 24 * 24 * 4


def test_batch_is_one_unless_told(capsys):
    assert run_json(capsys, "inspect", "lenet300") == run_json(capsys, "inspect", "lenet300", "--batch", "1")


@pytest.mark.parametrize("name, factor", [("sgd", 1), ("adam", 2), ("adamw", 2)])
def test_optimizers(capsys, name, factor):
    _, data = run_json(capsys, "inspect", "my_models.py:with_args", "--optimizer", name)
    assert data["optimizer"]["num_bytes"] == factor * 16 * 4 + (2 * 4 if name != "sgd" else 0)


@pytest.mark.parametrize(
    "words, batch",
    [
        (["my_models.py:with_args"], 2),
        (["my_models:with_args"], 2),
        (["my_models.py:with_kwargs"], 2),
        (["my_models.py:alone", "--input", "5,3"], 5),
        (["my_models.py:module", "--input", "5,3:float32"], 5),
        (["my_models.py:with_args", "--input", "6,3"], 6),
        (["my_models.py:two_inputs", "--input", "5,3", "--input", "5,3"], 5),
        (["my_models.py:tokens", "--input", "5:int64"], 5),
        (["with_examples.py:make"], 1),
        (["with_examples.py:make", "--batch", "7"], 7),
        (["torch.nn:ReLU", "--input", "3,4"], 3),
    ],
)
def test_ways_to_name_a_model(capsys, words, batch):
    code, data = run_json(capsys, "inspect", *words)
    assert code == 0
    assert data["layers"][0]["output_bytes"] == batch * 4 * 4


def test_a_model_is_found_from_elsewhere(capsys, folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert run(capsys, "inspect", str(folder / "my_models.py") + ":with_args")[0] == 0


def test_check_agrees(capsys):
    code, out, err = run(capsys, "check", "my_models.py:with_args")
    assert (code, err) == (0, "") and "gradients agree" in out
    code, data = run_json(capsys, "check", "my_models.py:with_kwargs")
    assert code == 0 and data["ok"] is True and data["disagreements"] == []


def test_check_fails_with_1_and_names_the_function(capsys):
    code, out, err = run(capsys, "check", "my_models.py:mistaken")
    assert (code, err) == (1, "") and "the derivative of Wrong is wrong" in out and "my_models.py:" in out
    code, data = run_json(capsys, "check", "my_models.py:mistaken")
    assert code == 1 and data["ok"] is False and data["disagreements"]


def test_json_has_no_infinity(capsys):
    code, data = run_json(capsys, "check", "my_models.py:infinite")
    assert code == 1 and data["disagreements"][0]["analytic"] is None


WRONG = {
    ("inspect", "vgg61"): "'vgg61': did you mean vgg16",
    ("inspect", "zzzzz"): ", ".join(ZOO),
    ("check", "lenet"): "did you mean lenet",
    ("inspect", "my_models.py"): "my_models.py:factory",
    ("inspect", "missing.py:f"): "no file missing.py",
    ("inspect", "no.such.module:f"): "no module 'no.such.module'",
    ("inspect", "needy:f"): "No module named 'no_such_library' (needy.py:1)",
    ("inspect", "broken.py:f"): "SyntaxError: invalid syntax (broken.py:2)",
    ("inspect", "my_models.py:alon"): "no function 'alon'; did you mean alone?",
    ("inspect", "my_models.py:number"): "no function 'number'",
    ("inspect", "my_models.py:raises"): "ValueError: no weights were found (my_models.py:14)",
    ("inspect", "my_models.py:leaves"): "SystemExit: 0 (my_models.py:18)",
    ("inspect", "my_models.py:returns_number"): "returned int",
    ("inspect", "my_models.py:returns_list"): "returned (Linear, list)",
    ("inspect", "my_models.py:returns_four"): "returned (Linear, tuple, dict, NoneType)",
    ("plan", "my_models.py:lazy"): "(lazy) parameters; run the model once first",
    ("inspect", "my_models.py:lazy"): "(lazy) parameters; run the model once first",
    ("check", "my_models.py:lazy"): "(lazy) parameters; run the model once first",
    ("train", "my_models.py:lazy", "--data", "digits"): "(lazy) parameters; run the model once first",
    ("check", "my_models.py:alone"): "--input 8,3,224,224, or write example_inputs(batch)",
    ("inspect", "my_models.py:with_args", "--batch", "2"): "leave --batch out",
    ("inspect", "my_models.py:alone", "--input", "2,5"): "float32[2,5]: RuntimeError: mat1 and mat2 shapes",
    ("inspect", "lenet5", "--batch", "0"): "--batch 0: a batch holds at least one example",
    ("check", "lenet5", "--batch", "-3"): "--batch -3",
    ("inspect", "lenet5", "--batch", "two"): "--batch",
    ("inspect", "lenet5", "--batch", "2", "--input", "2,1,28,28"): "cannot both be given",
    ("inspect", "lenet5", "--input", "2,x"): "'2,x' is not a shape",
    ("inspect", "lenet5", "--input", "2,-1"): "'2,-1' is not a shape",
    ("inspect", "lenet5", "--input", "0,1"): "'0,1' is not a shape",
    ("inspect", "lenet5", "--input", ""): "'' is not a shape",
    ("inspect", "lenet5", "--input", "2:float99"): "'float99' is not a dtype",
    ("inspect", "lenet5", "--input", "2:nn"): "'nn' is not a dtype",
    ("inspect", "lenet5", "--input", "2,3"): "lenet5 on float32[2,3]",
    ("inspect", "lenet5", "--optimizer", "lion"): "'lion' is not one of",
    ("inspect", "lenet5", "--colour"): "--colour",
    ("inspect",): "MODEL",
    ("inspct",): "inspct",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_calls_give_one_line_and_2(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("undertow: ") and err.count("\n") == 1
    assert WRONG[words] in err
    code, out, err = run(capsys, *words, "--json")
    assert (code, out) == (2, "")
    assert WRONG[words] in json.loads(err)["error"]


def test_version(capsys):
    code, data = run_json(capsys, "version")
    assert code == 0 and data["undertow"] == version("undertow") and data["torch"] == version("torch")
    assert run(capsys, "version")[1].splitlines()[0] == f"undertow {version('undertow')}"


@pytest.mark.parametrize("words", [(), ("--help",), ("inspect", "--help"), ("check", "--help")])
def test_help(capsys, words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "") and "Usage: undertow" in out


def test_the_installed_command():
    command = Path(sys.executable).parent / "undertow"
    done = subprocess.run([command, "inspect", "vgg61"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "did you mean vgg16" in done.stderr
    assert "Traceback" not in done.stderr


FULL = "undertow: stdout cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "words, code, err",
    [
        ("version >/dev/full", 5, FULL),
        ("--help >/dev/full", 5, FULL),
        ("version --json >/dev/full", 5, json.dumps({"error": FULL.removeprefix("undertow: ").rstrip()}) + "\n"),
        ("version | true", 141, ""),
        ("inspect vgg61 2>&1 | true", 141, ""),
        ("inspect vgg61 2>/dev/full", 5, ""),
        ("inspect vgg61 2>&-", 2, ""),
        ("version >&-", 0, ""),
    ],
)
def test_streams_that_cannot_be_written(words, code, err):
    # The second process of the pipe ends before the first writes anything.
    script = f"set -o pipefail; {sys.executable} -m undertow {words}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", err)


def test_help_needs_no_torch():
    # Without the package's `__init__`: only the command line itself is tested.
    program = (
        "import sys, types\n"
        "package = types.ModuleType('undertow'); package.__path__ = [sys.argv[1]]; sys.modules['undertow'] = package\n"
        "from undertow.cli import main\n"
        "code = main(['inspect', '--help'])\n"
        "assert 'torch' not in sys.modules and code == 0\n"
    )
    subprocess.run([sys.executable, "-c", program, str(PACKAGE)], check=True, capture_output=True)


def test_plan_fits_or_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    page = tmp_path / "report.html"
    code, out, err = run(capsys, "plan", "lenet5", "--batch", "4", "--budget", "8MiB", "--html", str(page))
    assert code == 0 and not err
    assert "at the peak" in out and "measured: peak" in out and "median" in out
    assert out.rstrip().splitlines()[-1].startswith("fits: ") or "fits: " in out.rstrip().splitlines()[-2]
    assert page.read_text().lower().startswith("<!doctype html>")
    code, data = run_json(capsys, "plan", "lenet5", "--batch", "4", "--budget", "8MiB", "--costs", "model")
    assert code == 0 and data["fits"] and data["peak_bytes"] <= 8 * 2**20 and data["curve"]

    code, out, err = run(capsys, "plan", "lenet5", "--batch", "64", "--budget", "3M", "--html", str(page))
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[-1].startswith("undertow: the budget of 3.0 MiB cannot be met") and len(lines) < 30
    assert max(map(len, lines)) <= 80
    assert "Does not fit" in page.read_text() and "What would fit the budget" in page.read_text()
    assert "no budget given" not in page.read_text()
    code, data = run_json(capsys, "plan", "lenet5", "--batch", "64", "--budget", "3M")
    assert code == 1 and data["fits"] is False and data["minimum_bytes"] > data["budget_bytes"] == 3 << 20
    assert all(way["peak_bytes"] <= 3 << 20 and way["change"] for way in data["ways"])
    code, out, err = run(capsys, "plan", "lenet5", "--budget", "50%")
    assert code == 2 and "budget" in err


def test_solve_a_graph(capsys, tmp_path):
    nodes = [{"id": index, "out_cost": 10 if index < 4 else 1, "duration": 1} for index in range(8)]
    links = [{"0": index, "1": index + 1} for index in range(7)]
    links += [{"0": index, "1": 7 - index} for index in range(3)]
    graph = tmp_path / "graph.json"
    graph.write_text(json.dumps({"nodes": nodes, "links": links}))
    code, data = run_json(capsys, "solve", str(graph), "--peak", "0.9", "--order", "fixed")
    assert code == 0
    assert data["peak_ratio"] <= 0.9
    assert data["lower_bound_percent"] <= data["extra_time_percent"]
    assert data["seconds"] > 0
    code, out, err = run(capsys, "solve", str(graph), "--peak", "0.1")
    assert code == 1 and "infeasible" in out
    for words in (("solve", str(tmp_path / "none.json"), "--peak", "0.9"), ("solve", str(graph), "--peak", "-1")):
        assert run(capsys, *words)[0] == 2


def test_tune_times_both_numerics(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["tune", "lenet5", "--batch", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_operations"] > 10 and sum(found["fast_operations"].values()) > 0
    assert list((tmp_path / "undertow").glob("costs-*.json"))


def test_plan_with_unknown_numerics(capsys):
    assert main(["plan", "lenet5", "--batch", "2", "--numerics", "quick"]) == 2
    assert '"exact", "fast", "bf16"' in capsys.readouterr().err


@pytest.mark.parametrize("place", ["missing/page.html", "my_models.py/page.html", "."])
def test_a_page_that_cannot_be_written_is_refused_before_planning(capsys, monkeypatch, place):
    monkeypatch.setattr("undertow.api.reports.report_plan", lambda *_, **__: pytest.fail("planned"))
    code, out, err = run(capsys, "plan", "lenet5", "--html", place)
    assert (code, out) == (5, "") and err.startswith(f"undertow: --html {place} cannot be written: ")


@pytest.mark.parametrize("place", ["my_models.py/run", "my_models.py"])
def test_a_folder_that_cannot_be_made_is_refused_before_planning(capsys, monkeypatch, folder, place):
    monkeypatch.setattr("undertow.cli.workloads.load_workload", lambda *_: pytest.fail("loaded"))
    code, out, err = run(capsys, "train", "lenet5", "--out", place)
    assert (code, out) == (5, "") and f"the run's folder {place} cannot be made or written" in err
    assert (folder / "my_models.py").read_text() == MODELS


def test_a_page_that_was_only_checked_is_not_there(capsys, folder):
    assert run(capsys, "plan", "no_such_model", "--html", "page.html")[0] == 2
    assert not (folder / "page.html").exists()


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_lines_fit_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    calls = [
        ("plan", "lenet5", "--batch", "64", "--budget", "3800K", "--costs", "model"),
        ("plan", "lenet5", "--batch", "64", "--budget", "1MiB", "--costs", "model"),
        ("inspect", "lenet5", "--batch", "2", "--optimizer", "adam"),
        ("check", "my_models.py:with_args"),
    ]
    for words in calls:
        _, out, err = run(capsys, *words)
        lines = [line for line in (out + err).splitlines() if not line.startswith("undertow: ")]
        assert lines and max(map(len, lines)) <= min(columns, 80), words


@pytest.mark.parametrize("command, words", [("train", ("sgd", "digits", "10")), ("plan", ("exact", "measured"))])
def test_help_says_the_defaults(capsys, command, words):
    out = " ".join(run(capsys, command, "--help")[1].split())
    assert all(f"[default: {word}]" in out for word in words)


@pytest.mark.parametrize("delay_s", [0.2, 0.8])
def test_ctrl_c_while_importing_is_quiet(delay_s):
    # Modules that take long to find stand for slow disks; Ctrl-C comes while they are imported.
    program = (
        "import sys, threading, time, signal, os\n"
        "from undertow.cli import main\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('typer', 'torch'):\n"
        "            time.sleep(1)\n"
        "sys.meta_path.insert(0, Slow())\n"
        f"threading.Timer({delay_s}, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "sys.exit(main(['plan', 'vgg16', '--batch', '64']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["torch", "torch.sparse", "torch.nn"])
def test_ctrl_c_inside_pytorch_is_quiet(module):
    # Some of PyTorch's own code aborts the process where an exception comes: the import hook stands for it.
    program = (
        "import sys, signal, os\n"
        "from undertow.cli import main\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            try:\n"
        "                signal.raise_signal(signal.SIGINT)\n"
        "            except BaseException:\n"
        "                os.abort()\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "sys.exit(main(['plan', 'vgg16', '--batch', '64']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_works_as_before_after_a_command(capsys):
    assert run(capsys, "--version")[0] == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_terminal_is_told_what_takes_long(tmp_path):
    terminal, end = pty.openpty()
    words = [sys.executable, "-m", "undertow", "plan", "lenet5", "--budget", "8M"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=end, env=environment, text=True) as process:
        os.close(end)
        shown = b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            shown += part
        out = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0 and "\x1b" not in out
    for words in (b"recording the model ...", b"timing operations", b"searching for plans of", b"running the step"):
        assert words in shown
    assert shown.removesuffix(b"\x1b[0m").endswith(
        b"\r\x1b[K"
    )  # the line is erased; libraries reset colours at the end
