"""One tensor to an Entry and its payload, and back.

A payload is the tensor's streams, one after the other. What the file keeps of a codebook is what the codes use, in
ascending order and each value once, so that ranks are ordered like values; equal inputs give equal bytes. The checksum
is taken over what was decoded, so it also shows a decoder that went wrong.
"""

from __future__ import annotations

import zlib
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from undertow.coding.entries import DTYPES, Entry, Kind
from undertow.coding.streams import (
    decode_codes,
    decode_gaps,
    decode_mask,
    decode_numbers,
    decode_planes,
    encode_codes,
    encode_gaps,
    encode_mask,
    encode_numbers,
    encode_planes,
    make_view,
    possible_kernels,
)
from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError, DataError

Coder = Literal["mixed", "huffman"]
# Kernels of a matrix are compared on so many of its first weights.
_TRIED_WEIGHTS = 1 << 20


def encode_tensor(name: str, tensor: Tensor | CodedTensor, coder: Coder) -> tuple[Entry, bytes]:
    """The entry and the payload of a tensor. The entry's offset is not known yet."""
    if isinstance(tensor, Tensor):
        return _encode_dense(name, tensor)
    codebook, ranks = _sorted_codebook(tensor)
    planes, scale_streams = encode_planes(_bytes_of(tensor.scales)) if tensor.scales is not None else ([], [])
    mask = numpy.ones(tensor.shape, numpy.int8) if tensor.mask is None else tensor.mask.numpy().view(numpy.int8)
    mask = numpy.ascontiguousarray(mask).reshape(-1)
    fields: dict[str, Any] = {"num_kept": tensor.num_kept, "num_codes": len(codebook)}
    gaps = codes = book = b""
    if tensor.num_kept:
        book, zero_rank = _encode_codebook(codebook)
        if coder == "huffman":
            positions = numpy.flatnonzero(mask)
            fields["gap_bits"], fields["num_entries"], gaps, codes = encode_gaps(positions, ranks, len(codebook))
        else:
            fields["kernel"] = _best_kernel(mask, tensor.shape, tensor.num_kept)
            view = make_view(tensor.shape, fields["kernel"])
            if tensor.num_kept < mask.size:
                gaps = encode_mask(mask, view)
            if len(codebook) > 1:
                codes = encode_codes(mask, ranks, len(codebook), zero_rank, view)
    kind = Kind.HUFFMAN if coder == "huffman" else Kind.MIXED
    sizes = (len(gaps), len(codes), len(book), *planes)
    checksum = _checksum_coded(mask, ranks, codebook, tensor.scales)
    entry = Entry(name, kind, tensor.dtype, tensor.shape, sizes, checksum=checksum, **fields)
    return entry, b"".join((gaps, codes, book, *scale_streams))


def decode_tensor(entry: Entry, payload: bytes, where: str) -> Tensor | CodedTensor:
    """The tensor of an entry that is not an alias. `where` names it in errors."""
    if entry.kind is Kind.DENSE:
        elements = decode_planes(payload, list(entry.sizes), entry.num_weights, where)
        _check_sum(zlib.crc32(elements.tobytes()), entry, where)
        if entry.dtype is torch.bool and (elements > 1).any():
            raise DataError(f"{where}: a boolean is neither true nor false")
        return _tensor_of(elements, entry.dtype).reshape(entry.shape)
    ends = numpy.cumsum(entry.sizes[:3]).tolist()
    gaps, codes, book = payload[: ends[0]], payload[ends[0] : ends[1]], payload[ends[1] : ends[2]]
    num_weights, num_kept, num_codes = entry.num_weights, entry.num_kept, entry.num_codes
    codebook, zero_rank = _decode_codebook(book, num_codes, entry.dtype, where)
    ranks = numpy.zeros(num_kept, numpy.int32)
    if not num_kept:
        _require_empty(gaps + codes, where)
        mask = numpy.zeros(num_weights, numpy.int8)
    elif entry.kind is Kind.HUFFMAN:
        bits, num_entries = entry.gap_bits, entry.num_entries
        positions, ranks = decode_gaps(gaps, codes, bits, num_entries, num_codes, num_weights, where)
        if positions.size != num_kept:
            raise DataError(f"{where}: {positions.size} weights are kept where {num_kept} were said to be")
        mask = numpy.zeros(num_weights, numpy.int8)
        mask[positions] = 1
    else:
        view = make_view(entry.shape, entry.kernel)
        if num_kept < num_weights:
            mask = decode_mask(gaps, num_kept, view, where)
        else:
            _require_empty(gaps, where)
            mask = numpy.ones(num_weights, numpy.int8)
        if num_codes > 1:
            ranks = decode_codes(codes, mask, num_kept, num_codes, zero_rank, view, where)
        else:
            _require_empty(codes, where)
    if not torch.from_numpy(ranks).bincount(minlength=num_codes).all():
        raise DataError(f"{where}: the codebook holds values that no code uses")
    scales = None
    if entry.has_scales:
        rows = decode_planes(payload[ends[2] :], list(entry.sizes[3:]), entry.shape[0], where)
        scales = _tensor_of(rows, entry.dtype)
    _check_sum(_checksum_coded(mask, ranks, codebook, scales), entry, where)
    kept = torch.from_numpy(mask.view(numpy.bool_)).reshape(entry.shape) if num_kept < num_weights else None
    return CodedTensor(entry.shape, kept, torch.from_numpy(ranks), codebook, scales)


def _encode_dense(name: str, tensor: Tensor) -> tuple[Entry, bytes]:
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise CallError(f"{name}: a tensor of {tensor.dtype}, {tensor.layout} cannot be stored")
    elements = _bytes_of(tensor)
    sizes, streams = encode_planes(elements)
    checksum = zlib.crc32(elements.tobytes())
    return Entry(name, Kind.DENSE, tensor.dtype, tuple(tensor.shape), tuple(sizes), checksum=checksum), b"".join(
        streams
    )


def _bytes_of(tensor: Tensor) -> Any:
    """The elements as rows of bytes, the lowest first."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        # Where nothing is, strides may be 0, and PyTorch refuses another view.
        return numpy.zeros((0, tensor.dtype.itemsize), numpy.uint8)
    return flat.view(torch.uint8).numpy().reshape(flat.numel(), tensor.dtype.itemsize)


def _tensor_of(elements: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(elements).reshape(-1)).view(dtype)


def _split_floats(codebook: Tensor) -> tuple[Any, Any]:
    """Per value whether its sign bit is set, and the other bits as a number."""
    size = codebook.dtype.itemsize
    bits = _bytes_of(codebook).reshape(-1).view(f"<u{size}").astype(numpy.uint64)
    sign = numpy.uint64(8 * size - 1)
    return bits >> sign == 1, (bits & ((numpy.uint64(1) << sign) - numpy.uint64(1))).astype(numpy.int64)


def _join_floats(is_negative: Any, magnitudes: Any, dtype: torch.dtype) -> Tensor:
    sign = numpy.uint64(8 * dtype.itemsize - 1)
    bits = magnitudes.astype(numpy.uint64) | is_negative.astype(numpy.uint64) << sign
    return _tensor_of(bits.astype(f"<u{dtype.itemsize}").view(numpy.uint8), dtype)


def _sorted_codebook(tensor: CodedTensor) -> tuple[Tensor, Any]:
    """The values that are used, each once, in ascending order, and every code's rank among them."""
    codes = tensor.codes.cpu().numpy()
    is_used = numpy.zeros(len(tensor.codebook), bool)
    is_used[codes] = True
    is_negative, magnitudes = _split_floats(tensor.codebook)
    keys = numpy.where(is_negative, -1 - magnitudes, magnitudes)
    used = numpy.unique(keys[is_used])
    ranks = numpy.searchsorted(used, keys).astype(numpy.int32)[codes]
    negative = used < 0
    return _join_floats(negative, numpy.where(negative, -1 - used, used), tensor.dtype), ranks


def _encode_codebook(codebook: Tensor) -> tuple[bytes, int]:
    """The steps between a sorted codebook's values; and the rank of the first that is not negative."""
    is_negative, magnitudes = _split_floats(codebook)
    num_negative = int(is_negative.sum())
    # Values of few bits end in zeros, which are left out.
    together = int(numpy.bitwise_or.reduce(magnitudes))
    shift = (together & -together).bit_length() - 1 if together else 0
    parts = [magnitudes[:num_negative][::-1] >> shift, magnitudes[num_negative:] >> shift]
    steps = [numpy.diff(part, prepend=-1) - 1 for part in parts]
    return encode_numbers(numpy.concatenate([[shift, num_negative], *steps])), num_negative


def _decode_codebook(stream: bytes, num_codes: int, dtype: torch.dtype, where: str) -> tuple[Tensor, int]:
    if not num_codes:
        _require_empty(stream, where)
        return torch.zeros(0, dtype=dtype), 0
    shift, num_negative, *steps = decode_numbers(stream, num_codes + 2, where).tolist()
    limit = torch.tensor(torch.inf, dtype=dtype).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    magnitudes = []
    for part in (steps[:num_negative], steps[num_negative:]):
        last = -1
        for step in part:
            last += step + 1
            magnitudes.append(last)
    if num_negative > num_codes or shift > 63 or max(magnitudes) << shift > limit.item():
        raise DataError(f"{where}: the codebook holds values beyond {dtype}")
    values = numpy.array(magnitudes[:num_negative][::-1] + magnitudes[num_negative:], numpy.int64) << shift
    return _join_floats(numpy.arange(num_codes) < num_negative, values, dtype), num_negative


def _best_kernel(mask: Any, shape: tuple[int, ...], num_kept: int) -> tuple[int, int]:
    """The kernel with which the mask takes least bytes, tried on the first rows."""
    kernels = possible_kernels(shape)
    if len(kernels) == 1 or num_kept == mask.size:
        return kernels[0]
    row_size = mask.size // shape[0]
    rows = max(1, min(shape[0], _TRIED_WEIGHTS // row_size))
    part = mask[: rows * row_size]
    return min(kernels, key=lambda kernel: len(encode_mask(part, make_view((rows, row_size), kernel))))


def _checksum_coded(mask: Any, ranks: Any, codebook: Tensor, scales: Tensor | None) -> int:
    checksum = zlib.crc32(numpy.packbits(mask.view(numpy.bool_)).data)
    checksum = zlib.crc32(numpy.ascontiguousarray(ranks, "<i4").data, checksum)
    checksum = zlib.crc32(_bytes_of(codebook).tobytes(), checksum)
    return checksum if scales is None else zlib.crc32(_bytes_of(scales).tobytes(), checksum)


def _check_sum(found: int, entry: Entry, where: str) -> None:
    if found != entry.checksum:
        raise DataError(f"{where}: the checksum of the decoded tensor is {found:08x}, not {entry.checksum:08x}")


def _require_empty(stream: bytes, where: str) -> None:
    if stream:
        raise DataError(f"{where}: {len(stream)} bytes are stored where nothing had to be")
