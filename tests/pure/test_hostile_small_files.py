"""`.utz` files that are damaged, or made to harm: each is refused as DataError, in one line and little memory.

A file whose sum over all bytes is wrong is refused before anything is decoded. So most cases here are sealed again:
the sum is right, as an attacker would make it. Then a file that opens may list what it likes, but what it decodes to
has the sums that it gives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import tracemalloc
from pathlib import Path

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from spread_cases import spread

from undertow.coding.entries import Entry, Kind
from undertow.coding.header import pack, read_numbers, unpack, write_number
from undertow.coding.huffman import decode_symbols, encode_symbols
from undertow.coding.payloads import decode_tensor, encode_tensor
from undertow.coding.range_coder import to_stream
from undertow.coding.small_file import SmallFile, open_small_file, pack_small_file
from undertow.coding.streams import decode_gaps, decode_mask, encode_mask, encode_text
from undertow.coding.tensors import CodedTensor
from undertow.errors import DataError

CODERS = ("mixed", "huffman")
MOST_BYTES = 100_000_000


def make_tensors():
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 4, 3, 3, generator=generator) < 0.4
    codes = torch.randint(0, 9, (int(mask.sum()),), generator=generator).int()
    coded = CodedTensor(tuple(mask.shape), mask, codes, torch.randn(9, generator=generator))
    rows = CodedTensor(
        (4, 6), None, torch.arange(24).int() % 5, torch.arange(-2.0, 3.0), torch.rand(4, generator=generator)
    )
    return {"weight": coded, "rows": rows, "tied": coded, "bias": torch.randn(6, generator=generator)}


def dense(tensor):
    return tensor.dense() if isinstance(tensor, CodedTensor) else tensor


FILES = {coder: pack_small_file(make_tensors(), {"model": "a"}, coder) for coder in CODERS}


def seal(content):
    """A file whose sum over all bytes is right."""
    return content + hashlib.blake2b(content, digest_size=8).digest()


def read_all(data):
    """Everything that a user could ask for; returns whether it was read. The message of a refusal is one line."""
    try:
        SmallFile(data, "net.utz", 1 << 24).read_all()
    except DataError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
        return False
    return True


def refuse(data, match=None, max_output_bytes=1 << 24):
    """Opening or reading fails, and takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=match) as failure:
            SmallFile(data, "net.utz", max_output_bytes).read_all()
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("coder", CODERS)
def test_every_truncation(coder):
    data = FILES[coder]
    for length in range(len(data)):
        with pytest.raises(DataError, match="net.utz is (not a .utz file|damaged)"):
            SmallFile(data[:length], "net.utz")
    for length in range(len(data) - 8):
        assert not read_all(seal(data[:length]))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("part", spread(range(10), str, every=10))
def test_flipped_bits(coder, part):
    """1,000 files of one to eight flipped bits: all refused. Sealed again, they are refused, or read."""
    data = FILES[coder]
    source = random.Random(part)
    num_refused = 0
    for _ in range(1000):
        damaged = bytearray(data)
        for place in source.sample(range(8 * len(data)), source.choice([1, 1, 1, 2, 8])):
            damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(DataError):
            SmallFile(bytes(damaged), "net.utz")
        num_refused += not read_all(seal(bytes(damaged[:-8])))
    # Names, and what the checksums do not cover, are a tenth of the file.
    assert num_refused > 600


@pytest.mark.parametrize("coder", CODERS)
def test_every_bit_of_the_payloads(coder):
    """Each single bit after the header: refused, or, at a stream's end, another number for the same decisions."""
    data = FILES[coder]
    tensors = make_tensors()
    entries = SmallFile(data, "net.utz").entries
    num_refused = num_same = 0
    for name in ("weight", "rows", "bias"):
        entry = entries[name]
        payload = data[entry.offset : entry.offset + entry.payload_bytes]
        for place in range(8 * len(payload)):
            damaged = bytearray(payload)
            damaged[place // 8] ^= 1 << place % 8
            try:
                decoded = decode_tensor(entry, bytes(damaged), f"net.utz: {name}")
            except DataError:
                num_refused += 1
            else:
                num_same += 1
                assert torch.equal(dense(decoded), dense(tensors[name]))
    # A stream ends with a byte of which some bits may not matter; there are at most nine streams.
    assert num_same <= 8 * 9 < num_refused


@pytest.mark.parametrize("coder", CODERS)
def test_bytes_that_follow_or_are_missing(coder):
    content = FILES[coder][:-8]
    refuse(content + b"\0" * 8, "damaged or cut off")
    refuse(seal(content + b"\0"), "the header describes")
    refuse(seal(content[:-1]), "the header describes")
    refuse(b"", "not a .utz file")
    refuse(b"PK\x03\x04" + content, "not a .utz file")
    refuse(seal(content[:4] + b"\x02" + content[5:]), "version 2 of the format")


def test_another_file_is_not_read_to_its_end(tmp_path):
    with pytest.raises(DataError, match="/dev/zero is not a .utz file"):
        open_small_file(Path("/dev/zero"))
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        open_small_file(tmp_path)


def forge(*entries, payload=b"", metadata=None, change=None):
    """A sealed file with whatever header."""
    header = pack(list(entries), metadata or {})
    return seal(b"\x93UTZ\x01" + (change(header) if change else header) + payload)


def entry_of(name="w", **changes):
    entry, payload = encode_tensor(name, make_tensors()["weight"], "mixed")
    return dataclasses.replace(entry, **changes), payload


F32 = torch.float32
# Each claims much in few bytes; the limit on output is raised where it would come first.
BOMBS = {
    "a dense plane of terabytes": (Entry("w", Kind.DENSE, F32, (1 << 20, 1 << 20), (5, 5, 5, 5)), 1 << 62, b"abcd" * 4),
    "terabytes of zeros": (Entry("w", Kind.MIXED, F32, (1 << 20, 1 << 20), (0, 0, 0)), 16 << 30, b""),
    "a mask of a billion": (
        Entry("w", Kind.MIXED, F32, (1 << 30,), (8, 0, 8), num_kept=3, num_codes=1),
        1 << 62,
        b"abcdefgh" * 2,
    ),
    "codes of a billion": (
        Entry("w", Kind.MIXED, F32, (1 << 30,), (0, 8, 8), num_kept=1 << 30, num_codes=3),
        1 << 62,
        b"abcdefgh" * 2,
    ),
    "a codebook of thousands": (
        Entry("w", Kind.MIXED, F32, (1 << 20,), (0, 8, 8), num_kept=1 << 20, num_codes=1 << 16),
        1 << 62,
        b"abcdefgh" * 2,
    ),
    "Huffman codes of a billion": (
        Entry("w", Kind.HUFFMAN, F32, (1 << 30,), (9, 9, 9), None, 1 << 29, 3, gap_bits=2, num_entries=1 << 29),
        1 << 62,
        b"abcdefghi" * 3,
    ),
    "scales of a billion rows": (
        Entry("w", Kind.MIXED, F32, (1 << 30,), (0, 0, 0, 5, 5, 5, 5), num_kept=0, num_codes=0),
        1 << 33,
        b"abcd" * 4,
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name):
    entry, max_output_bytes, payload = BOMBS[name]
    refuse(forge(entry, payload=payload), max_output_bytes=max_output_bytes)


def test_what_is_decoded_is_bounded():
    data = FILES["mixed"]
    num_bytes = SmallFile(data, "net.utz").output_bytes
    assert num_bytes == 4 * (216 + 24 + 6)
    SmallFile(data, "net.utz", num_bytes)
    refuse(data, f"claims {num_bytes} bytes of tensors", num_bytes - 1)


def test_headers_that_lie():
    entry, payload = entry_of()
    refuse(forge(entry, dataclasses.replace(entry), payload=payload * 2), "the same name")
    for changes, message in (
        ({"num_kept": 217}, "217 of 216 weights"),
        ({"num_codes": 300}, "a codebook of 300 values"),
        ({"num_codes": 0}, "a codebook of 0 values"),
        ({"kernel": (3, 5)}, "kernels of 3 x 5"),
        ({"kernel": (0, 1)}, "kernels of 0 x 1"),
        ({"shape": (1 << 30, 1 << 30)}, "a tensor has the shape"),
        ({"shape": (0, 1 << 50)}, "a tensor has the shape"),
        ({"shape": (1,) * 17}, "17 dimensions"),
        ({"dtype": torch.int64}, "a codebook of torch.int64"),
        ({"num_kept": entry.num_kept + 1}, "are kept where"),
        ({"num_codes": entry.num_codes + 1}, "net.utz: w: "),
        ({"num_codes": entry.num_codes - 1}, "net.utz: w: "),
        ({"checksum": entry.checksum ^ 1}, "the checksum of the decoded tensor"),
        ({"kind": Kind.HUFFMAN, "gap_bits": 9, "num_entries": 216}, "gaps of 9 bits"),
        ({"kind": Kind.HUFFMAN, "gap_bits": 4, "num_entries": 217}, "217 entries"),
    ):
        refuse(forge(dataclasses.replace(entry, **changes), payload=payload), message)
    dense = Entry("w", Kind.DENSE, F32, (2,), (9, 0, 0, 0))
    refuse(forge(dense, payload=bytes(14)), "a coded plane is longer")
    boolean = Entry("w", Kind.DENSE, torch.bool, (2,), (0,), checksum=int.from_bytes(b"\xff\xff\0\0", "little"))
    refuse(forge(boolean, payload=b"\x02\x01"), "checksum|boolean")


def sealed_text(text, size=None):
    """A file with this text as header."""
    coded = encode_text(text)
    return seal(b"\x93UTZ\x01" + write_number(len(text) if size is None else size) + write_number(len(coded)) + coded)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "ends inside a number"),
        (b"\x80", "ends inside a number"),
        (b"\x80\x00{}", "longer than it needs to be"),
        (b"\xff" * 12, "more than 63 bits"),
        (b"\x05", "ends inside a number|5 tensors"),
        (b"\x01\x01\x03\x00w{}", "an alias names tensor 0"),
        (b"\x01\x01\x07\x00w{}", "no kind of tensor"),
        (b"\x01\x01\x00\x63\x00w{}", "no dtype"),
        (b"\x01\x00\x00\x00w{}", "a name of 0 bytes"),
        (b"\x01\x01\x00\x09\x01\x00\x00\xff{}", "cannot be read"),
        (b"\x00", "cannot be read"),
        (b"\x00[]", "no JSON object"),
        (b'\x00{"a":NaN}', "cannot be read"),
        (b"\x00" + b"[" * 100_000, "cannot be read"),
        (b'\x00{"a":"' + b"a" * (1 << 18) + b'"}', "no JSON object of at most"),
    ],
)
def test_texts_that_are_no_header(text, message):
    refuse(sealed_text(text), message)


def test_a_text_that_claims_more_than_it_may():
    refuse(sealed_text(b"\x00{}", 1 << 40), "claims")
    refuse(sealed_text(b"\x00{}", 1 << 20), "cannot hold|header|read")
    refuse(seal(b"\x93UTZ\x01" + write_number(10) + write_number(1 << 30) + b"abc"), "claims")
    refuse(seal(b"\x93UTZ\x01" + b"\xff" * 20), "more than 63 bits")


def test_streams_that_end_elsewhere():
    mask = (numpy.arange(5000) % 7 == 0).astype(numpy.int8)
    num_kept, view = int(mask.sum()), (1, 5000, 1, 1)
    stream = encode_mask(mask, view)
    with pytest.raises(DataError, match="ends with a zero"):
        decode_mask(stream + b"\0", num_kept, view, "mask")
    with pytest.raises(DataError, match="follow the end"):
        decode_mask(stream + b"a" * 20, num_kept, view, "mask")
    with pytest.raises(DataError, match="cannot hold"):
        decode_mask(b"", num_kept, (1, 1 << 20, 1, 1), "mask")
    assert to_stream(numpy.array([0x61000000, 0], numpy.uint32), 2) == b"a"


def test_huffman_tables_that_are_no_code():
    symbols = numpy.arange(100) % 5
    data = encode_symbols(symbols, 5)
    for damaged, message in (
        (data[:3], "cannot hold"),
        (data[:-1], "end elsewhere"),
        (data + b"\0", "end elsewhere"),
        (bytes([data[0] ^ 8]) + data[1:], "not those of a complete code"),
        (data[:3] + bytes([data[3] | 1]) + data[4:], "not padded"),
    ):
        with pytest.raises(DataError, match=message):
            decode_symbols(damaged, 100, 5, "codes")
    with pytest.raises(DataError, match="no symbols"):
        decode_symbols(data, 0, 5, "codes")


def test_gaps_that_lead_outside():
    gaps, codes = encode_symbols(numpy.array([3, 3, 1]), 4), encode_symbols(numpy.array([0, 1, 2]), 3)
    positions, ranks = decode_gaps(gaps, codes, 2, 3, 2, 10, "w")
    assert positions.tolist() == [7, 9] and ranks.tolist() == [0, 1]
    with pytest.raises(DataError, match="position 9 of 9"):
        decode_gaps(gaps, codes, 2, 3, 2, 9, "w")
    with pytest.raises(DataError, match="a filler stands"):
        decode_gaps(gaps, encode_symbols(numpy.array([1, 2, 0]), 3), 2, 3, 2, 10, "w")
    with pytest.raises(DataError, match="a filler stands"):
        decode_gaps(encode_symbols(numpy.array([2, 3, 1]), 4), codes, 2, 3, 2, 10, "w")


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(content=strategies.binary(max_size=300))
def test_any_bytes(content):
    assert not read_all(content)
    assert not read_all(seal(b"\x93UTZ\x01" + content)) or content


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(text=strategies.binary(max_size=120))
def test_any_text_in_the_header(text):
    read_all(sealed_text(text))


def test_numbers_are_read_as_written():
    for number in (0, 1, 127, 128, 1 << 40, (1 << 63) - 1):
        data = write_number(number)
        assert next(read_numbers(data, 0, "file")) == (number, len(data))


def test_a_header_is_read_as_written():
    entry, payload = entry_of()
    header = pack([entry], {"a": 1})
    entries, metadata = unpack(header + payload, 0, len(header) + len(payload), "file")
    assert entries == [dataclasses.replace(entry, offset=len(header))] and metadata == {"a": 1}
