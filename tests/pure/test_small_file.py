"""`.utz` files: what is written is read, by Undertow and by a decoder that shares no code with it."""

from __future__ import annotations

import hashlib
import math
import zlib

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from small_file_reference import read
from spread_cases import spread

from undertow.coding.entries import DTYPES
from undertow.coding.huffman import MAX_LENGTH, code_lengths, decode_symbols, encode_symbols
from undertow.coding.probabilities import RATE, SQUASH, STRETCH
from undertow.coding.small_file import SmallFile, open_small_file, pack_small_file, write_small_file
from undertow.coding.streams import decode_mask, encode_mask
from undertow.coding.table import make_table
from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError, DataError, FolderError

CODERS = ("mixed", "huffman")


def pruned(shape, density, num_codes, *, seed=0, dtype=torch.float32, with_scales=False):
    """Weights whose rows, columns and neighbours differ, so that contexts matter."""
    generator = numpy.random.default_rng(seed)
    rows = generator.random((shape[0] if shape else 1,) + (1,) * max(len(shape) - 1, 0))
    mask = torch.from_numpy(
        numpy.asarray(generator.random(shape) < density * 2 * rows.reshape(rows.shape[: len(shape)]))
    )
    codes = generator.normal(num_codes / 2, num_codes / 6, int(mask.sum())).clip(0, num_codes - 1).astype(numpy.int32)
    codebook = torch.from_numpy(numpy.sort(generator.normal(size=num_codes))).to(dtype)
    scales = torch.from_numpy(generator.random(shape[0]) + 0.5).to(dtype) if with_scales else None
    return CodedTensor(tuple(shape), mask, torch.from_numpy(codes), codebook, scales)


def dense_bytes(tensor):
    dense = tensor.dense() if isinstance(tensor, CodedTensor) else tensor
    return dense.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def assert_same(first, second):
    assert type(first) is type(second) and first.dtype == second.dtype and tuple(first.shape) == tuple(second.shape)
    assert dense_bytes(first) == dense_bytes(second)


def make_tensors():
    """One of everything that a file may hold."""
    generator = torch.Generator().manual_seed(0)
    tied = pruned((7, 12), 0.3, 5, seed=9)
    tensors = {
        "convolution.weight": pruned((6, 4, 3, 3), 0.4, 11),
        "linear.weight": pruned((12, 32), 0.2, 32, seed=1),
        "sequence.weight": pruned((5, 6, 4), 0.5, 2, seed=2),
        "large kernel": pruned((3, 2, 9, 9), 0.3, 4, seed=3),
        "vector": pruned((40,), 0.4, 3, seed=4),
        "half": pruned((8, 9), 0.5, 7, seed=5, dtype=torch.float16),
        "bfloat16": pruned((8, 9), 0.5, 7, seed=6, dtype=torch.bfloat16),
        "double": pruned((8, 9), 0.5, 7, seed=7, dtype=torch.float64),
        "scaled": pruned((8, 5), 0.5, 7, seed=8, with_scales=True),
        "tied": tied,
        "tied again": tied,
        "nothing kept": pruned((4, 4), 0.0, 3),
        "all kept": CodedTensor((3, 5), None, torch.arange(15, dtype=torch.int32) % 2, torch.tensor([-1.0, 1.0])),
        "one value": CodedTensor((2, 3), None, torch.zeros(6, dtype=torch.int32), torch.tensor([-0.0])),
        "one number": CodedTensor((), None, torch.zeros(1, dtype=torch.int32), torch.tensor([2.5])),
        "no elements": CodedTensor((3, 0), None, torch.zeros(0, dtype=torch.int32), torch.zeros(0)),
        "infinite": CodedTensor((2,), None, torch.tensor([1, 0], dtype=torch.int32), torch.tensor([torch.inf, 1e-45])),
        "bias": torch.randn(50, generator=generator),
        "ones": torch.ones(300),
        "no rows": torch.zeros(0, 3),
        "steps": torch.tensor(12345),
        "NaN": torch.tensor([torch.nan, -0.0, torch.inf]),
        "transposed": torch.arange(12.0).reshape(3, 4).T,
        "name: ü\n": torch.zeros(1),
    }
    for dtype in DTYPES:
        tensors[f"dense {dtype}"] = torch.randint(0, 2, (3, 7), generator=generator).to(dtype)
    return tensors


METADATA = {"model": "lenet", "inputs": {"mean": [0.5], "shape": [1, 28, 28]}, "ü": None}


@pytest.mark.parametrize("coder", CODERS)
def test_everything_is_read_as_it_was_written(tmp_path, coder):
    tensors = make_tensors()
    path = tmp_path / "net.utz"
    num_bytes = write_small_file(path, tensors, METADATA, coder)
    assert path.stat().st_size == num_bytes and list(tmp_path.iterdir()) == [path]
    file = open_small_file(path)
    assert list(file) == list(tensors) and file.metadata == METADATA and file.num_bytes == num_bytes
    everything = file.read_all()
    for name, tensor in tensors.items():
        assert_same(tensor, everything[name])
        assert_same(tensor, file.read(name))
    assert everything["tied"] is everything["tied again"]
    assert file.entries["tied again"].payload_bytes == 0


@pytest.mark.parametrize("coder", CODERS)
def test_a_decoder_written_from_the_description_reads_the_same(coder):
    tensors = make_tensors()
    data = pack_small_file(tensors, METADATA, coder)
    found, metadata = read(data)
    assert metadata == METADATA and list(found) == list(tensors)
    for name, tensor in tensors.items():
        number, shape, elements = found[name]
        assert (DTYPES[number], shape) == (tensor.dtype, tuple(tensor.shape))
        assert elements == dense_bytes(tensor), name


@pytest.mark.parametrize("coder", CODERS)
def test_equal_networks_give_equal_bytes(coder):
    data = pack_small_file(make_tensors(), METADATA, coder)
    assert data == pack_small_file(make_tensors(), dict(reversed(METADATA.items())), coder)
    file = SmallFile(data, "file")
    assert pack_small_file(file.read_all(), file.metadata, coder) == data


def test_codebooks_that_say_the_same_give_equal_bytes():
    plain = CodedTensor((4,), None, torch.tensor([0, 1, 2, 1], dtype=torch.int32), torch.tensor([-1.0, 0.5, 2.0]))
    other = CodedTensor(
        (4,), None, torch.tensor([5, 0, 1, 3], dtype=torch.int32), torch.tensor([0.5, 2.0, 9.0, 0.5, 7.0, -1.0])
    )
    assert pack_small_file({"w": plain}, {}) == pack_small_file({"w": other}, {})


def test_the_format_has_not_changed():
    """Sums over the tables, and over a file made from integers alone; docs/small-file-format.md names the first."""
    assert [zlib.crc32(table.astype("<i4").tobytes()) for table in (SQUASH, STRETCH, RATE)] == TABLE_SUMS
    codes = torch.arange(400, dtype=torch.int32).pow(2) % 7
    mask = (torch.arange(1200) % 3 == 0).reshape(20, 60)
    coded = CodedTensor((20, 60), mask, codes, torch.arange(-3.0, 4.0))
    tensors = {"a": coded, "b": torch.arange(100), "c": coded}
    for coder, digest in FILE_SUMS.items():
        assert hashlib.blake2b(pack_small_file(tensors, {"v": 1}, coder), digest_size=8).hexdigest() == digest


TABLE_SUMS = [3494664413, 909568998, 1999340300]
FILE_SUMS = {"mixed": "6683111ecb6c1c09", "huffman": "bdbfa4431cd9fec8"}


def entropy_bytes(counts):
    total = sum(counts)
    return -sum(n * math.log2(n / total) for n in counts if n) / 8


@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 0.97])
def test_a_random_mask_takes_its_entropy(density):
    """Nothing is to be found in it. A counter of n bits costs log2(n) / 2 bits to learn: here 1,000 and 200 columns,
    1,000 rows that see 1,000 bits each, and 128 surroundings, of which the mix pays less than all together."""
    mask = (numpy.random.default_rng(1).random(200_000) < density).astype(numpy.int8)
    num_kept = int(mask.sum())
    stream = encode_mask(mask, (200, 1000, 1, 1))
    limit = entropy_bytes([num_kept, mask.size - num_kept])
    learned = (1000 * math.log2(200) + 200 * math.log2(1000) + 128 * math.log2(mask.size)) / 2 / 8
    assert limit - 16 < len(stream) < limit + learned
    assert (decode_mask(stream, num_kept, (200, 1000, 1, 1), "mask") == mask).all()


def test_rows_and_columns_are_learnt():
    """Where rows and columns have densities of their own, the coder gets below the entropy of the whole."""
    generator = numpy.random.default_rng(2)
    mask = (generator.random((400, 400)) < generator.random((400, 1)) * generator.random(400) ** 3).astype(numpy.int8)
    num_kept = int(mask.sum())
    limit = entropy_bytes([num_kept, mask.size - num_kept])
    by_column = sum(entropy_bytes([n, 400 - n]) for n in mask.sum(0))
    size = len(encode_mask(mask.reshape(-1), (400, 400, 1, 1)))
    assert size < by_column < limit


@pytest.mark.parametrize("seed", range(4))
def test_huffman_lengths_are_optimal(seed):
    """Beside the definition: repeatedly merging the two least counts costs their sum each time."""
    counts = numpy.random.default_rng(seed).integers(0, 1000, 40) ** (seed + 1) // 50
    lengths = code_lengths(counts)
    merged, total = sorted(int(n) for n in counts if n), 0
    while len(merged) > 1:
        pair = merged[0] + merged[1]
        total += pair
        merged = sorted([pair, *merged[2:]])
    assert int((counts * lengths).sum()) == total
    assert sum(2.0 ** -int(length) for length in lengths if length) == 1


def test_huffman_lengths_are_bounded():
    fibonacci = [1, 1]
    while len(fibonacci) < 40:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    lengths = code_lengths(fibonacci)
    assert lengths.max() <= MAX_LENGTH and sum(2.0 ** -int(length) for length in lengths) == 1


@pytest.mark.parametrize("num_symbols", [1, 2, 3, 300])
def test_huffman_symbols_are_read_as_written(num_symbols):
    symbols = numpy.random.default_rng(0).integers(0, num_symbols, 1000) ** 2 % num_symbols
    data = encode_symbols(symbols, num_symbols)
    assert (decode_symbols(data, 1000, num_symbols, "codes") == symbols).all()


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    shape=strategies.lists(strategies.integers(0, 7), max_size=5),
    density=strategies.sampled_from([0.0, 0.05, 0.5, 1.0]),
    num_codes=strategies.sampled_from([1, 2, 3, 17, 256, 1000]),
    seed=strategies.integers(0, 1000),
    dtype=strategies.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    coder=strategies.sampled_from(CODERS),
)
def test_any_coded_tensor(shape, density, num_codes, seed, dtype, coder):
    tensor = pruned(tuple(shape), density, num_codes, seed=seed, dtype=dtype, with_scales=bool(shape) and seed % 2 == 0)
    file = SmallFile(pack_small_file({"w": tensor}, {}, coder), "file")
    assert_same(tensor, file.read("w"))
    assert file.entries["w"].num_kept == tensor.num_kept


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=strategies.binary(max_size=400), dtype=strategies.sampled_from(DTYPES))
def test_any_dense_tensor(data, dtype):
    data = data[: len(data) // dtype.itemsize * dtype.itemsize]
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    file = SmallFile(pack_small_file({"w": tensor}, {}), "file")
    assert dense_bytes(file.read("w")) == data


@pytest.mark.parametrize(
    "shape", spread([(64, 64, 3, 3), (300, 784), (1000, 512, 1, 1), (32, 1, 3, 3), (128, 3, 16, 16)], str, every=3)
)
def test_a_layer_of_a_network(shape):
    tensor = pruned(shape, 0.1, 32)
    sizes = {coder: len(pack_small_file({"w": tensor}, {}, coder)) for coder in CODERS}
    assert sizes["mixed"] < sizes["huffman"] < 4 * math.prod(shape)
    assert_same(tensor, SmallFile(pack_small_file({"w": tensor}, {}), "file").read("w"))


@pytest.mark.parametrize("coder", CODERS)
def test_the_table_counts_what_is_there(coder):
    tensors = make_tensors()
    file = SmallFile(pack_small_file(tensors, METADATA, coder), "file")
    rows = {row.name: row for row in make_table(file)}
    assert list(rows) == list(tensors)
    row, tensor = rows["linear.weight"], tensors["linear.weight"]
    assert (row.num_weights, row.num_kept, row.tensor_bytes) == (12 * 32, tensor.num_kept, 12 * 32 * 4)
    num_used = len(tensor.codes.unique())
    assert (row.num_codes, row.code_bits) == (num_used, math.ceil(math.log2(num_used + 1)))
    gaps = numpy.diff(numpy.flatnonzero(tensor.mask.numpy()), prepend=-1) - 1
    num_entries = {bits: int((gaps // 2**bits + 1).sum()) for bits in range(2, 9)}
    least = min((row.code_bits + bits) * num for bits, num in num_entries.items())
    assert row.shared_bytes == math.ceil(least / 8) + 4 * num_used
    coded_bits = (row.coded_code_bits + row.coded_gap_bits) * row.num_kept
    assert 0 < coded_bits < 8 * row.file_bytes
    assert rows["tied again"].alias_of == "tied" and rows["tied again"].file_bytes == 0
    assert sum(row.file_bytes for row in rows.values()) < file.num_bytes
    assert rows["bias"].kind == "dense" and rows["bias"].code_bits is None


def test_a_full_folder_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "net.utz"
    write_small_file(path, {"w": torch.ones(3)}, {})
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FolderError, match="No space left"):
        write_small_file(path, {"w": torch.zeros(9)}, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_stored_is_refused(tmp_path):
    with pytest.raises(CallError, match="complex64"):
        pack_small_file({"w": torch.zeros(3, dtype=torch.complex64)}, {})
    with pytest.raises(CallError, match="metadata of"):
        pack_small_file({}, {"text": "a" * (1 << 18)})
    with pytest.raises(CallError, match="a name of 0 bytes"):
        pack_small_file({"": torch.zeros(3)}, {})
    with pytest.raises(CallError, match="a header of"):
        pack_small_file({f"{index} {'long ' * 200}": torch.zeros(1) for index in range(1100)}, {})
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_small_file(tmp_path / "none.utz")
    codes, book = torch.zeros(3, dtype=torch.int32), torch.ones(1)
    for arguments, message in (
        (((3,), None, codes, torch.tensor([torch.nan])), "NaN"),
        (((3,), None, codes + 1, book), "codes from 1 to 1 do not fit"),
        (((4,), None, codes, book), "4 kept weights need as many codes"),
        (((3,), torch.ones(4, dtype=torch.bool), codes, book), "mask of a tensor of shape"),
        (((3,), None, codes, torch.ones(1, dtype=torch.int64)), "a codebook is"),
        (((3,), None, codes, book, torch.ones(2)), "scales are one per row"),
    ):
        with pytest.raises(CallError, match=message):
            CodedTensor(*arguments)
