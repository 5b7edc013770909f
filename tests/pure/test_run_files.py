"""The files of a run: weights that any reader opens, files that are refused, writes that fail, events."""

import errno
import json
import os
import pickle
import struct

import pytest
import safetensors.torch
import torch

from undertow.durable import write_durably
from undertow.errors import DataError, FolderError
from undertow.hashing import DTYPES, hash_tensors
from undertow.train.checkpoint import Checkpoint, Progress, load_checkpoint, save_checkpoint
from undertow.train.events import EventWriter
from undertow.train.weights import read_tensors, write_tensors


def some_tensors():
    draw = torch.Generator().manual_seed(0)
    found = {f"of {dtype}": (4 * torch.rand(2, 3, generator=draw)).to(dtype) for dtype in DTYPES}
    return found | {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.rand(3, 2).t()}


def test_the_library_reads_what_is_written(tmp_path):
    path, tensors = tmp_path / "a.safetensors", some_tensors()
    write_tensors(path, tensors, {"format": "pt"})
    found = safetensors.torch.load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    again, metadata = read_tensors(path)
    assert metadata == {"format": "pt"}
    assert hash_tensors(again) == hash_tensors(tensors)


def test_the_hash_sees_everything():
    one = {"a": torch.zeros(2, 3)}
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3, dtype=torch.int32)}]
    others.append({"a": torch.tensor([[0.0, 0, 0], [0, 0, -0.0]])})
    assert len({hash_tensors(item) for item in (one, *others)}) == 5


def checkpoint_file(folder):
    path = folder / "checkpoint.safetensors"
    about = {"config": {}, "environment": {"num_threads": 1}}
    save_checkpoint(path, Checkpoint({"model/w": torch.ones(300)}, Progress(step=7), about, {"mm": (5, 6)}))
    return path


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    found = load_checkpoint(checkpoint_file(tmp_path))
    assert found.progress == Progress(step=7) and found.costs == {"mm": (5, 6)}
    assert torch.equal(found.weights()["w"], torch.ones(300))
    assert os.listdir(tmp_path) == ["checkpoint.safetensors"]


def header_of(data, header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
REFUSED = {
    "pickle": (lambda data: pickle.dumps({"w": 1}), "is a pickle"),
    "truncated": (lambda data: data[:-1], "truncated or overlong"),
    "cut in its header": (lambda data: data[:40], "not a whole safetensors file"),
    "overlong": (lambda data: data + b"x", "truncated or overlong"),
    "empty": (lambda data: b"", "too few"),
    "a bit flipped": (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "damaged"),
    "endless header": (lambda data: struct.pack("<Q", 2**63) + data[8:], "claims a header"),
    "header is no JSON": (lambda data: struct.pack("<Q", 4) + b"{{{{", "header does not follow the format"),
    "header of lists": (lambda data: header_of(b"", [1]), "header does not follow the format"),
    "deep header": (lambda data: struct.pack("<Q", 60000) + b'{"a":' * 12000, "header does not follow the format"),
    "overlapping": (lambda data: header_of(bytes(8), {"a": ONE, "b": ONE}), "is refused"),
    "negative": (
        lambda data: header_of(bytes(8), {"a": {**ONE, "data_offsets": [-8, 8]}}),
        "is refused",
    ),
    "shape too large": (lambda data: header_of(bytes(8), {"a": {**ONE, "shape": [2**40]}}), "is refused"),
    "plain weights": (lambda data: header_of(bytes(8), {"a": ONE}), "not a checkpoint of a run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_no_checkpoint(tmp_path, name):
    change, message = REFUSED[name]
    path = checkpoint_file(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        load_checkpoint(path)


def test_a_renamed_archive_of_torch(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    torch.save({"w": torch.ones(3)}, path)
    with pytest.raises(DataError, match="torch.save"):
        load_checkpoint(path)


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(*unused):
        raise OSError(errno.ENOSPC, "No space left on device")

    def write(file):
        file.write(b"new")
        if failing == "write":
            fail()

    if failing != "write":
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises(FolderError, match="No space left on device; what was there before is unharmed"):
        write_durably(path, write)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_tensorboard_reads_the_events(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    path = tmp_path / "events.out.tfevents.1"
    with open(path, "wb") as file:
        writer = EventWriter(file, 100.0, restarted_at=300)
        writer.add_scalar("train/loss", 0.25, 300, 101.5)
        writer.add_scalar("test/accuracy", 0.5, 70_000, 102.0)
    version, restart, first, second = loader.LegacyEventFileLoader(str(path)).Load()
    assert version.file_version == "brain.Event:2" and version.wall_time == 100.0
    assert restart.session_log.status == restart.session_log.START and restart.step == 300
    assert (first.step, first.wall_time) == (300, 101.5)
    (value,) = first.summary.value
    assert (value.tag, value.simple_value) == ("train/loss", 0.25)
    assert second.step == 70_000 and second.summary.value[0].simple_value == 0.5
