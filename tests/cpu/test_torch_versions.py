"""Versions of PyTorch: too old is refused in one line, newer than tested gets one warning, what is missing is named."""

import subprocess
import sys

import torch

from undertow.torch_internals import NEWEST, OLDEST, release_of


def test_this_version_is_in_the_range():
    assert OLDEST <= release_of(torch.__version__) <= NEWEST
    assert release_of("2.16.0a0+git1234") == (2, 16) and release_of("2.9.1+cu128") == (2, 9)


def run_with_version(version: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a new process in which PyTorch says that it is of another version."""
    before = f"import sys, torch\ntorch.__version__ = {version!r}\n"
    return subprocess.run([sys.executable, "-c", before + program], capture_output=True, text=True)


def test_an_old_version_is_refused_in_one_line():
    program = "import undertow as ut\ntry:\n    ut.plan\nexcept ImportError as error:\n    print(error)"
    result = run_with_version("2.10.0+cpu", program)
    assert result.returncode == 0 and result.stderr == ""
    assert result.stdout == (
        "PyTorch 2.10.0+cpu is too old: Undertow works with 2.11 to 2.15; "
        'install a newer one: pip install "torch>=2.11"\n'
    )


def test_an_old_version_ends_a_command_with_one_line():
    for words in (["plan", "lenet5"], ["models"], ["doctor"], ["train", "lenet5"]):
        result = run_with_version("2.10.0", f"from undertow.cli import main; sys.exit(main({words}))")
        assert result.returncode == 2 and result.stdout == ""
        assert result.stderr.startswith("undertow: PyTorch 2.10.0 is too old: ") and result.stderr.count("\n") == 1


STEP = "ut.plan(torch.nn.Linear(2, 2), (torch.randn(1, 2),))"


def test_a_newer_version_gets_one_warning_at_first_use():
    program = (
        "import warnings, undertow as ut\n"
        "with warnings.catch_warnings(record=True) as shown:\n"
        "    warnings.simplefilter('always')\n"
        f"    print(len(shown)); {STEP}; {STEP}\n"
        "print(*(item.message for item in shown), sep='\\n')\n"
    )
    result = run_with_version("2.99.0", program)
    assert result.returncode == 0, result.stderr
    count, *warnings = result.stdout.splitlines()
    assert count == "0" and len(warnings) == 1
    assert warnings[0].startswith("PyTorch 2.99.0 is newer than those that Undertow was tested with (2.11 to 2.15)")


def test_a_tested_version_gets_no_warning():
    result = run_with_version(f"{NEWEST[0]}.{NEWEST[1]}.9", f"import undertow as ut; {STEP}")
    assert result.returncode == 0 and result.stderr == ""


def test_what_a_version_lacks_is_named_in_one_line():
    program = (
        "del torch._C._select_conv_backend\nimport undertow as ut\n"
        "try:\n    ut.plan\nexcept ut.UnsupportedTorch as error:\n    print(error)"
    )
    result = run_with_version("2.99.0", program)
    assert result.stderr == "" and result.stdout.count("\n") == 1
    assert "_select_conv_backend" in result.stdout and "2.11 to 2.15" in result.stdout
