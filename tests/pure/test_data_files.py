"""Data in its conventional layouts, and files that are missing, damaged or hostile."""

import gzip
import io
import json
import pickle
import struct
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from undertow.data.cifar import LABEL_FILES, RECORD_BYTES, TEST_NAME, TRAIN_NAMES
from undertow.data.examples import split_fixed
from undertow.data.idx import read_idx
from undertow.data.opening import open_data
from undertow.data.preparation import Preparation
from undertow.errors import DataError


def idx(array, kind=8):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return header + array.astype("uint8").tobytes()


def images(count, *shape, seed=0):
    return numpy.random.default_rng(seed).integers(0, 256, (count, *shape)).astype("uint8")


def write_mnist(folder, pack=lambda data: data, end=""):
    parts = {
        "train-images-idx3": images(10, 6, 5),
        "train-labels-idx1": numpy.arange(10) % 3,
        "t10k-images-idx3": images(4, 6, 5, seed=1),
        "t10k-labels-idx1": numpy.arange(4) % 3,
    }
    for name, array in parts.items():
        (folder / f"{name}-ubyte{end}").write_bytes(pack(idx(array)))
    return parts


@pytest.mark.parametrize("pack, end", [(lambda data: data, ""), (gzip.compress, ".gz")], ids=["plain", "gzip"])
def test_idx_folder(tmp_path, pack, end):
    parts = write_mnist(tmp_path, pack, end)
    source = open_data(str(tmp_path), None)
    assert (len(source.train), len(source.test)) == (10, 4)
    inputs, targets = source.train.__getitems__([7, 2])
    assert targets.tolist() == [1, 2] and inputs.shape == (2, 1, 6, 5)
    mean, std = source.preparation.mean[0], source.preparation.std[0]
    expected = torch.from_numpy(parts["train-images-idx3"][[7, 2]]).float() / 255.0
    assert torch.equal(inputs[:, 0], (expected - torch.tensor(mean)) / torch.tensor(std))
    whole, _ = source.train.__getitems__(range(10))
    assert abs(whole.mean()) < 1e-6 and abs(whole.std() - 1) < 1e-5


def test_images_take_the_shape_of_the_model(tmp_path):
    write_mnist(tmp_path)
    assert open_data(str(tmp_path), (3, 12, 9)).train[0][0].shape == (3, 12, 9)
    assert open_data(str(tmp_path), (30,)).train[0][0].shape == (30,)
    with pytest.raises(DataError, match="shape \\[31\\]"):
        open_data(str(tmp_path), (31,))


def test_colours_become_grey_by_their_weights():
    pixels = torch.tensor([255.0, 0.0, 0.0]).view(1, 3, 1, 1)
    assert Preparation((1, 1, 1), 255.0)(pixels).item() == pytest.approx(0.299)


IDX_FAULTS = {
    "no magic": (b"PK\x03\x04" + bytes(30), "does not begin with two zero bytes"),
    "too short": (b"\0\0\x08", "whole header"),
    "other type": (idx(images(2, 3, 3), kind=13), "elements of type 13"),
    "other dimensions": (idx(numpy.arange(9)), "in 1 dimensions"),
    "truncated": (idx(images(2, 3, 3))[:-1], "claims"),
    "overlong": (idx(images(2, 3, 3)) + b"x", "claims"),
    "huge": (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**15, 2**15), "claims"),
}


@pytest.mark.parametrize("name", IDX_FAULTS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_idx_faults(tmp_path, name, is_packed):
    data, message = IDX_FAULTS[name]
    path = tmp_path / ("x.gz" if is_packed else "x")
    path.write_bytes(gzip.compress(data) if is_packed else data)
    with pytest.raises(DataError, match=message):
        read_idx(path, 3)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: data[:30] + b"\xff\xff" + data[32:], lambda data: b"no"]
)
def test_a_corrupt_gzip(tmp_path, damage):
    path = tmp_path / "x.gz"
    path.write_bytes(damage(gzip.compress(idx(images(20, 9, 9)))))
    with pytest.raises(DataError, match=r"x\.gz"):
        read_idx(path, 3)


def test_a_gzip_bomb_is_not_unpacked(tmp_path):
    # In the first file the header claims a gibibyte that is not there. The second has many zeros at the end: reading
    # stops one byte after the claimed size.
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 1024, 1024, 1024)))
    with pytest.raises(DataError, match="more than its"):
        read_idx(path, 3)
    path.write_bytes(gzip.compress(idx(images(1, 2, 2)) + bytes(1 << 24)))
    with pytest.raises(DataError, match="there are more"):
        read_idx(path, 3)


def test_a_missing_file_is_named(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no test labels: t10k-labels-idx1-ubyte"):
        open_data(str(tmp_path), None)
    with pytest.raises(DataError, match="there is no data"):
        open_data(str(tmp_path / "nowhere"), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no known data"):
        open_data(str(tmp_path / "empty"), None)
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"ends in \.npz, \.txt"):
        open_data(str(tmp_path / "data.csv"), None)


def test_cifar(tmp_path):
    test_file = f"{TEST_NAME}.bin"
    for number, name in enumerate((*TRAIN_NAMES, TEST_NAME)):
        records = images(3, RECORD_BYTES, seed=number)
        records[:, 0] = [1, 9, number]
        (tmp_path / f"{name}.bin").write_bytes(records.tobytes())
    source = open_data(str(tmp_path), None)
    assert len(source.train) == 15 and source.classes[9] == "truck"
    inputs, target = source.train[5]
    assert inputs.shape == (3, 32, 32) and target == 1
    (tmp_path / test_file).write_bytes(bytes([10]) + bytes(RECORD_BYTES - 1))
    with pytest.raises(DataError, match="label of record 0 is 10, out of range"):
        open_data(str(tmp_path), None)
    (tmp_path / test_file).write_bytes(bytes(RECORD_BYTES + 1))
    with pytest.raises(DataError, match="records of CIFAR-10"):
        open_data(str(tmp_path), None)


def test_cifar_as_pictures_is_the_binary_version(tmp_path):
    binary, pictures = tmp_path / "binary", tmp_path / "pictures"
    binary.mkdir()
    pictures.mkdir()
    labels = []
    for number, name in enumerate((*TRAIN_NAMES, TEST_NAME)):
        records = images(2, RECORD_BYTES, seed=number)
        records[:, 0] %= 10
        (binary / f"{name}.bin").write_bytes(records.tobytes())
        labels += records[:, 0].tolist()
        # A row of the picture is an image: its pixels one after the other, each with its three colours.
        rows = records[:, 1:].reshape(2, 3, 1024).transpose(0, 2, 1)
        Image.fromarray(numpy.ascontiguousarray(rows)).save(pictures / f"{name}.png")
    for name, part in zip(LABEL_FILES, (labels[:10], labels[10:]), strict=True):
        (pictures / name).write_text(json.dumps(part))
    wanted, found = (open_data(str(folder), None) for folder in (binary, pictures))
    for a, b in ((wanted.train, found.train), (wanted.test, found.test)):
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
    assert wanted.preparation == found.preparation and wanted.classes == found.classes
    path = pictures / LABEL_FILES[1]
    for text, why in (
        ("[1, 10]", "label of record 1 is 10"),
        ("[1, 2, 3]", "has 3 labels, but the pictures hold 2"),
        ("[1, 99999999999999999999]", "out of range"),
        ('{"a": 1}', "must hold a list of labels"),
        ("[true, 1]", "must hold a list of labels"),
        ("[1,", "cannot be read as labels"),
        ("[" * 100_000, "cannot be read as labels"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=why):
            open_data(str(pictures), None)
    Image.fromarray(images(2, 1000, 3)).save(pictures / "test_batch.png")
    with pytest.raises(DataError, match="rows of 1,000 pixels"):
        open_data(str(pictures), None)
    (pictures / "data_batch_3.png").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.png"):
        open_data(str(pictures), None)


def write_images(folder, names, count):
    for name in names:
        (folder / name).mkdir(parents=True)
        for index in range(count):
            Image.fromarray(images(4 + index, 5, 3, seed=index)).save(folder / name / f"{index}.png")


def test_image_folder_with_and_without_a_split(tmp_path):
    write_images(tmp_path / "whole", ("cat", "dog"), 5)
    source = open_data(str(tmp_path / "whole"), (3, 8, 8))
    assert source.classes == ("cat", "dog") and (len(source.train), len(source.test)) == (8, 2)
    inputs, targets = source.train.__getitems__([0, 1, 2])
    assert inputs.shape == (3, 3, 8, 8) and inputs.dtype == torch.float32
    write_images(tmp_path / "split" / "train", ("cat", "dog"), 2)
    write_images(tmp_path / "split" / "test", ("dog",), 3)
    source = open_data(str(tmp_path / "split"), (1, 8, 8))
    assert (len(source.train), len(source.test)) == (4, 3) and source.test.targets.tolist() == [1, 1, 1]


def test_a_file_that_is_no_image(tmp_path):
    write_images(tmp_path, ("cat", "dog"), 3)
    for index in range(3):
        (tmp_path / "cat" / f"{index}.png").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(DataError, match="cannot be decoded as an image"):
        open_data(str(tmp_path), (3, 8, 8))


def test_npz(tmp_path):
    path = tmp_path / "data.npz"
    numpy.savez_compressed(path, x=images(10, 4, 4), y=numpy.arange(10) % 2)
    source = open_data(str(path), None)
    assert (len(source.train), len(source.test)) == (8, 2) and source.train[0][0].shape == (1, 4, 4)
    numpy.savez(
        path, x_train=images(6, 4, 4, 3), y_train=numpy.zeros(6, "int32"), x_test=images(2, 4, 4, 3), y_test=[0, 1]
    )
    assert open_data(str(path), None).train[0][0].shape == (3, 4, 4)
    numpy.savez(path, x=numpy.ones((10, 7)), y=numpy.ones((10, 2)))
    inputs, targets = open_data(str(path), None).train[0]
    assert inputs.shape == (7,) and targets.dtype == torch.float32


def npy(header: str, body: bytes = b"") -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + body


def zipped(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


OBJECTS = io.BytesIO()
numpy.save(OBJECTS, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
NPZ_FAULTS = {
    "pickle": (pickle.dumps([1, 2]), "cannot be read as .npz"),
    "objects": (zipped(x=OBJECTS.getvalue()), "pickles"),
    "claims too much": (
        zipped(x=npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000, 1000), }")),
        "claims",
    ),
    "no header": (zipped(x=b"hello"), "cannot be read as .npz"),
    "other names": (
        zipped(z=npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }", b"1")),
        "has the arrays z",
    ),
    "truncated": (zipped(x=bytes(5000))[:-60], "cannot be read as .npz"),
}


@pytest.mark.parametrize("name", NPZ_FAULTS)
def test_npz_faults(tmp_path, name):
    data, message = NPZ_FAULTS[name]
    path = tmp_path / "data.npz"
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        open_data(str(path), None)


def test_npz_with_inputs_that_lack_targets(tmp_path):
    path = tmp_path / "data.npz"
    numpy.savez(path, x=images(3, 2, 2), y=[1, 2])
    with pytest.raises(DataError, match="3 inputs and 2 targets"):
        open_data(str(path), None)


def test_text(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text("abcde" * 40)
    source = open_data(str(path), (8,))
    inputs, targets = source.train[1]
    assert source.preparation.vocabulary == "abcde"
    assert inputs.tolist() == [3, 4, 0, 1, 2, 3, 4, 0] and targets.tolist() == [4, 0, 1, 2, 3, 4, 0, 1]
    assert (len(source.train), len(source.test)) == (179 // 8, 19 // 8)
    with pytest.raises(DataError, match="too few for stretches of 100"):
        open_data(str(path), (100,))
    with pytest.raises(DataError, match="character 'e', which the model was not trained on"):
        open_data(str(path), (8,), "abcd")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8 text"):
        open_data(str(path), (8,))


def test_digits_are_split_the_same_way_every_time():
    source = open_data("digits", (3, 16, 16))
    assert (len(source.train), len(source.test)) == (1438, 359)
    inputs, target = source.test[0]
    assert inputs.shape == (3, 16, 16) and torch.equal(inputs[0], inputs[2])
    train, test = split_fixed(1797)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(1797))
    assert torch.equal(split_fixed(1797)[1], test)


def test_a_preparation_survives_json():
    preparation = Preparation((3, 8, 8), 255.0, (0.1, 0.2, 0.3), (1.0, 1.0, 0.5))
    assert Preparation.from_dict(preparation.to_dict()) == preparation
