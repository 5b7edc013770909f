"""`undertow train --parallel server`, as a user calls it."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="the parameter server needs Ray: pip install 'undertow[cluster]'"
)
MODEL = ("lenet300", "--data", "digits", "--batch", "32", "--epochs", "1", "--threads", "1")
SERVED = ("--parallel", "server", "--workers", "2", "--servers", "2")


def undertow(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "undertow", *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )


def weights_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["weights_sha256"]


def test_a_run_is_replayed_to_the_same_bits_and_goes_on_in_one_process(tmp_path):
    run = str(tmp_path / "run")
    done = undertow("train", *MODEL, *SERVED, "--max-delay", "2", "--out", run, "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "pushes.jsonl").read_text().splitlines()]
    pushes = [push for line in lines if "part" in line for push in line["pushes"]]
    found = undertow("train", "--replay", run, "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["is_same"] and json.loads(found.stdout)["pushes"] == len(pushes) > 0
    on = undertow("train", "--resume", run, "--epochs", "2", "--parallel", "data=1", "--workers", "0", "--json")
    assert on.returncode == 0, on.stderr


@pytest.mark.exhaustive
def test_a_delay_of_0_has_the_bits_of_shards(tmp_path):
    served = undertow("train", *MODEL, *SERVED, "--max-delay", "0", "--out", str(tmp_path / "served"), "--json")
    alone = ("lenet300", "--data", "digits", "--batch", "64", "--shards", "2", "--epochs", "1", "--threads", "1")
    in_one = undertow("train", *alone, "--out", str(tmp_path / "alone"), "--json")
    assert weights_of(served) == weights_of(in_one)


def find_server(pid):
    """A server process of a run."""
    children = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in children.splitlines()[1:]]
    ours = {str(pid)}
    while more := {row[0] for row in rows if row[1] in ours} - ours:
        ours |= more
    return next((int(row[0]) for row in rows if row[0] in ours and row[2].startswith("ray::ServerActor")), None)


@pytest.mark.exhaustive
def test_a_run_whose_part_is_gone_goes_back_to_its_checkpoint(tmp_path):
    words = (
        *MODEL,
        *SERVED,
        "--replicas",
        "1",
        "--max-delay",
        "free",
        "--epochs",
        "40",
        "--out",
        str(tmp_path / "run"),
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "undertow", "train", *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    log = tmp_path / "run" / "pushes.jsonl"
    while not log.exists():  # it is written after the first epoch
        assert process.poll() is None
        time.sleep(0.1)
    killed = find_server(process.pid)
    os.kill(killed, signal.SIGKILL)
    _, said = process.communicate(timeout=280)
    assert process.returncode == 0, said
    assert "going back to the last checkpoint" in " ".join(said.split())
    assert "went_back_to_step" in log.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workers", "0"), "needs workers that compute"),
        (("--workers", "2", "--servers", "2", "--replicas", "3"), "3 replicas of each part need as many servers"),
        (("--workers", "2", "--clip-norm", "1"), "clip_norm cannot be had with parallel=server"),
        (("--workers", "2", "--max-delay", "soon"), "max_delay must be a whole number or free"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, message, tmp_path):
    found = undertow("train", *MODEL, "--parallel", "server", *words, "--out", str(tmp_path / "run"))
    assert found.returncode == 2
    assert message in " ".join(found.stderr.split())
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_cannot_be_reached_is_refused(tmp_path):
    words = (*MODEL, *SERVED, "--cluster", "127.0.0.1:1", "--out", str(tmp_path / "run"))
    found = undertow("train", *words, RAY_AUTH_TOKEN="0" * 64)
    assert found.returncode == 2
    assert "the Ray cluster at 127.0.0.1:1 cannot be reached" in " ".join(found.stderr.split())


def test_without_ray_one_line_says_how_to_install_it(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('no ray')\n")
    found = undertow("train", *MODEL, *SERVED, "--out", str(tmp_path / "run"), PYTHONPATH=str(tmp_path))
    assert found.returncode == 2
    assert "pip install 'undertow[cluster]'" in found.stderr
    assert len(found.stderr.strip().splitlines()) <= 2


def test_ray_is_not_imported_before_it_is_needed():
    code = "import sys, undertow, undertow.cli.run_commands, undertow.train.run; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
