"""The cache folder: shared by many processes, or impossible to write. The step is the same, and one line says why."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, undertow as ut
torch.manual_seed(0)
model = torch.nn.Sequential(*[layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
x = torch.randn(512, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = ut.train_step(model, (x,), targets=(x,), loss=torch.nn.functional.mse_loss, optimizer=optimizer, budget="1MiB")
print(step.plan.peak_bytes, float(step(x, x)))
"""


def start(cache, before=""):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", before + PROGRAM]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return output, errors


def test_processes_that_share_an_empty_folder(tmp_path):
    results = [finish(process) for process in [start(tmp_path) for _ in range(4)]]
    assert {errors for _, errors in results} == {""}
    losses = {output.split()[1] for output, _ in results}
    assert len(losses) == 1, "the bits do not depend on the plan"
    assert all(int(output.split()[0]) <= 2**20 for output, _ in results)
    assert not list(tmp_path.rglob("*.tmp")), "nothing half written is left"


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    _, errors = finish(start(tmp_path / "file"))
    assert errors.count("UserWarning") == 1
    assert f"could not be kept in the cache folder {tmp_path / 'file' / 'undertow'}" in errors


@pytest.mark.exhaustive  # it compiles all kernels of a step
def test_numba_without_a_folder_is_one_warning(tmp_path):
    """As when an administrator has installed the package, and its user has no home."""
    before = "import numba.core.caching\nnumba.core.caching.CacheImpl._locator_classes.clear()\n"
    output, errors = finish(start(tmp_path, before))
    assert errors.count("UserWarning") == 1 and "NUMBA_CACHE_DIR" in errors
    assert output.split()[1] == finish(start(tmp_path))[0].split()[1]
