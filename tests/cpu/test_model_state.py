"""The key of a model's state: what changes it, and that it is the same again when the change is undone."""

import copy

import pytest
import torch
from torch import nn

from undertow.calls.model_state import ModelState


class Settings:
    """Like a configuration."""

    def __init__(self, **values):
        self.__dict__.update(values)


class Model(nn.Module):
    """One of everything that a model may hold."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.factor, self.sizes = 2.0, (1, 2)
        self.numbers, self.names, self.table = [1, 2], {"a"}, {"scale": 2.0}
        self.objects, self.long = [object(), 3], list(range(100))
        self.config = self.second.config = Settings(factor=1.0, layers=[1], zero=0.0)
        self.loose = torch.zeros(3)
        self.handle = self.first.register_forward_hook(lambda module, args, result: None)


def move_hook(model):
    hooks, others = model.first._forward_hooks, model.second._forward_hooks
    others.update(hooks)
    hooks.clear()


def rename_attribute(model):
    del model.factor
    model.other = 2.0


def rename_setting(model):
    del model.config.factor
    model.config.other = 1.0


def exchange_settings(model):
    model.config.__dict__ = {"factor": 3.0}


def exchange_parameters(model):
    model.first._parameters = {"weight": nn.Parameter(torch.zeros(4, 2)), "bias": None}


CHANGES = {
    "mode": lambda model: model.eval(),
    "mode of a part": lambda model: model.second.eval(),
    "number": lambda model: setattr(model, "factor", 3.0),
    "number of another type": lambda model: setattr(model, "factor", 2),
    "sign of zero": lambda model: setattr(model.config, "zero", -0.0),
    "truth in a list": lambda model: model.numbers.__setitem__(0, True),
    "backward hook": lambda model: model.second[0].register_full_backward_hook(lambda module, before, after: None),
    "strides": lambda model: setattr(model.first.weight, "data", torch.zeros(2, 2).t()),
    "strides of a loose tensor": lambda model: setattr(model, "loose", torch.zeros(6)[::2]),
    "tuple": lambda model: setattr(model, "sizes", (1, 3)),
    "new attribute": lambda model: setattr(model, "more", 1),
    "attribute deleted": lambda model: delattr(model, "factor"),
    "attribute renamed": rename_attribute,
    "list": lambda model: model.numbers.__setitem__(0, 5),
    "longer list": lambda model: model.numbers.append(5),
    "another list": lambda model: setattr(model, "numbers", [7]),
    "list no longer long": lambda model: model.long.__delitem__(slice(10, None)),
    "object in a list": lambda model: model.objects.__setitem__(0, object()),
    "set": lambda model: model.names.add("b"),
    "dict": lambda model: model.table.__setitem__("scale", 3.0),
    "name in a dict": lambda model: model.table.__setitem__("size", model.table.pop("scale")),
    "setting": lambda model: setattr(model.config, "factor", 2.0),
    "setting renamed": rename_setting,
    "settings exchanged": exchange_settings,
    "other settings": lambda model: setattr(model, "config", Settings(factor=1.0)),
    "submodule": lambda model: setattr(model, "first", nn.Linear(2, 2)),
    "submodule of a part": lambda model: model.second.__setitem__(0, nn.Linear(2, 2)),
    "new submodule": lambda model: model.second.append(nn.ReLU()),
    "hook": lambda model: model.second[0].register_forward_pre_hook(lambda module, args: None),
    "hook removed": lambda model: model.handle.remove(),
    "hook moved": move_hook,
    "requires_grad": lambda model: model.first.weight.requires_grad_(False),
    "dtype": lambda model: setattr(model.first.weight, "data", torch.zeros(2, 2, dtype=torch.float64)),
    "shape": lambda model: setattr(model.first.weight, "data", torch.zeros(3, 2)),
    "no bias": lambda model: setattr(model.first, "bias", None),
    "parameters exchanged": exchange_parameters,
    "new parameter": lambda model: model.second.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "buffer": lambda model: setattr(model.second[1], "running_mean", torch.zeros(3)),
    "loose tensor": lambda model: setattr(model, "loose", torch.zeros(4)),
    "loose tensor in place": lambda model: model.loose.requires_grad_(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_changes_the_key(name):
    model = Model()
    state = ModelState(model)
    before = state.key()
    assert state.key() == before
    CHANGES[name](model)
    after = state.key()
    assert after != before
    assert state.key() == after == ModelState(model).key()


def test_a_change_taken_back_gives_the_same_key():
    model = Model()
    state = ModelState(model)
    before = state.key()
    weight = model.first.weight
    for change, back in (
        (lambda: model.eval(), lambda: model.train()),
        (lambda: setattr(model, "factor", 3.0), lambda: setattr(model, "factor", 2.0)),
        (lambda: model.numbers.append(5), lambda: model.numbers.pop()),
        (lambda: setattr(model, "numbers", [7]), lambda: setattr(model, "numbers", [1, 2])),
        (lambda: setattr(model.config, "factor", 2.0), lambda: setattr(model.config, "factor", 1.0)),
        (lambda: weight.requires_grad_(False), lambda: weight.requires_grad_()),
        (
            lambda: setattr(model.first, "weight", nn.Parameter(torch.zeros(3, 2))),
            lambda: setattr(model.first, "weight", weight),
        ),
    ):
        change()
        assert state.key() != before
        back()
        assert state.key() == before
        assert hash(state.key()) == hash(before)


def test_values_do_not_change_the_key():
    model = Model()
    state = ModelState(model)
    before = state.key()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.first.weight = nn.Parameter(torch.ones(2, 2))
    model.second[1].running_mean = torch.ones(2)
    model.loose = torch.ones(3)
    model.long.append(1)
    model.config.layers.append(2)
    assert state.key() == before


def test_settings_of_pytorch_change_the_key():
    state = ModelState(Model())
    before = state.key()
    with torch.no_grad():
        assert state.key() != before
    with torch.inference_mode():
        assert state.key() != before
    with torch.autocast("cpu", torch.bfloat16):
        assert state.key() != before
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert state.key() != before
    torch.set_default_dtype(torch.float64)
    try:
        assert state.key() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert state.key() == before


def test_what_forward_assigns_is_taken_by_its_structure():
    model = Model()
    state = ModelState(model)
    start = state.key()
    state.mark_assigned([(id(model.__dict__), "factor")])
    assert state.key() == start
    state.mark_assigned([(id(model.__dict__), "objects")])
    assert state.key() != start  # from now on the list is compared by structure
    model.objects = None
    start = state.key()
    model.objects = [torch.zeros(2), 3]
    before = state.key()
    assert before != start
    model.objects = None
    assert state.key() == start
    model.objects = [torch.zeros(2), 3]
    model.objects = [torch.ones(2), 3]
    assert state.key() == before
    model.objects = [torch.ones(3), 3]
    assert state.key() != before
    model.objects = 1.0
    number = state.key()
    assert number != before
    model.objects = 2.0
    assert state.key() != number
    del model.objects
    model.more = 1
    without = state.key()
    model.more = 2
    assert state.key() != without
