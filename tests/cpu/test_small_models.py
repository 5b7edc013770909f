"""Models that evaluate from small forms, against the same models with the dense weights."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.coding.small_file import SmallFile, pack_small_file
from undertow.coding.tensors import CodedTensor
from undertow.small.bit_layers import BitLayer
from undertow.small.layers import SmallLayer
from undertow.small.packed_layers import PackedLayer
from undertow.small.running import run_small
from undertow.small.sparse_layers import SparseLayer

UNIT = 2.0**-24


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def prune(weight, share=0.2, num_codes=12, with_scales=False):
    mask = torch.rand(weight.shape) < share
    mask.view(-1)[0] = True
    codes = torch.randint(0, num_codes, (int(mask.sum()),), dtype=torch.int32)
    scales = torch.rand(weight.shape[0]) + 0.5 if with_scales else None
    return CodedTensor(tuple(weight.shape), mask, codes, torch.randn(num_codes), scales)


def integers(weight, num_bits):
    most = 2 ** (num_bits - 1)
    codebook = torch.arange(-most, most).float() if num_bits > 1 else torch.tensor([-1.0, 1.0])
    codes = torch.randint(0, len(codebook), (weight.numel(),), dtype=torch.int32)
    return CodedTensor(tuple(weight.shape), None, codes, codebook, torch.rand(weight.shape[0]) + 0.1)


CONVOLUTIONS = [
    {"kernel_size": 3},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": (3, 2), "padding": (2, 1), "stride": (3, 2), "groups": 2},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "bias": False},
    {"kernel_size": 5, "padding": "valid", "groups": 4},
    {"kernel_size": 1},
]


def assert_same_layer(layer, small, tensor, x):
    """n + 3 roundings on either side, as in tests/ops/test_small_kernels.py; here both sides are float32."""
    with torch.no_grad():
        layer.weight.copy_(tensor.dense())
        exact = copy.deepcopy(layer).double()
        magnitudes = copy.deepcopy(exact)
        magnitudes.weight.abs_()
        if magnitudes.bias is not None:
            magnitudes.bias.abs_()
        n = layer.weight[0].numel() + 3
        # A packed or scaled weight is rounded once more.
        bound = (n + 1) * UNIT / (1 - (n + 1) * UNIT) * magnitudes(x.double().abs())
        found, expected = small(x), exact(x.double())
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert ((found.double() - expected).abs() <= bound).all()
        assert torch.equal(small.weight, layer.weight)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options):
    layer = nn.Conv2d(8, 12, **options)
    x = torch.randn(3, 8, 11, 10)
    tensor = prune(layer.weight, with_scales=True)
    assert_same_layer(layer, SparseLayer(layer, tensor), tensor, x)
    assert_same_layer(layer, SparseLayer(layer, tensor), tensor, x[0])
    for num_bits in (8, 4, 1):
        tensor = integers(layer.weight, num_bits)
        assert_same_layer(layer, PackedLayer(layer, tensor, num_bits), tensor, x)


def test_depthwise_and_pieces_of_groups(monkeypatch):
    layer = nn.Conv2d(12, 24, 3, padding=1, groups=12)
    x = torch.randn(2, 12, 9, 9)
    tensor = prune(layer.weight, 0.5)
    assert_same_layer(layer, SparseLayer(layer, tensor), tensor, x)
    tensor = integers(layer.weight, 4)
    monkeypatch.setattr("undertow.small.packed_layers._LEAST_ROWS", 1)
    for piece_bytes in (36, 200, 400, 1 << 20):  # less than a group, several groups, all
        monkeypatch.setattr("undertow.small.packed_layers._PIECE_BYTES", piece_bytes)
        assert_same_layer(layer, PackedLayer(layer, tensor, 4), tensor, x)


@pytest.mark.parametrize("batch", [(), (0,), (1,), (5,), (3, 2, 4), (40,), (130,)], ids=str)
def test_products(batch):
    layer = nn.Linear(75, 33)
    x = torch.randn(*batch, 75)
    if 0 in batch:
        assert SparseLayer(layer, prune(layer.weight))(x).shape == (0, 33)
        return
    tensor = prune(layer.weight)
    assert_same_layer(layer, SparseLayer(layer, tensor), tensor, x)
    for num_bits in (8, 4, 1):
        tensor = integers(layer.weight, num_bits)
        assert_same_layer(layer, PackedLayer(layer, tensor, num_bits), tensor, x)


def test_more_columns_than_two_bytes_count():
    layer = nn.Linear(70_000, 2, bias=False)
    tensor = prune(layer.weight, 0.01)
    small = SparseLayer(layer, tensor)
    assert small.columns.dtype is torch.int32
    assert_same_layer(layer, small, tensor, torch.randn(1, 70_000))


class Branches(nn.Module):
    """Integers in, integers below 2^24 through all layers that may be replaced: sums are exact in any order.

    Of inputs up to 4 and weights up to 9, the largest sum is 16 * 9 * (9 * 9 + 1) * 27 * 4 * 9 = 11,477,376.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5, bias=False)
        self.again = self.head  # one layer under two names

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = x + self.depthwise(x)
        pixels = x.flatten(2)
        normal = self.norm(pixels).transpose(1, 2)
        # A model may read a weight itself, as attention does.
        return self.head(pixels.amax(2)) + self.again.weight.sum(), self.attention(normal, normal, normal)[0]


def with_integers(tensor, kind):
    if tensor.ndim < 2:
        return tensor
    coded = prune(tensor) if kind == "sparse" else integers(tensor, kind)
    most = 7 if kind == 4 else 9
    codebook = torch.randint(-most, most + 1, coded.codebook.shape).float()
    return dataclasses.replace(coded, codebook=codebook, scales=None)


@pytest.mark.parametrize("prefer", ["time", "memory"])
@pytest.mark.parametrize("kind", ["sparse", 8, 4])
def test_a_model_from_its_file(prefer, kind):
    model = Branches().eval()
    state = model.state_dict()
    tensors = {name: with_integers(tensor, kind) for name, tensor in state.items() if "again" not in name}
    tensors["again.weight"] = tensors["head.weight"]
    tensors = SmallFile(pack_small_file(tensors, {}), "a file").read_all()
    dense = copy.deepcopy(model)
    dense.load_state_dict(
        {name: item.dense() if isinstance(item, CodedTensor) else item for name, item in tensors.items()}
    )
    before = copy.deepcopy(state)
    small = run_small(model, tensors, (torch.randint(-4, 5, (2, 3, 6, 6)).float(),), prefer=prefer)
    form = "sparse" if kind == "sparse" else f"int{kind}"
    for choice in small.choices:
        sizes = {"dense": choice.dense_bytes, form: choice.forms[form][1]}
        times = {"dense": choice.dense_us, form: choice.forms[form][0]}
        assert choice.form == min(sizes, key=sizes.get) if prefer == "memory" else min(times, key=times.get)
        assert isinstance(small.model.get_submodule(choice.name), SmallLayer) == (choice.form != "dense")
    assert [choice.name for choice in small.choices] == ["first", "depthwise", "head"]
    assert small.model.again is small.model.head
    assert prefer == "time" or small.choices[0].form == form
    for batch in (1, 2, 5):
        x = torch.randint(-4, 5, (batch, 3, 6, 6)).float()
        with torch.no_grad():
            assert all(map(torch.equal, small(x), dense(x)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ut.CallError, match="evaluates only"):
        small.train()


def test_wrong_calls_are_one_message():
    model = nn.Sequential(nn.Linear(8, 4), nn.Conv1d(1, 1, 1))
    x = torch.randn(2, 8)
    with pytest.raises(ut.CallError, match="no parameter or buffer 'missing'"):
        run_small(model, {"missing": x}, (x,))
    with pytest.raises(ut.CallError, match=r"0.weight is \(4, 8\).*\(2, 8\)"):
        run_small(model, {"0.weight": x}, (x,))
    with pytest.raises(ut.CallError, match="args is a tuple"):
        run_small(model, {}, x)
    small = SparseLayer(model[0], prune(model[0].weight))
    with pytest.raises(ut.CallError, match=r"takes inputs of \[\.\.\., 8\]; found \[2, 9\]"):
        small(torch.randn(2, 9))
    with pytest.raises(ut.CallError, match="evaluates float32 on the CPU"):
        small(x.double())
    layer = nn.Conv2d(2, 2, 3)
    with pytest.raises(ut.CallError, match="room for a window"):
        SparseLayer(layer, prune(layer.weight))(torch.randn(1, 2, 2, 9))
    with pytest.raises(ut.CallError, match="room for a window"):
        BitLayer(layer, integers(layer.weight, 1))(torch.randn(1, 3, 9, 9))
