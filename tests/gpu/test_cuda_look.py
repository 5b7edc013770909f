"""What a network has learned, and gradients per example, on a GPU."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import undertow as ut
from undertow.look.looking import look_at
from undertow.look.page import render_look
from undertow.train.batches import read_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_page_of_a_model_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(600, 4)).cuda()
    loader = DataLoader(TensorDataset(torch.randn(20, 3, 12, 12), torch.arange(20) % 4), 8)
    options = {"preparation": None, "classes": None, "num_units": 2, "num_samples": 3, "seed": 0}
    look = look_at(model, loader, read_batch, torch.device("cuda"), title="on a GPU", **options)
    assert [view.layer.path for view in look.views] == ["0", "4"]
    assert all(sample.gradient.any() for view in look.views for item in view.units for sample in item.samples)
    assert render_look(look).count("<article>") == 4


def test_gradients_per_example_have_torch_funcs_values():
    """Both run the same kernels; a library may still choose another algorithm: in float64, sums of 600 terms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(600, 4)).double().cuda()
    parameters = {name: item.detach() for name, item in model.named_parameters()}
    x, target = torch.randn(5, 3, 12, 12, dtype=torch.float64, device="cuda"), torch.arange(5, device="cuda") % 4

    def loss(parameters, x, target):
        output = torch.func.functional_call(model, parameters, (x[None],))
        return nn.functional.cross_entropy(output, target[None])

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, target)
    found = ut.grad(loss, per_example=True)(parameters, x, target)
    for name, gradient in found.items():
        bound = 600 * torch.finfo(torch.float64).eps * float(expected[name].abs().max())
        assert float((gradient - expected[name]).abs().max()) <= bound
