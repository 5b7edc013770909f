"""Parts of data, weights of classes, and tables of Hugging Face datasets, whole and damaged."""

import io
import json
import os
import sys

import numpy
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from undertow.data.examples import Arrays
from undertow.data.images import list_images, open_image_folder
from undertow.data.opening import open_data
from undertow.data.preparation import Preparation
from undertow.data.splitting import choose_by_class, split_validation
from undertow.errors import CallError, DataError


def examples(targets):
    return Arrays(torch.arange(len(targets)).float()[:, None], torch.as_tensor(targets), Preparation((1,)))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 3])
def test_each_class_gives_its_share(share, seed):
    targets = torch.randint(0, 7, (400,), generator=torch.Generator().manual_seed(seed)) ** 2
    train, validation = split_validation(examples(targets), share, seed, "x")
    whole = sorted([*train.indices.tolist(), *validation.indices.tolist()])
    assert whole == list(range(400)) and len(validation) == round(400 * share)
    for label in targets.unique():
        exact = int((targets == label).sum()) * share
        assert abs(int((validation.targets == label).sum()) - exact) < 1
    assert torch.equal(split_validation(examples(targets), share, seed, "x")[1].indices, validation.indices)
    assert not torch.equal(split_validation(examples(targets), share, seed + 1, "x")[1].indices, validation.indices)
    inputs, labels = validation.fetch([2, 0])
    assert inputs[:, 0].tolist() == validation.indices[[2, 0]].tolist()
    assert torch.equal(labels, targets[validation.indices[[2, 0]]])


def test_a_class_keeps_an_example_for_training():
    targets = torch.tensor([0] * 9 + [1])
    assert 9 not in choose_by_class(targets, 5, 0).tolist()


def test_parts_of_nothing_are_refused():
    with pytest.raises(DataError, match="0 for validation; at least one is needed"):
        split_validation(examples([0.5] * 4), 0.1, 0, "x")
    with pytest.raises(DataError, match="some to train on"):
        split_validation(examples([0.5] * 4), 0.99, 0, "x")
    with pytest.raises(DataError, match="one for each of 4 classes"):
        split_validation(examples([0, 1, 2, 3] * 3), 0.2, 0, "x")


def test_the_validation_part_of_a_text_is_its_end(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + index % 26) for index in range(2000)))
    source = open_data(str(tmp_path / "a.txt"), (10,), validation=0.25)
    assert source.train.indices.max() < source.validation.indices.min() and len(source.validation) == 45


def encode(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def draw(count, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, (count, 6, 5, 3)).astype("uint8")


def image_table(count, seed=0):
    labels = numpy.arange(count) % 3
    rows = [{"bytes": encode(pixels), "path": None} for pixels in draw(count, seed)]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"image": pyarrow.array(rows, kind), "label": labels})
    features = {"image": {"_type": "Image"}, "label": {"names": ["x", "y", "z"], "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def save(folder, table, num_files=1):
    """As `datasets.save_to_disk` does."""
    folder.mkdir(parents=True)
    size = -(-len(table) // num_files)
    names = [f"data-{index:05}-of-{num_files:05}.arrow" for index in range(num_files)]
    for index, name in enumerate(names):
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table.slice(index * size, size), max_chunksize=4)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def check_images(source, count, seed, where="train"):
    part = getattr(source, where)
    inputs, targets = part.fetch(range(len(part)))
    mean, std = (torch.tensor(item).view(3, 1, 1) for item in (source.preparation.mean, source.preparation.std))
    stored = (torch.from_numpy(draw(count, seed)).permute(0, 3, 1, 2).float() / 255.0 - mean) / std
    assert torch.equal(inputs, stored) and targets.tolist() == [index % 3 for index in range(count)]


def test_a_saved_dataset_with_parts(tmp_path):
    for name, count, seed in (("train", 30, 0), ("validation", 9, 1), ("test", 12, 2)):
        save(tmp_path / "a" / name, image_table(count, seed), num_files=1 + seed)
    (tmp_path / "a" / "dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    source = open_data(str(tmp_path / "a"), None)
    assert source.classes == ("x", "y", "z") and "image" in source.size_note
    check_images(source, 30, 0)
    check_images(source, 9, 1, "validation")
    check_images(source, 12, 2, "test")
    with pytest.raises(CallError, match="has a validation part of its own"):
        open_data(str(tmp_path / "a"), None, validation=0.1)
    before = source.train.fingerprint()
    assert open_data(str(tmp_path / "a"), None).train.fingerprint() == before
    assert source.test.fingerprint() != before


def test_a_table_without_parts_is_split_by_class(tmp_path):
    save(tmp_path / "a", image_table(60))
    pyarrow.parquet.write_table(image_table(60), tmp_path / "b.parquet")
    for name in ("a", "b.parquet"):
        source = open_data(str(tmp_path / name), (1, 4, 4))
        assert source.test.targets.bincount().tolist() == [4, 4, 4] and len(source.train) == 48
        assert source.train[0][0].shape == (1, 4, 4)
    (tmp_path / "c").mkdir()
    for part, count in (("train", 30), ("test", 6)):
        pyarrow.parquet.write_table(image_table(count), tmp_path / "c" / f"{part}-00000-of-00001.parquet")
    source = open_data(str(tmp_path / "c"), None, validation=0.2)
    assert (len(source.train), len(source.validation), len(source.test)) == (24, 6, 6)


def test_columns_of_numbers_and_of_text(tmp_path):
    x = numpy.random.default_rng(0).standard_normal((40, 5)).astype("float32")
    columns = {"size": x.tolist(), "wanted": numpy.arange(40) % 4, "note": ["to be or not to be"] * 40}
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(DataError, match="has the columns size, wanted, note: say which"):
        open_data(str(path), None)
    source = open_data(str(path), None, columns=("size", "wanted"))
    whole = source.train.whole
    assert torch.equal(whole.fetch(range(40))[0], torch.from_numpy(x)) and whole.targets.tolist() == [0, 1, 2, 3] * 10
    source = open_data(str(path), (16,), columns=("note",))
    assert source.preparation.vocabulary == "\n benort" and source.train[0][0].shape == (16,)
    assert "".join(source.preparation.vocabulary[index] for index in source.train[0][0]) == "to be or not to "
    with pytest.raises(DataError, match="text with targets, which needs a tokenizer"):
        open_data(str(path), None, columns=("note", "wanted"))
    with pytest.raises(DataError, match="no column 'label'; it has size, wanted, note"):
        open_data(str(path), None, columns=("size", "label"))
    with pytest.raises(DataError, match="size is no text; give its targets too"):
        open_data(str(path), None, columns=("size",))


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"x": [[1.0], [float("nan")], [1.0]], "y": [0, 1, 0]}, r"x \(whole\)\[1,0\] is nan"),
        ({"x": [[1.0], [1.0, 2.0], [1.0]], "y": [0, 1, 0]}, "rows of several lengths"),
        ({"x": [[1.0], [None], [1.0]], "y": [0, 1, 0]}, "holds double"),
        ({"x": [[1.0], [2.0], [1.0]], "y": [0, None, 0]}, "1 rows without a value"),
        ({"x": [[1.0], [2.0], [1.0]], "y": ["a", "b", "a"]}, "holds string"),
        ({"x": [], "y": []}, "has no examples"),
        ({"image": [{"bytes": None, "path": "/etc/passwd"}] * 5, "label": [0, 1] * 2 + [0]}, "row 0 has no image"),
        ({"image": [b"no"] * 5, "label": [0, 1] * 2 + [0]}, "row 0 cannot be decoded as an image"),
    ],
    ids=["nan", "ragged", "null", "no label", "words", "empty", "path", "no image"],
)
def test_columns_that_cannot_be_used(tmp_path, columns, message):
    kinds = {"image": pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])}
    made = {
        name: pyarrow.array(rows, kinds[name] if rows and isinstance(rows[0], dict) else None)
        for name, rows in columns.items()
    }
    pyarrow.parquet.write_table(pyarrow.table(made), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path / "a.parquet"), None)


def test_tables_that_are_damaged_or_hostile(tmp_path):
    save(tmp_path / "a", image_table(60))
    arrow = tmp_path / "a" / "data-00000-of-00001.arrow"
    whole = arrow.read_bytes()
    generator = numpy.random.default_rng(0)
    damaged = [whole[: len(whole) // 2], b"", b"no table", whole[:8] + b"\xff" * 64 + whole[72:]]
    for _ in range(30):
        data = bytearray(whole)
        for place in generator.integers(0, len(data), 8):
            data[place] = generator.integers(0, 256)
        damaged.append(bytes(data))
    for data in damaged[:4]:
        arrow.write_bytes(data)
        with pytest.raises(DataError):
            open_data(str(tmp_path / "a"), None)
    for data in damaged[4:]:
        arrow.write_bytes(data)
        try:
            source = open_data(str(tmp_path / "a"), (3, 6, 5))
            source.train.fetch(range(len(source.train)))
        except DataError:
            pass  # most bytes are pixels, and a changed one may still be an image
    arrow.write_bytes(whole)
    for name in ("../b.arrow", "/etc/passwd", 3):
        (tmp_path / "a" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        with pytest.raises(DataError):
            open_data(str(tmp_path / "a"), None)
    for state in ("[", "[]", "{}", '{"_data_files": 1}', "[" * 100_000):
        (tmp_path / "a" / "state.json").write_text(state)
        with pytest.raises(DataError, match=r"state\.json"):
            open_data(str(tmp_path / "a"), None)
    packed = tmp_path / "packed.arrow"
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_stream(str(packed), table_of_zeros().schema, options=options) as writer:
        writer.write_table(table_of_zeros())
    with pytest.raises(DataError, match="compressed buffers, which are not read"):
        open_data(str(packed), None)


def table_of_zeros():
    return pyarrow.table({"x": numpy.zeros(1 << 20), "y": numpy.zeros(1 << 20, "int64")})


def test_a_parquet_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(table_of_zeros(), tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert os.path.getsize(tmp_path / "a.parquet") < 1 << 16
    monkeypatch.setattr("undertow.data.sizes.MAX_BYTES", 1 << 20)
    with pytest.raises(DataError, match="claims .* bytes; at most 1,048,576 are read"):
        open_data(str(tmp_path / "a.parquet"), None)


def test_what_the_library_itself_writes(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library that writes these folders is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y", "z"])})
    rows = {"image": [Image.fromarray(item) for item in draw(30)], "label": [index % 3 for index in range(30)]}
    made = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict({"train": made, "test": made.select(range(9))}).save_to_disk(str(tmp_path / "a"))
    source = open_data(str(tmp_path / "a"), None)
    check_images(source, 30, 0)
    assert source.classes == ("x", "y", "z") and len(source.test) == 9
    made.shuffle(seed=3).save_to_disk(str(tmp_path / "b"), num_shards=3)
    assert len(open_data(str(tmp_path / "b"), None).train) == 24


def test_without_pyarrow(tmp_path, monkeypatch):
    save(tmp_path / "a", image_table(6))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CallError, match=r"pip install 'undertow\[data\]'"):
        open_data(str(tmp_path / "a"), None)


def test_a_large_folder_is_listed_once(tmp_path, monkeypatch):
    # A look at each file beyond the listing itself would show in the number of calls.
    for label in range(4):
        (tmp_path / f"{label}").mkdir()
        for index in range(500):
            (tmp_path / f"{label}" / f"{index:04}.png").touch()
    stats = []
    monkeypatch.setattr(
        "os.stat", lambda *words, original=os.stat, **named: stats.append(words) or original(*words, **named)
    )
    monkeypatch.setattr("undertow.data.images.decode_image", lambda path: torch.zeros(3, 6, 5))
    source = open_image_folder(tmp_path, (3, 6, 5))
    assert len(source.train) + len(source.test) == 2000 and len(stats) < 100
    assert len(list_images(tmp_path / "0")) == 500
