"""The energy of an inference, against sums made by hand."""

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.coding.tensors import CodedTensor
from undertow.small.binary_layers import BinaryLinear
from undertow.small.energy import EnergyEstimate, LayerEnergy, access_pj, estimate_energy
from undertow.small.quantising import code_model


def test_a_billion_parameters_at_20_hertz():
    """Han et al., NeurIPS 2015: 20 Hz x 1G x 640 pJ = 12.8 W for DRAM alone."""
    estimate = EnergyEstimate((LayerEnergy("all", "float", 0, 4e9, 0),))
    assert estimate.weight_watts(20) == pytest.approx(12.8)
    assert estimate.watts(20) == pytest.approx(12.8)


def test_memories_by_size():
    sizes = (1, 8 << 10, (8 << 10) + 1, 32 << 10, 1 << 20, (1 << 20) + 1)
    assert [access_pj(size) for size in sizes] == [5, 5, 10, 10, 50, 640]


def test_a_network_counted_by_hand():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 16, 10))
    model.train()
    estimate = estimate_energy(model, (torch.randn(5, 2, 6, 6),))
    convolution, linear = estimate.layers
    assert model.training and (convolution.name, linear.name) == ("0", "3")
    assert convolution.num_products == 3 * 2 * 9 * 16 and linear.num_products == 480
    assert convolution.weight_bytes == 4 * 54 and linear.weight_bytes == 4 * 480
    assert convolution.activation_bytes == 4 * (72 + 48) and linear.activation_bytes == 4 * (48 + 10)
    # 4 x 534 bytes fit 8 KB, where 32 bits cost 5 pJ; a product of floats is 3.7 pJ, a sum 0.9.
    assert estimate.weight_pj == pytest.approx(534 * 5)
    assert estimate.arithmetic_pj == pytest.approx((864 + 480) * 4.6)
    assert estimate.total_pj == pytest.approx(534 * 5 + 1344 * 4.6 + (120 + 58) * 5)


def test_coded_weights_count_as_they_are_stored():
    model = nn.Linear(100, 10)
    mask = torch.zeros(10, 100, dtype=torch.bool)
    mask[:, ::10] = True
    tensor = CodedTensor((10, 100), mask, torch.arange(100, dtype=torch.int32) % 4, torch.arange(1.0, 5.0))
    (layer,) = estimate_energy(model, (torch.randn(1, 100),), tensors={"weight": tensor}).layers
    # 100 entries: 3 bits of a code, as there is one more for fillers, and 4 bits of a gap of 9; 4 values.
    assert layer.num_products == 100 and layer.weight_bytes == 100 * 7 / 8 + 0.5 + 16


def test_single_bits_cost_little():
    model = BinaryLinear(64, 32)
    x = torch.randn(2, 64)
    (layer,) = estimate_energy(model, (x,), tensors=code_model(model)).layers
    assert (layer.kind, layer.weight_bytes) == ("bits", 64 * 32 / 8 + 4 * 32 + 8)
    assert layer.arithmetic_pj == pytest.approx(64 * 32 / 32 * 0.2)


def test_an_example_without_a_batch_is_refused():
    with pytest.raises(ut.CallError, match="no tensor whose first dimension is the batch"):
        estimate_energy(nn.Linear(2, 2), (torch.tensor(1.0),))
