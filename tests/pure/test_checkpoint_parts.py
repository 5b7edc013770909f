"""Checkpoints that several ranks write: any number of parts is the same checkpoint, and nothing damaged is read."""

import json
from pathlib import Path

import pytest
import torch

from undertow.errors import CallError, DataError, FolderError
from undertow.train import checkpoint_parts, weights
from undertow.train.checkpoint import Checkpoint, Progress, load_checkpoint, save_checkpoint, save_in_parts
from undertow.train.checkpoint_parts import PART_FORMAT, divide_tensors, write_part
from undertow.train.job import Job
from undertow.train.weights import read_tensors, write_tensors

CPU = torch.device("cpu")


def make_checkpoint(seed):
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        "model/weight": torch.randn(7, 5, generator=draw),
        "model/count": torch.tensor(seed),
        "model/half[0:3]": torch.randn(9, generator=draw).bfloat16().reshape(3, 3).t(),
        "model/nothing": torch.empty(0, 4),
        "optimizer/0/exp_avg": torch.randn(7, 5, generator=draw).double(),
        "generator/cpu": torch.arange(6, dtype=torch.uint8),
    }
    return Checkpoint(tensors, Progress(step=seed), {"environment": {"num_threads": 1}})


class OneOfSeveral(Job):
    """A rank that is told what the others have written."""

    def __init__(self, rank, size, files):
        super().__init__()
        self.rank, self.size, self.is_first, self.files = rank, size, rank == 0, files

    def gather(self, own):
        self.files[self.rank] = own
        return [self.files[rank] for rank in sorted(self.files)]

    def decide(self, make):
        return make() if self.is_first else None


def save(path, checkpoint, size):
    files = {}
    for rank in reversed(range(size)):
        save_in_parts(path, checkpoint, OneOfSeveral(rank, size, files))
    return list(files.values())


def same(found, expected):
    assert found.progress == expected.progress and found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor), name


@pytest.mark.parametrize("size", [1, 2, 3, 8, 200])
def test_any_number_of_parts_is_the_same_checkpoint(tmp_path, size):
    path = tmp_path / "checkpoint.safetensors"
    checkpoint = make_checkpoint(3)
    save(path, checkpoint, size)
    same(load_checkpoint(path), checkpoint)


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch, size):
    path = tmp_path / "checkpoint.safetensors"
    save(path, make_checkpoint(1), 3)
    read, replaced = checkpoint_parts.read_tensors, []

    def replace_first(part):
        if not replaced:
            replaced.append(part)
            save(path, make_checkpoint(2), size)
        return read(part)

    monkeypatch.setattr(checkpoint_parts, "read_tensors", replace_first)
    same(load_checkpoint(path), make_checkpoint(2))
    assert replaced


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path, monkeypatch):
    """The library opens it by name, and it may be another one by then."""
    path = tmp_path / "checkpoint.safetensors"
    save(path, make_checkpoint(1), 1)
    safe_open = weights.safe_open

    def replace_first(name, framework):
        save(path, make_checkpoint(2), 1)
        return safe_open(name, framework=framework)

    monkeypatch.setattr(weights, "safe_open", replace_first)
    same(load_checkpoint(path), make_checkpoint(1))


def test_parts_are_about_equal():
    tensors = make_checkpoint(0).tensors
    for num_parts in range(1, 12):
        parts = divide_tensors(tensors, num_parts)
        sizes = [
            sum((piece.end - piece.first) * tensors[piece.name].element_size() for piece in part) for part in parts
        ]
        assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
        assert max(sizes) - min(sizes) < 2 * 8  # a cut is between two elements, of 8 bytes at most


def test_the_one_before_stands_until_the_main_file_is_there(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    save(path, make_checkpoint(1), 3)
    before = sorted(item.name for item in tmp_path.iterdir())
    for rank in (1, 2):  # and rank 0 is killed
        save_in_parts(path, make_checkpoint(2), OneOfSeveral(rank, 3, {}))
    (tmp_path / "part-0.safetensors.new").write_text("half a part")
    assert len(list(tmp_path.iterdir())) == len(before) + 3
    same(load_checkpoint(path), make_checkpoint(1))
    save(path, make_checkpoint(2), 2)
    same(load_checkpoint(path), make_checkpoint(2))
    assert len(list(tmp_path.iterdir())) == 3
    save(path, make_checkpoint(3), 1)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_a_part_that_is_missing_or_damaged(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    file = tmp_path / save(path, make_checkpoint(1), 3)[1]
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="does not match the hash in its name"):
        load_checkpoint(path)
    file.unlink()
    with pytest.raises(DataError, match=f"a checkpoint in parts, and {file.name} is missing"):
        load_checkpoint(path)


def test_a_folder_that_ranks_do_not_share(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    files = {}
    save_in_parts(path, make_checkpoint(1), OneOfSeveral(1, 2, files))
    (tmp_path / files[1]).unlink()
    with pytest.raises(FolderError, match="rank 1 has written .* and rank 0 does not find it there"):
        save_in_parts(path, make_checkpoint(1), OneOfSeveral(0, 2, files))


@pytest.mark.parametrize(
    ("files", "shapes", "message"),
    [
        (["../part.safetensors"], {}, "which is no name of one"),
        (None, {"model/weight": [7, 6]}, "do not hold all of model/weight"),
        (None, {"model/weight": [1 << 40, 1 << 40]}, "do not hold all of model/weight"),
        (None, {"model/other": [1]}, "do not hold all of model/other"),
        (None, 3, "does not hold the state of a run"),
    ],
)
def test_a_main_file_that_lies(tmp_path, files, shapes, message):
    path = tmp_path / "checkpoint.safetensors"
    names = save(path, make_checkpoint(1), 2)
    tensors, metadata = read_tensors(path)
    from undertow.train.checkpoint import _digest

    parts = json.dumps({"files": names if files is None else files, "shapes": shapes})
    digest = _digest(tensors, metadata["state"] + parts)
    write_tensors(path, tensors, {**metadata, "parts": parts, "sha256": digest})
    with pytest.raises(DataError, match=message):
        load_checkpoint(path)


def test_pieces_that_overlap_are_refused(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    tensors = {"model/weight": torch.arange(10.0)}
    half, whole = divide_tensors(tensors, 2)[0], divide_tensors(tensors, 1)[0]
    files = {1: write_part(tmp_path, tensors, half), 0: write_part(tmp_path, tensors, whole)}
    job = OneOfSeveral(0, 2, files)
    job.gather = lambda own: list(files.values())
    save_in_parts(path, Checkpoint(tensors, Progress(), {"environment": {"num_threads": 1}}), job)
    with pytest.raises(DataError, match="do not hold all of model/weight"):
        load_checkpoint(path)
    write_tensors(Path(tmp_path, files[1]), {"model/weight[0:1]": torch.zeros(3)}, {"format": PART_FORMAT})
    with pytest.raises(DataError, match="does not match the hash"):
        load_checkpoint(path)


def test_one_process_writes_what_it_always_wrote(tmp_path):
    one, other = tmp_path / "a" / "checkpoint.safetensors", tmp_path / "b" / "checkpoint.safetensors"
    for path in (one, other):
        path.parent.mkdir()
    save(one, make_checkpoint(4), 1)
    save_checkpoint(other, make_checkpoint(4))
    assert one.read_bytes() == other.read_bytes()


class Told(Job):
    """A rank that hears these facts from all."""

    def __init__(self, facts):
        super().__init__()
        self.facts, self._ranks, self.size = facts, object(), len(facts)

    def gather(self, own):
        return self.facts


def test_a_rank_with_less_memory_than_the_plan():
    gib = 1 << 30
    enough, little = ["big", 8 * gib, 0, 3 * gib], ["small", 4 * gib, gib, 3 * gib]
    Told([enough, enough, little]).check_memory(0, CPU)
    with pytest.raises(
        CallError, match="rank 2 has too little memory: on small, 2 ranks plan to take 6.0 GiB together"
    ):
        Told([enough, enough, [*little[:2], 0, 3 * gib], [*little[:2], gib, 3 * gib]]).check_memory(0, CPU)


def test_free_memory_is_divided_among_the_ranks_of_a_machine():
    assert Told([["a", 100], ["a", 90], ["b", 70]]).share_free_memory(0, CPU) == 45


def test_other_processors_are_said():
    assert Told(["x", "x"]).find_other_processors(CPU) == ""
    assert "rank 0 computes on x, rank 1 on y" in Told(["x", "y", "x"]).find_other_processors(CPU)
