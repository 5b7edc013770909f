"""Every convolution algorithm, every pass, against PyTorch's convolution in float64, within the bound it states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from undertow.kernels import bits
from undertow.kernels.convolution import ALGORITHMS, Algorithm, ConvolutionShape, Pass, PreparedAlgorithm
from undertow.kernels.convolution.algorithm import UNIT_ROUNDOFF, accumulated_error
from undertow.kernels.convolution.shape import Pair

BY_NAME = {algorithm.name: algorithm for algorithm in ALGORITHMS}
PLAIN, DIRECT, IM2COL, BLOCKED, SMALL_WINOGRAD, WINOGRAD, FOURIER, POINTWISE, GROUPED = BY_NAME.values()
CANARY = 171
KINDS = ("normal", "wide range", "same sign", "alternating")

each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)


@pytest.fixture(params=[1], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread unless a test requests more: on a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


several_threads = pytest.mark.parametrize("num_threads", [1, 2], indirect=True)


class Guarded:
    """Memory between two guards that nobody may write to; the memory itself starts as NaN."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []

    def new_bytes(self, num_bytes: int) -> Tensor:
        buffer = torch.full((num_bytes + 2 * 4096,), CANARY, dtype=torch.uint8)
        self.buffers.append(buffer)
        return buffer[4096:-4096].fill_(255)

    def new(self, shape: tuple[int, ...], layout: torch.memory_format = torch.contiguous_format) -> Tensor:
        strides = torch.empty(shape, device="meta", memory_format=layout).stride()
        num_elements = torch.Size(shape).numel()
        return self.new_bytes(4 * num_elements).view(torch.float32).as_strided(shape, strides)

    def check(self) -> None:
        for buffer in self.buffers:
            assert (buffer[:4096] == CANARY).all() and (buffer[-4096:] == CANARY).all(), "written outside"


def draw(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    normal = torch.randn(shape, generator=generator)
    if kind == "wide range":
        return normal * 2.0 ** torch.randint(-20, 20, shape, generator=generator)
    if kind == "same sign":
        # All terms are near the maximum, so the sums and their roundings are as large as they can be.
        return 1 + 0.01 * normal.abs().clamp(max=1)
    if kind == "alternating":
        # The transforms have rows of alternating signs, in which these terms add up instead of cancelling.
        signs = (-1.0) ** sum(torch.meshgrid(*(torch.arange(size) for size in shape[2:]), indexing="ij"))
        return signs.expand(shape) * (1 + 0.01 * normal.abs().clamp(max=1))
    return normal


def is_close(found: Tensor, exact: Tensor, bound: float, what: str) -> None:
    error = (found.double() - exact).abs().max().item()
    assert error <= bound, f"{what}: off by {error:.3e}, bound {bound:.3e}"


def check_all_passes(
    algorithm: Algorithm, shape: ConvolutionShape, kind: str = "normal", has_relu: bool = False, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    guarded = Guarded()
    last = torch.channels_last
    x = guarded.new(shape.x_shape, last).copy_(draw(kind, shape.x_shape, generator))
    weight = guarded.new(shape.weight_shape).copy_(draw(kind, shape.weight_shape, generator))
    ct = guarded.new(shape.out_shape, last).copy_(draw(kind, shape.out_shape, generator))
    bias = guarded.new((shape.out_channels,)).copy_(torch.randn(shape.out_channels, generator=generator))
    geometry = shape.stride, shape.padding, shape.dilation
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), *geometry, shape.groups)

    out = guarded.new(shape.out_shape, last)
    mask = guarded.new_bytes(bits.num_packed_bytes(out.numel())) if has_relu else None
    space = guarded.new_bytes(algorithm.workspace_bytes(shape, Pass.FORWARD))
    algorithm.forward(shape, x, weight, out, space, bias=bias, has_relu=has_relu, mask=mask)
    largest = (x.abs().max() * weight.abs().max()).item()
    one_more_rounding = 2 * UNIT_ROUNDOFF * (exact.abs().max() + bias.abs().max()).item()
    bound = algorithm.error_bound(shape, Pass.FORWARD) * largest + one_more_rounding
    is_close(out, exact.relu() if has_relu else exact, bound, "forward")
    if mask is not None:
        assert torch.equal(mask, bits.pack_signs(out))

    passed = torch.where(out > 0, ct, 0) if has_relu else ct
    exact_x, exact_weight, exact_bias = torch.ops.aten.convolution_backward(
        passed.double(), x.double(), weight.double(), [shape.out_channels], *geometry, False, (0, 0), shape.groups,
        [True] * 3,
    )  # fmt: skip
    for gate in (mask, out) if has_relu else (None,):
        ct_x, ct_weight = guarded.new(shape.x_shape, last), guarded.new(shape.weight_shape)
        ct_bias = guarded.new((shape.out_channels,))
        space = guarded.new_bytes(algorithm.backward_bytes(shape))
        algorithm.backward(shape, ct, x, weight, ct_x, ct_weight, ct_bias, space, mask=gate)
        largest = (ct.abs().max() * weight.abs().max()).item()
        is_close(ct_x, exact_x, algorithm.error_bound(shape, Pass.BACKWARD_DATA) * largest, "backward data")
        largest = (ct.abs().max() * x.abs().max()).item()
        is_close(ct_weight, exact_weight, algorithm.error_bound(shape, Pass.BACKWARD_WEIGHT) * largest, "weight")
        # Winograd takes the bias's cotangent from a transformed tile, with a few more roundings.
        pixels = shape.num_out_pixels
        bound = pixels * accumulated_error(pixels + 16) * ct.abs().max().item()
        is_close(ct_bias, exact_bias, bound, "bias")
    guarded.check()


def random_shapes(seed: int, is_3x3: bool, num_shapes: int) -> Iterator[ConvolutionShape]:
    choose = random.Random(seed)
    while num_shapes > 0:
        groups = 1 if is_3x3 else choose.choice((1, 1, 2, 3))
        kernel = (3, 3) if is_3x3 else choose.choice(((1, 1), (3, 3), (5, 5), (3, 1), (2, 4), (7, 7)))
        shape = ConvolutionShape(
            batch=choose.choice((1, 1, 2, 3)),
            in_channels=groups * choose.choice((1, 3, 8, 19, 32)),
            out_channels=groups * choose.choice((1, 4, 16, 33, 64)),
            in_size=(choose.randint(1, 40), choose.randint(1, 40)),
            kernel=kernel,
            stride=(1, 1) if is_3x3 else (choose.choice((1, 2, 3)), choose.choice((1, 2))),
            padding=(choose.randint(0, 2), choose.randint(0, 2)),
            dilation=(1, 1) if is_3x3 else (choose.choice((1, 1, 2)), choose.choice((1, 1, 3))),
            groups=groups,
        )
        if min(shape.out_size) > 0 and shape.flops < 4e7:
            num_shapes -= 1
            yield shape


@each_algorithm
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_size_up_to_40(algorithm: Algorithm, step: int) -> None:
    kernel, padding = ((1, 1), (0, 0)) if algorithm is POINTWISE else ((3, 3), (1, 1))
    for size in range(1, 41, step):
        shape = ConvolutionShape(1, 3, 5, (size, 41 - size), kernel, padding=padding)
        check_all_passes(algorithm, shape, KINDS[size % 4], has_relu=size % 3 == 0, seed=size)


@each_algorithm
@pytest.mark.parametrize("has_relu", [False, True])
def test_one_channel(algorithm: Algorithm, has_relu: bool) -> None:
    """An image of one channel has both layouts."""
    for seed, channels in enumerate(((1, 17), (1, 1), (5, 1))):
        for kernel, stride in (((2, 4), (1, 4)), ((3, 3), (1, 1)), ((1, 1), (2, 1))):
            shape = ConvolutionShape(2, *channels, (5, 5), kernel, stride, dilation=(3 if kernel == (2, 4) else 1, 1))
            if algorithm.refusal(shape) is None:
                check_all_passes(algorithm, shape, has_relu=has_relu, seed=seed)


@each_algorithm
@pytest.mark.parametrize("kind", KINDS)
def test_bound_holds_on_random_shapes(algorithm: Algorithm, kind: str) -> None:
    shapes = itertools.chain(random_shapes(1, True, 6), random_shapes(2, False, 12))
    for seed, shape in enumerate(shapes):
        if algorithm.refusal(shape) is None:
            check_all_passes(algorithm, shape, kind, has_relu=seed % 2 == 0, seed=seed)


@several_threads
@pytest.mark.parametrize(
    ("stride", "groups", "channels"), [((1, 1), 1, 24), ((2, 2), 1, 24), ((3, 2), 2, 32), ((1, 1), 4, 36)]
)
def test_1x1_reads_pixels_directly_or_copies_them(stride: tuple[int, int], groups: int, channels: int) -> None:
    shape = ConvolutionShape(2, channels, 48 * groups, (13, 18), (1, 1), stride, groups=groups)
    check_all_passes(POINTWISE, shape)
    check_all_passes(POINTWISE, shape, has_relu=True)


@several_threads
# Many tiles are computed by blocks of tiles, many channels on few tiles by panels of channels.
@pytest.mark.parametrize(("channels", "size"), [((32, 64), 40), ((192, 160), 9), ((40, 100), 7)])
@pytest.mark.parametrize("algorithm", [SMALL_WINOGRAD, WINOGRAD], ids=lambda algorithm: algorithm.name)
def test_blocks_of_tiles_and_panels_of_channels(algorithm: Algorithm, channels: tuple[int, int], size: int) -> None:
    shape = ConvolutionShape(2, *channels, (size, size), (3, 3), padding=(1, 1))
    check_all_passes(algorithm, shape, has_relu=True)


@several_threads
@pytest.mark.parametrize(
    ("groups", "per_group", "kernel", "stride", "padding", "dilation"),
    [
        (16, (1, 1), (3, 3), (1, 1), (1, 1), (1, 1)),
        (37, (1, 1), (5, 5), (2, 2), (2, 2), (1, 1)),  # the last vector is not full
        (3, (1, 1), (7, 7), (1, 1), (3, 3), (1, 1)),
        (20, (1, 1), (3, 4), (3, 2), (0, 2), (2, 3)),
        (5, (1, 3), (3, 3), (1, 1), (1, 1), (1, 1)),
        (9, (2, 2), (3, 3), (2, 1), (1, 1), (1, 1)),
        (6, (4, 4), (3, 3), (1, 1), (0, 2), (2, 3)),
        (5, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1)),
        (2, (16, 16), (3, 3), (1, 1), (1, 1), (1, 1)),
        (3, (24, 40), (3, 3), (2, 2), (1, 1), (1, 1)),
        (2, (5, 7), (3, 2), (3, 2), (1, 0), (1, 3)),
        (1, (3, 40), (7, 7), (2, 2), (3, 3), (1, 1)),
    ],
)
def test_groups_of_few_channels(
    groups: int, per_group: Pair, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> None:
    channels = groups * per_group[0], groups * per_group[1]
    for size in ((9, 11), (20, 26)):
        shape = ConvolutionShape(2, *channels, size, kernel, stride, padding, dilation, groups)
        if min(shape.out_size) > 0:
            check_all_passes(GROUPED, shape)
            check_all_passes(GROUPED, shape, "wide range", has_relu=True)


@several_threads
def test_same_bits_every_time_and_thread_counts_unchanged(num_threads: int) -> None:
    shape = ConvolutionShape(2, 32, 48, (30, 30), (3, 3), padding=(1, 1))
    x = torch.randn(shape.x_shape).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape.weight_shape)
    for algorithm in (PLAIN, IM2COL, BLOCKED, SMALL_WINOGRAD, WINOGRAD, GROUPED):
        outs = [torch.empty(shape.out_shape, memory_format=torch.channels_last) for _ in range(2)]
        for out in outs:
            algorithm.forward(shape, x, weight, out, algorithm.new_workspace(shape, Pass.FORWARD))
        assert torch.equal(*outs)
    assert torch.get_num_threads() == num_threads


def test_nan_passes_relu_and_its_mask_as_in_pytorch() -> None:
    shape = ConvolutionShape(1, 16, 16, (8, 8), (3, 3), padding=(1, 1))
    x = torch.full(shape.x_shape, float("nan")).contiguous(memory_format=torch.channels_last)
    for algorithm in (PLAIN, BLOCKED, WINOGRAD):
        out = torch.empty(shape.out_shape, memory_format=torch.channels_last)
        mask = torch.zeros(bits.num_packed_bytes(out.numel()), dtype=torch.uint8)
        space = algorithm.new_workspace(shape, Pass.FORWARD)
        algorithm.forward(shape, x, torch.randn(shape.weight_shape), out, space, has_relu=True, mask=mask)
        assert out.isnan().all() and (mask == 255).all()


@pytest.mark.parametrize(
    ("algorithm", "changes", "reason"),
    [
        (WINOGRAD, {"kernel": (5, 5)}, "the kernel is 5 x 5, not 3 x 3"),
        (WINOGRAD, {"stride": (2, 1)}, "the stride is (2, 1), not 1"),
        (SMALL_WINOGRAD, {"dilation": (1, 2)}, "the dilation is (1, 2), not 1"),
        (SMALL_WINOGRAD, {"groups": 2}, "the channels are in 2 groups, not in one"),
        (WINOGRAD, {"padding": (3, 0)}, "the padding is (3, 0), more than 2"),
        (FOURIER, {"stride": (2, 2)}, "the stride is (2, 2), not 1"),
        (FOURIER, {"dilation": (2, 2)}, "the dilation is (2, 2), not 1"),
        (FOURIER, {"groups": 2}, "the channels are in 2 groups, not in one"),
        (DIRECT, {"padding": (1, 3)}, "padding (1, 3) reaches beyond the kernel"),
        (POINTWISE, {}, "the kernel is 3 x 3, not 1 x 1"),
        (GROUPED, {"in_channels": 80}, "a group has 80 input and 6 output channels; at most 64 each"),
        (POINTWISE, {"kernel": (1, 1), "padding": (1, 1)}, "the padding is (1, 1), not 0"),
    ],
)
def test_refusals_name_the_reason(algorithm: Algorithm, changes: dict[str, tuple[int, int]], reason: str) -> None:
    arguments = {"batch": 2, "in_channels": 4, "out_channels": 6, "in_size": (9, 9), "kernel": (3, 3)} | changes
    refusal = algorithm.refusal(ConvolutionShape(**arguments))
    assert refusal is not None and reason in refusal


def test_too_small_a_workspace_is_refused() -> None:
    shape = ConvolutionShape(1, 4, 4, (8, 8), (3, 3), padding=(1, 1))
    x, out = (torch.randn(1, 4, 8, 8).contiguous(memory_format=torch.channels_last) for _ in range(2))
    with pytest.raises(ValueError, match="needs a workspace of at least .* bytes; it was given 100"):
        WINOGRAD.forward(shape, x, torch.randn(shape.weight_shape), out, torch.empty(100, dtype=torch.uint8))


def test_im2col_stores_each_element_once_per_tap() -> None:
    shape = ConvolutionShape(1, 16, 16, (32, 32), (3, 3), padding=(1, 1))
    amplified = IM2COL.workspace_bytes(shape, Pass.FORWARD) / (4 * torch.Size(shape.x_shape).numel())
    assert 9 <= amplified < 9.5
    assert BLOCKED.workspace_bytes(shape, Pass.FORWARD) == BLOCKED.workspace_bytes(
        ConvolutionShape(64, 16, 16, (32, 32), (3, 3), padding=(1, 1)), Pass.FORWARD
    )


@several_threads
def test_prepared_weights_give_the_same_bits(num_threads: int) -> None:
    for seed, shape in enumerate((*random_shapes(11, True, 12), *random_shapes(12, False, 12))):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape.x_shape, generator=generator).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(shape.weight_shape, generator=generator)
        bias = torch.randn(shape.out_channels, generator=generator)
        residual = torch.randn(shape.out_shape, generator=generator).contiguous(memory_format=torch.channels_last)
        for algorithm in ALGORITHMS:
            if not isinstance(algorithm, PreparedAlgorithm) or algorithm.refusal(shape) is not None:
                continue
            expected = torch.empty_like(residual)
            space = algorithm.new_workspace(shape, Pass.FORWARD)
            algorithm.forward(shape, x, weight, expected, space, bias=bias)
            guarded = Guarded()
            prepared = guarded.new_bytes(algorithm.prepared_bytes(shape)).view(torch.float32)
            algorithm.prepare(shape, weight, prepared)
            out = guarded.new(shape.out_shape, torch.channels_last)
            space = guarded.new_bytes(algorithm.evaluation_bytes(shape))
            algorithm.evaluate(shape, x, prepared, out, space, bias=bias)
            assert torch.equal(out, expected), (algorithm.name, shape)
            algorithm.evaluate(shape, x, prepared, out, space, bias=bias, residual=residual, has_relu=True)
            assert torch.equal(out, (expected + residual).relu()), (algorithm.name, shape)
            guarded.check()
