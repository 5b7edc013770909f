"""What a rule recorded for one layer is recorded again for the next: the same Program as without."""

import copy

import pytest
import torch
from torch import nn

import undertow as ut
from undertow.autodiff import backward, repeats
from undertow.autodiff.backward import differentiate
from undertow.ir.printer import print_program
from undertow.models.gpt import char_gpt
from undertow.models.lstm import lstm
from undertow.models.resnet import resnet50
from undertow.pipeline import differentiable_outputs
from undertow.record.capture import capture


class Pairs(nn.Module):
    """The same operations on one tensor twice, on two tensors, on views of one, on equal sizes with other strides."""

    def forward(self, x, y):
        products = [x * y, x * x, y * x, y * y, x[0] * x[0], x[0] * x[1], x.t() * x, x * x.t()]
        scaled = [(x + y) * 0.0, (x + y) * -0.0, (x + y) * 1, (x + y) * 1.0]
        stacked = torch.stack([x, x]), torch.stack([x, y]), torch.cat([x, x]), torch.cat([x, x.t()])
        return sum(item.sum() for item in (*products, *scaled, *stacked))


class Written(nn.Module):
    """Writes into views, so that cotangents are written too."""

    def forward(self, x, y):
        z = x * 2
        for row in range(3):
            z[row] = z[row].clone() * y[row]
            z[:, row] += y[row]
        return z.exp().sum() + z[1].clone().mul_(x[0]).sum()


square = torch.arange(9.0).view(3, 3) / 9
CASES = {
    "gpt": (lambda: char_gpt(17, context=8, num_layers=3, width=16), (torch.arange(8)[None] % 17,), True),
    "lstm": (lambda: lstm(17, width=8, num_layers=2), (torch.arange(6)[None],), False),
    "resnet": (lambda: resnet50(10, width=8, depths=(2, 2, 1, 1)), (torch.zeros(2, 3, 32, 32),), True),
    "pairs": (Pairs, (square.requires_grad_(), square.exp().detach().requires_grad_()), True),
    "written": (Written, (square, square.exp().detach().requires_grad_()), True),
}


@pytest.mark.parametrize(("make_model", "args", "has_repeats"), CASES.values(), ids=CASES)
def test_the_program_is_the_one_without_repeats(make_model, args, has_repeats, monkeypatch):
    model = make_model()
    program = capture(model, args, {}, model).program
    outputs = [program.outputs[place] for place in differentiable_outputs(program)]
    wanted = [item.value for item in program.inputs if item.value in program.differentiable]
    repeated = []
    original = repeats.Repeat.record
    monkeypatch.setattr(repeats.Repeat, "record", lambda *given: repeated.append(1) or original(*given))
    found = differentiate(program, outputs, wanted)
    assert bool(repeated) >= has_repeats
    monkeypatch.setattr(backward.RuleCall, "of", lambda *parts: None)
    expected = differentiate(program, outputs, wanted)
    assert print_program(found) == print_program(expected)
    assert [node.origin for node in found.nodes] == [node.origin for node in expected.nodes]


@pytest.mark.parametrize("model", [Pairs(), Written()], ids=["pairs", "written"])
def test_gradients_have_eagers_bits(model):
    given = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]
    others = copy.deepcopy(given)
    ut.plan(model, tuple(given))(*given).backward()
    model(*others).backward()
    assert all(torch.equal(item.grad, other.grad) for item, other in zip(given, others, strict=True))
