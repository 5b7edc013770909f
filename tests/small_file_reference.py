"""A decoder of `.utz` files as docs/small-file-format.md describes them, in plain Python. It trusts the file."""

from __future__ import annotations

import json
import math
import struct
from fractions import Fraction
from typing import Any

ITEM_BYTES = [4, 2, 2, 8, 8, 4, 2, 1, 1, 1]


def make_tables() -> tuple[dict[int, int], list[int]]:
    """Squash and stretch, by fractions instead of fixed point."""
    e = sum(Fraction(1, 256**k * math.factorial(k)) for k in range(30))
    e = Fraction(round(e * 2**160), 2**160)
    squash = {}
    power = 2**160
    for x in range(3073):
        share = Fraction(power, power + 2**160)
        squash[x] = min(math.floor(65536 * share + Fraction(1, 2)), 65504)
        squash[-x] = 65536 - squash[x]
        power = power * e.numerator // e.denominator
    last = min(x for x in squash if squash[x] > 32)
    ordered = sorted(squash)
    stretch = []
    below = 0
    for i in range(4096):
        while below < len(ordered) and squash[ordered[below]] < 16 * i + 8:
            below += 1
        stretch.append(max(last, min(below - 3072, -last)))
    return squash, stretch


SQUASH, STRETCH = make_tables()


class Counter:
    def __init__(self, probability: int, count: int) -> None:
        self.probability, self.count = probability, count

    def see(self, bit: int) -> None:
        target = 2**22 - 1 if bit else 0
        rate = 131072 // (2 * self.count + 3)
        self.probability += ((target - self.probability) * rate) >> 16
        self.count = min(self.count + 1, 1023)


class Counters(dict):
    """Counters that begin alike, made when they are first used."""

    def __init__(self, probability: int, count: int) -> None:
        self.begin = probability, count

    def __missing__(self, key: Any) -> Counter:
        return self.setdefault(key, Counter(*self.begin))


class Decoder:
    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.span = data, 8, 2**64 - 1
        self.code = int.from_bytes(self.take(0, 8), "big")

    def take(self, at: int, num: int) -> bytes:
        return self.data[at : at + num].ljust(num, b"\0")

    def bit(self, upper: int) -> int:
        bound = (self.span >> 16) * upper
        if self.code < bound:
            bit, self.span = 1, bound
        else:
            bit, self.span, self.code = 0, self.span - bound, self.code - bound
        if self.span < 2**32:
            self.span <<= 32
            self.code = self.code << 32 | int.from_bytes(self.take(self.at, 4), "big")
            self.at += 4
        return bit

    def direct(self, counter: Counter) -> int:
        bit = self.bit(max(32, min(counter.probability >> 6, 65504)))
        counter.see(bit)
        return bit

    def mixed(self, counters: list[Counter], weights: list[int], rate: int) -> int:
        inputs = [STRETCH[counter.probability >> 10] for counter in counters]
        total = sum(weight * x for weight, x in zip(weights, inputs, strict=True)) >> 16
        upper = SQUASH[max(-3071, min(total, 3071))]
        bit = self.bit(upper)
        error = (65536 * bit - upper) * rate
        for i, x in enumerate(inputs):
            weights[i] += (x * error + 131072) >> 18
        for counter in counters:
            counter.see(bit)
        return bit


def slot(context: int, node: int) -> int:
    return ((context * 256 + node) * 0x9E3779B1 % 2**32) >> 16


def decode_bytes(data: bytes, num: int, beside: bytes | None) -> bytes:
    decoder, weights = Decoder(data), [22_000] * 4
    tree, first, second, third = (Counters(2**21, 2) for _ in range(4))
    result = bytearray()
    a = b = c = 0
    for index in range(num):
        two = beside[index] if beside else a * 256 + b
        three = a * 256 + two if beside else two * 256 + c
        node = 1
        for _ in range(8):
            used = [tree[node], first[slot(a, node)], second[slot(two, node)], third[slot(three, node)]]
            node = 2 * node + decoder.mixed(used, weights, 6)
        a, b, c = node - 256, a, b
        result.append(a)
    return bytes(result)


def decode_numbers(data: bytes, num: int) -> list[int]:
    decoder = Decoder(data)
    lengths, heads = Counters(2**21, 2), Counters(2**21, 2)
    result = []
    for _ in range(num):
        node = 1
        for _ in range(6):
            node = 2 * node + decoder.direct(lengths[node])
        length, value = node - 64, 1
        for level in range(length):
            bit = decoder.direct(heads[length, value % 8]) if level < 3 else decoder.bit(32768)
            value = 2 * value + bit
        result.append(value - 1)
    return result


def decode_planes(data: bytes, sizes: list[int], num: int) -> bytes:
    planes: list[bytes] = []
    for size in sizes:
        taken = data[: size - 1 if size else num]
        data = data[len(taken) :]
        planes.append(decode_bytes(taken, num, planes[-1] if planes else None) if size else taken)
    return bytes(plane[i] for i in range(num) for plane in reversed(planes))


def decode_mask(data: bytes, view: tuple[int, int, int, int], num_kept: int) -> list[int]:
    rows, channels, height, width = view
    size, total = height * width, math.prod(view)
    begin = max(256, min(num_kept * 2**22 // total, 2**22 - 256)), 4
    decoder, weights = Decoder(data), [20_000] * 4
    columns, around, inside = (Counters(*begin) for _ in range(3))
    mask: dict[tuple[int, int, int, int], int] = {}
    for r in range(rows):
        row = Counter(*begin)
        for c in range(channels):
            for y in range(height):
                for x in range(width):
                    earlier = [(r, c - 1, y, x), (r, c - 2, y, x), (r, c - 3, y, x)]
                    earlier += [(r - 1, c, y, x), (r - 2, c, y, x), (r - 3, c, y, x)]
                    near = [(r, c, y, x - 1), (r, c, y, x - 2), (r, c, y - 1, x), (r, c, y - 1, x - 1)]
                    near += [(r, c, y - 1, x + 1) if x + 1 < width else None, (r, c, y - 2, x)]
                    a, b = (tuple(mask.get(place, 0) for place in places) for places in (earlier, near))
                    position = (y, x) if size <= 64 else None
                    used = [row, columns[c, y, x], around[a], inside[b, position]]
                    mask[r, c, y, x] = decoder.mixed(used, weights, 6)
    return list(mask.values())


def decode_codes(data: bytes, view: tuple[int, int, int, int], mask: list[int], num: int, zero: int) -> list[int]:
    rows, channels, height, width = view
    size = height * width
    row_size = channels * size
    num_bits = (num - 1).bit_length()
    decoder, weights = Decoder(data), [[20_000] * 4 for _ in range(3)]
    tree, near, scales, far = (Counters(2**21, 6) for _ in range(4))
    labels = [0] * len(mask)
    everything = [64 * num, 4]
    columns: dict[int, list[int]] = {}
    inverse = 2**30 // (everything[0] + 1)
    last = last_but_one = 0
    ranks: list[int] = []

    def move(mean: list[int], distance: int) -> None:
        mean[0] += ((distance - mean[0]) * (131072 // (2 * mean[1] + 3))) >> 16
        mean[1] = min(mean[1] + 1, 1023)

    def bin_of(mean: list[int]) -> int:
        return sum(min((mean[0] * inverse) >> 26, 31) >= edge for edge in (7, 10, 13, 15, 17, 19, 22, 28))

    for r in range(rows):
        row = [everything[0], 4]
        for i in range(row_size):
            index = r * row_size + i
            if not mask[index]:
                continue
            x, y, c = i % width, i // width % height, i // size
            beside = labels[index - size] if c else 0, labels[index - row_size] if r else 0
            inner = labels[index - 1] if x else 0, labels[index - width] if y else 0
            first, second = (inner, beside) if size > 1 else (beside, (last, last_but_one))
            column = columns.setdefault(i, [everything[0], 4])
            bins = bin_of(row), bin_of(column)
            node = 1
            for level in range(num_bits):
                if ((2 * node + 1) << (num_bits - 1 - level)) - 2**num_bits >= num:
                    bit = 0
                elif level < 3:
                    used = [tree[node], near[first, node], scales[bins, node], far[second, node]]
                    bit = decoder.mixed(used, weights[level], 2)
                else:
                    bit = decoder.direct(tree[node])
                node = 2 * node + bit
            rank = node - 2**num_bits
            ranks.append(rank)
            labels[index] = 1 + rank * 6 // num
            last, last_but_one = labels[index], last
            distance = abs(2 * rank + 1 - 2 * zero) * 128
            for mean in (row, column, everything):
                move(mean, distance)
            if len(ranks) % 16 == 1:
                inverse = 2**30 // (everything[0] + 1)
    return ranks


def decode_huffman(data: bytes, num: int, num_symbols: int) -> list[int]:
    bits = "".join(f"{byte:08b}" for byte in data)
    lengths = [int(bits[5 * s : 5 * s + 5], 2) for s in range(num_symbols)]
    at = 8 * math.ceil(5 * num_symbols / 8)
    codes = {}
    code = 0
    for length in range(1, 25):
        for symbol in range(num_symbols):
            if lengths[symbol] == length:
                codes[f"{code:0{length}b}"] = symbol
                code += 1
        code *= 2
    symbols: list[int] = []
    word = ""
    while len(symbols) < num:
        word += bits[at]
        at += 1
        if word in codes:
            symbols.append(codes[word])
            word = ""
    return symbols


def read(data: bytes) -> tuple[dict[str, tuple[int, tuple[int, ...], bytes]], dict[str, Any]]:
    """Per name the number of its dtype, its shape, and its elements; an alias has those of its target. And metadata."""
    at = 5

    def number(source: bytes) -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = source[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    text_bytes, coded_bytes = number(data), number(data)
    text = decode_bytes(data[at : at + coded_bytes], text_bytes, None)
    end_of_text, at = at + coded_bytes, 0
    entries = []
    for _ in range(number(text)):
        name_bytes, kind = number(text), number(text)
        entry: dict[str, Any] = {"name_bytes": name_bytes, "kind": kind}
        entries.append(entry)
        if kind == 3:
            entry["target"] = number(text)
            continue
        entry["dtype"] = number(text)
        entry["shape"] = tuple(number(text) for _ in range(number(text)))
        num_sizes = ITEM_BYTES[entry["dtype"]]
        if kind:
            entry["kept"], entry["codes"], has_scales = number(text), number(text), number(text)
            entry["more"] = number(text), number(text)
            num_sizes = 3 + num_sizes * has_scales
        entry["sizes"] = [number(text) for _ in range(num_sizes)]
    names = []
    for entry in entries:
        names.append(text[at : at + entry["name_bytes"]].decode())
        at += entry["name_bytes"]
    metadata = json.loads(text[at:])
    at = end_of_text + 4 * sum(entry["kind"] != 3 for entry in entries)
    tensors: dict[str, Any] = {}
    for name, entry in zip(names, entries, strict=True):
        if entry["kind"] == 3:
            tensors[name] = tensors[names[entry["target"]]]
            continue
        elements, at = read_tensor(data, at, entry)
        tensors[name] = entry["dtype"], entry["shape"], elements
    return tensors, metadata


def read_tensor(data: bytes, at: int, entry: dict[str, Any]) -> tuple[bytes, int]:
    shape, item = entry["shape"], ITEM_BYTES[entry["dtype"]]
    num = math.prod(shape)
    if entry["kind"] == 0:
        end = at + sum(size - 1 if size else num for size in entry["sizes"])
        return decode_planes(data[at:end], entry["sizes"], num), end
    streams = []
    for size in entry["sizes"][:3]:
        streams.append(data[at : at + size])
        at += size
    values: list[int] = []
    zero = 0
    if entry["codes"]:
        shift, zero, *steps = decode_numbers(streams[2], entry["codes"] + 2)
        magnitudes = []
        for part in (steps[:zero], steps[zero:]):
            magnitude = -1
            for step in part:
                magnitude += step + 1
                magnitudes.append(magnitude << shift)
        values = [m | 1 << (8 * item - 1) for m in reversed(magnitudes[:zero])] + magnitudes[zero:]
    mask, ranks = [0] * num, [0] * entry["kept"]
    if entry["kept"] and entry["kind"] == 2:
        bits, num_entries = entry["more"]
        gaps = decode_huffman(streams[0], num_entries, 1 << bits)
        codes = decode_huffman(streams[1], num_entries, entry["codes"] + 1)
        position = -1
        for gap, code in zip(gaps, codes, strict=True):
            position += gap + 1
            mask[position] = int(code > 0)
        ranks = [code - 1 for code in codes if code]
    elif entry["kept"]:
        height, width = entry["more"]
        rows = shape[0] if len(shape) > 1 else 1
        view = rows, num // rows // (height * width), height, width
        mask = decode_mask(streams[0], view, entry["kept"]) if entry["kept"] < num else [1] * num
        if entry["codes"] > 1:
            ranks = decode_codes(streams[1], view, mask, entry["codes"], zero)
    scales = None
    if len(entry["sizes"]) > 3:
        end = at + sum(size - 1 if size else shape[0] for size in entry["sizes"][3:])
        scales = struct.iter_unpack("<f", decode_planes(data[at:end], entry["sizes"][3:], shape[0]))
        scales, at = [scale for (scale,) in scales], end
    source = iter(ranks)
    elements = []
    for index in range(num):
        element = (values[next(source)] if mask[index] else 0).to_bytes(item, "little")
        if scales is not None:
            product = struct.unpack("<f", element)[0] * scales[index // (num // shape[0])]
            element = struct.pack("<f", product)
        elements.append(element)
    return b"".join(elements), at
