"""`undertow train` on several ranks: one process's bits, one voice, no rank left over, and what is refused."""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
from training_commands import refuse, users_folder

import undertow as ut
from undertow.errors import CallError, RankLost
from undertow.hashing import hash_tensors
from undertow.ranks import ranks as ranks_module
from undertow.train.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make():
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))

def other_data():
    x = torch.randn(60, 8) + int(os.environ["RANK"])
    loader = DataLoader(TensorDataset(x, torch.randint(3, (60,))), batch_size=10)
    return loader, loader

def make_large():
    hidden = [layer for _ in range(3) for layer in (nn.Linear(160, 160), nn.Tanh())]
    return nn.Sequential(nn.Linear(8, 160), nn.Dropout(0.1), *hidden, nn.Linear(160, 3))

def on_evaluation(record):
    with open("evaluations.txt", "a") as file:
        file.write(f"{record['kind']} {record['epoch']} {record['loss'].hex()}\\n")
"""
TRAIN = ["train", "models.py:make", "--data", "data.npz", "--batch", "12", "--shards", "6", "--seed", "1"]
TRAIN += ["--threads", "1", "--device", "cpu", "--optimizer", "adamw", "--clip-norm", "1", "--lost-after", "20"]
RUN = [*TRAIN, "--epochs", "4", "--validation", "0.25", "--ema", "0.8", "--schedule", "plateau", "--save-every", "2"]
RUN += ["--callbacks", "models.py", "--schedule-args", "patience=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("jobs")
    (path / "models.py").write_text(MODELS)
    draw = numpy.random.default_rng(0)
    x, y = draw.standard_normal((100, 8)).astype("float32"), draw.integers(0, 3, 100)
    numpy.savez(path / "data.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    return path


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    with users_folder(folder, monkeypatch):
        Path("evaluations.txt").unlink(missing_ok=True)
        yield folder


def call(*words, launcher=("-m", "undertow"), code=0):
    result = subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, timeout=240)
    assert result.returncode == code, result.stderr
    return result


def state_of(name):
    """What a run has come to, and its records."""
    folder = RunFolder(Path(name))
    checkpoint = folder.read_checkpoint()
    tensors = {key: item for key, item in checkpoint.tensors.items() if not key.startswith("generator/")}
    progress = checkpoint.progress
    kept = (progress.step, progress.epoch, progress.best_loss, progress.best_step, progress.num_drops)
    records = [(item["step"], item["kind"], item["loss"]) for item in folder.read_metrics() if "loss" in item]
    return hash_tensors(tensors), hash_tensors(folder.read_best().weights()), kept, records


@pytest.fixture(scope="module")
def expected(folder):
    """The run in one process."""
    subprocess.run([sys.executable, "-m", "undertow", *RUN, "--out", "one"], check=True, cwd=folder, timeout=240)
    before = os.getcwd()
    os.chdir(folder)
    state = state_of("one"), Path("evaluations.txt").read_text()
    Path("evaluations.txt").unlink()
    os.chdir(before)
    return state


def test_a_run_goes_on_with_other_ranks(expected):
    first = call(*RUN, "--out", "moved", "--parallel", "data=2", "--max-steps", "7", "--json")
    assert json.loads(first.stdout)["steps"] == 7  # one object: one rank prints
    assert "2 ranks on this machine, which listen on 127.0.0.1 alone" in first.stderr
    assert len(list(Path("moved").glob("part-*"))) == 2
    call("train", "--resume", "moved", "--parallel", "data=3", "--max-steps", "12")
    assert len(list(Path("moved").glob("part-*"))) == 3
    Path("evaluations.txt").unlink()  # each of the shorter runs has judged its last weights
    last = call("train", "--resume", "moved", "--parallel", "data=1", "--max-steps", "1000")
    assert "ranks" not in last.stderr
    assert not list(Path("moved").glob("part-*"))
    state, evaluations = expected
    assert state_of("moved")[:3] == state[:3]
    losses = [[item for item in records if item[1] == "train"] for records in (state_of("moved")[3], state[3])]
    assert losses[0] == losses[1]
    assert Path("evaluations.txt").read_text() in evaluations
    assert RunFolder(Path("moved")).read_config().threads == 1


def test_the_ranks_of_torchrun(expected):
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "undertow")
    result = call(*RUN, "--out", "torchrun", "--parallel", "data=2", launcher=torchrun)
    assert result.stdout.count("weights sha256") == 1
    assert "torchrun's store on port" in result.stderr and "of every interface" in result.stderr
    assert (state_of("torchrun"), Path("evaluations.txt").read_text()) == expected


def find_ranks(name):
    """The processes of the ranks of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command, parent = path.read_bytes(), path.with_name("stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if f"--out={name}\0".encode() in command:
            found.append((int(path.parent.name), int(parent)))
    return [rank for rank, _ in sorted(found)]


def start(name, *words):
    """A job that has begun to train and would do so for long."""
    command = [sys.executable, "-m", "undertow", *TRAIN, "--epochs", "100000", "--out", name, *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while (
        not Path(name, "checkpoint.safetensors").exists() or RunFolder(Path(name)).read_checkpoint().progress.step < 6
    ):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    return process


def test_control_c_saves_and_nobody_is_left():
    process = start("interrupted", "--parallel", "data=2")
    assert len(find_ranks("interrupted")) == 2
    os.kill(find_ranks("interrupted")[1], signal.SIGTERM)  # a rank that is asked to end ends all
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "terminated after" in out
    process = subprocess.Popen([sys.executable, "-m", "undertow", "train", "--resume", "interrupted"])
    progress = RunFolder(Path("interrupted")).read_checkpoint().progress
    while RunFolder(Path("interrupted")).read_checkpoint().progress.step == progress.step:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert RunFolder(Path("interrupted")).read_checkpoint().progress.stopped == "interrupted"
    assert not find_ranks("interrupted")


def listening_addresses(processes):
    """Where these processes wait for others to connect or to send: addresses as the kernel lists them."""
    sockets = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(os.readlink(entry))
    found = []
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):  # listening, or not connected
        for line in Path(f"/proc/{processes[0]}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, found_state, *_, inode = line.split()[:10]
            if found_state == state and f"socket:[{inode}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])  # each of 4 bytes, the last byte first
                address = b"".join(words[place : place + 4][::-1] for place in range(0, len(words), 4))
                found.append(ipaddress.ip_address(address))
    return found


def test_a_job_listens_on_the_loopback_alone_and_ends_with_its_launcher():
    process = start("orphaned", "--parallel", "data=2")
    found = find_ranks("orphaned")
    assert len(found) == 2
    addresses = listening_addresses([process.pid, *found])
    assert len(addresses) >= 3  # the store, and the messages of each rank
    assert all(address.is_loopback for address in addresses), addresses
    with socket.socket() as wide:
        wide.bind(("0.0.0.0", 0))
        wide.listen()
        assert ipaddress.ip_address("0.0.0.0") in listening_addresses([os.getpid()])  # it would be seen
    os.kill(found[0], signal.SIGSTOP)  # even one that can do nothing
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while find_ranks("orphaned"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_fewer_ranks_go_on(expected):
    words = ["--parallel", "data=3", "--max-restarts", "1", "--min-ranks", "2"]
    command = [sys.executable, "-m", "undertow", *RUN, "--out", "fewer", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while not Path("fewer", "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    killed = find_ranks("fewer")[2]
    os.kill(killed, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "rank 2 was killed by SIGKILL" in err
    assert "2 ranks start again from the last checkpoint" in err
    assert state_of("fewer")[:3] == expected[0][:3]
    assert RunFolder(Path("fewer")).read_config().parallel == "data=2"


@pytest.mark.parametrize(
    "cases",
    [
        ["link-reduce-0"],
        pytest.param(
            ["exit-backward-1", "raise-save-0", "stop-update-1", "hang-forward-0", "kill-load-1"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_faults_that_the_benchmark_injects(cases):
    """A sample; `scripts/bench rank_faults` has all of them."""
    command = [sys.executable, str(ROOT / "benchmarks" / "rank_faults.py"), "--ranks", "2", "--cases", *cases]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f'"injected": {len(cases)}' in result.stdout


def test_ranks_with_other_data_are_refused():
    words = [*TRAIN, "--data", "models.py:other_data", "--parallel", "data=2", "--out", "differing"]
    result = call(*words, code=2)
    lines = [line for line in result.stderr.splitlines() if line.startswith("undertow: the ranks")]
    assert len(lines) == 1 and "the ranks differ in the first batch: rank 0 has" in lines[0]
    assert not Path("differing", "config.json").exists()


@pytest.mark.exhaustive
def test_a_loss_that_is_not_finite_is_explained_as_in_one_process():
    words = [*TRAIN, "--optimizer", "sgd", "--clip-norm", "1e30", "--lr", "1e25"]
    lines = []
    for more in (["--out", "bad-1"], ["--out", "bad-2", "--parallel", "data=2"]):
        found = [line for line in call(*words, *more, code=4).stderr.splitlines() if line.startswith("undertow: ")]
        lines.append([line for line in found if "ranks" not in line])
    assert len(lines[0]) == len(lines[1]) == 1
    assert lines[0][0].replace("bad-1", "bad-2") == lines[1][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parallel", "data=2"], "no shards are given; give --shards 2 or more"),
        (["--shard-state"], "shard_state divides the optimizer's state over ranks; give --parallel as well"),
        (
            ["--parallel", "data=2", "--shards", "2", "--shard-state", "--ema", "0.9", "--budget", "1GiB"],
            "leave out one of the three",
        ),
        (["--parallel", "data=3", "--shards", "2"], "2 shards cannot be divided over 3 ranks"),
        (["--parallel", "data=2", "--shards", "8", "--batch", "4"], "a batch of 4 cannot be divided into 8 shards"),
        (["--parallel", "4", "--shards", "4"], "parallel is written as data=4 or stages=4"),
        (["--parallel", "data=2", "--shards", "2", "--min-ranks", "1"], "and --max-restarts"),
        (["--shards", "2", "--min-ranks", "2", "--max-restarts", "1"], "with how many of the 1 ranks"),
    ],
)
def test_options_that_do_not_fit(capsys, words, message):
    refuse(capsys, 2, message, "train", "models.py:make", "--data", "data.npz", *words)


@pytest.mark.exhaustive
def test_parameters_that_are_divided():
    """Evaluated, saved in parts, kept and resumed: as in one process, within a budget that has no room for them."""
    words = ["train", "models.py:make_large", "--data", "data.npz", "--batch", "12", "--shards", "2", "--seed", "1"]
    words += ["--threads", "1", "--device", "cpu", "--optimizer", "adamw", "--validation", "0.25", "--keep", "1"]
    call(*words, "--epochs", "3", "--out", "whole")
    ranks = ["--parallel", "data=2", "--shard-state"]
    shown = call(*words, *ranks, "--epochs", "2", "--budget", "1150KiB", "--out", "divided")
    assert "buckets of parameters are divided over the ranks" in shown.stdout + shown.stderr
    call("train", "--resume", "divided", "--epochs", "3")
    (*divided, records), (*whole, expected_records) = state_of("divided"), state_of("whole")
    assert divided == whole
    # The best weights were tested when it ended for the first time, too.
    assert [item for item in records if item[1] != "test"] == [item for item in expected_records if item[1] != "test"]
    kept = sorted(path.name for path in Path("divided").glob("*epoch*"))
    assert kept == sorted(path.name for path in Path("whole").glob("*epoch*"))


@pytest.mark.parametrize(("words", "wanted"), [((), 1), (("--parallel", "data=2", "--shards", "2"), 2)])
def test_another_number_of_processes(capsys, monkeypatch, words, wanted):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = f"3 processes were started, and the options are for {wanted}: give --parallel data=3"
    refuse(capsys, 2, message, "train", "models.py:make", "--data", "data.npz", *words)


def test_a_port_in_use(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", str(port)),
        ):
            monkeypatch.setenv(name, value)
        with pytest.raises(CallError, match=f"rank 0 cannot join the others by .*127.0.0.1:{port}"):
            ranks_module.join(ut.Mesh(data=2))


def test_a_rank_that_never_comes(monkeypatch):
    monkeypatch.setattr(ranks_module, "JOINING", timedelta(seconds=1))
    store = torch.distributed.HashStore()
    with pytest.raises(RankLost, match="rank 1 did not come within 1 s, and 3 ranks were to be started"):
        ranks_module._wait_for_all(store, 0, 3)


def test_the_report_shows_a_step_over_the_ranks():
    call(*TRAIN, "--epochs", "1", "--parallel", "data=2", "--out", "seen")
    found = json.loads(call("report", "seen", "--json").stdout)["ranks"]
    assert len(found["measured"]) == len(found["predicted"]) == 2
    for measured, predicted in zip(found["measured"], found["predicted"], strict=True):
        assert 0.5 * predicted["sent_bytes"] <= measured["sent_bytes"] <= predicted["sent_bytes"]
        assert {kind for kind, *_ in measured["stretches"]} >= {"computing", "sending"}
        assert 0 <= measured["idle_share"]["computing"] < 1
    assert "a step over 2 ranks" in call("report", "seen").stdout
    call("report", "seen", "--html")
    page = Path("seen/report.html").read_text()
    assert "A step over the ranks" in page and 'class="lane-sending"' in page
    call("train", "--resume", "seen", "--epochs", "2", "--parallel", "data=1")
    assert json.loads(call("report", "seen", "--json").stdout)["ranks"] == found
