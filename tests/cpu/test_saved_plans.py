"""Plans as files: run by another process to the same bits, without a search; refused when tampered with."""

import hashlib
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from exactness import same_bits
from safetensors.torch import load_file
from saved_plan_cases import CASES, make, train
from torch import nn

import undertow as ut
from undertow.errors import InfeasibleBudget, PlanError
from undertow.ir import saving


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The results of the cases' plans here, and their results in a process without costs and plans."""
    folder = tmp_path_factory.mktemp("plans")
    here = {}
    for name, (_, _, is_least, _, _) in CASES.items():
        model, args, targets, how = make(name)
        if is_least:
            with pytest.raises(InfeasibleBudget) as refusal:
                ut.train_step(model, args, budget=1, **how)
            how["budget"] = refusal.value.minimum_bytes
        step = ut.train_step(model, args, **how)
        ut.save_plan(step, folder / f"{name}.plan")
        here[name] = train(model, step, (*args, *targets))
    script = os.path.join(os.path.dirname(__file__), "..", "saved_plan_cases.py")
    elsewhere = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    subprocess.run([sys.executable, script, str(folder)], check=True, env=elsewhere)
    return here, {name: load_file(folder / f"{name}.safetensors") for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_another_process_runs_it_to_the_same_bits(trained, name):
    here, there = trained[0][name], trained[1][name]
    assert here.keys() == there.keys()
    assert [key for key in here if not same_bits(here[key], there[key])] == []


@pytest.fixture
def small():
    """A network, its step's arguments, and its budget: dropout and tanh run again."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.3))]
    model = nn.Sequential(*layers, nn.Linear(32, 8))
    x, y = torch.randn(256, 32), torch.randint(8, (256,))
    how = {"targets": (y,), "loss": nn.functional.cross_entropy, "costs": "model"}
    with pytest.raises(InfeasibleBudget) as refusal:
        ut.train_step(model, (x,), budget=1, **how)
    return model, (x, y), how | {"budget": refusal.value.minimum_bytes}


def gradients(model, step, inputs):
    torch.manual_seed(2)
    loss = step(*inputs)
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def hashed(data):
    body = json.dumps(data, separators=(",", ":"))
    return f"undertow plan 1 sha256 {hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def test_a_truncated_or_changed_file_is_refused(small, tmp_path):
    model, (x, y), how = small
    path = tmp_path / "step.plan"
    step = ut.train_step(model, (x,), **how)
    ut.save_plan(step, path)
    assert str(ut.load_plan(path)) == str(step.plan)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(40):
        place = rng.randrange(len(content))
        for broken in (content[:place], content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]):
            path.write_bytes(broken)
            with pytest.raises(PlanError, match="not a whole file"):
                ut.load_plan(path)
            with pytest.raises(PlanError, match="not a whole file"):
                ut.train_step(model, (x,), saved_plan=path, **how)
    for text in ("", "undertow plan 1", "\x00" * 100, hashed([]), hashed({}), hashed({"plan": 1}), hashed("[" * 9999)):
        path.write_text(text)
        with pytest.raises(PlanError):
            ut.load_plan(path)
    for missing in (tmp_path, tmp_path / "none.plan"):
        with pytest.raises(PlanError, match="cannot be read"):
            ut.load_plan(missing)


@pytest.mark.parametrize("num_changes", [20, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_what_was_tampered_with_is_refused_or_does_no_harm(small, tmp_path, num_changes):
    """Any number, name or list is changed, and the hash computed again: the plan is refused, or has eager's bits."""
    model, (x, y), how = small
    path = tmp_path / "step.plan"
    step = ut.train_step(model, (x,), **how)
    expected = gradients(model, step, (x, y))
    ut.save_plan(step, path)
    plain = path.read_text().partition("\n")[2]
    places = list(_leaves(json.loads(plain)))
    rng = random.Random(0)
    num_refused = 0
    for _ in range(num_changes):
        data = json.loads(plain)
        _tamper(data, rng.choice(places), rng)
        path.write_text(hashed(data))
        try:
            step = ut.train_step(model, (x,), saved_plan=path, **how)
        except PlanError:
            num_refused += 1
            continue
        assert step.plan.peak_bytes <= how["budget"]
        assert all(map(same_bits, expected, gradients(model, step, (x, y))))
    assert num_refused > num_changes / 2  # most of a file is what runs


def _leaves(item, place=()):
    """Where in the data all numbers and texts are, and the lists and dicts that hold them."""
    if place:
        yield place
    pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, part in pairs:
        yield from _leaves(part, (*place, key))


def _tamper(data, place, rng):
    *way, last = place
    for key in way:
        data = data[key]
    found = data[last]
    changed = [None, -1, [], {}, "", 0, 1 << 70]
    if isinstance(found, int):
        changed = [found + 1, found - 1, 0, -1, 1 << 70, None]
    elif isinstance(found, list) and found:
        changed = [found[1:], found[::-1], [*found, found[0]], []]
    data[last] = rng.choice([item for item in changed if item != found])


def test_the_plan_of_another_step_is_refused(small, tmp_path):
    model, (x, y), how = small
    path = tmp_path / "step.plan"
    ut.save_plan(ut.train_step(model, (x,), **how), path)
    with pytest.raises(PlanError, match="another step"):
        ut.train_step(model, (x[:128],), saved_plan=path, **how | {"targets": (y[:128],)})
    with pytest.raises(PlanError, match="another step"):
        ut.train_step(nn.Sequential(*model, nn.ReLU()), (x,), saved_plan=path, **how)
    with pytest.raises(PlanError, match="another step"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ut.train_step(model, (x,), saved_plan=path, optimizer=optimizer, **how)
    with pytest.raises(PlanError, match="the budget is 1 bytes"):
        ut.train_step(model, (x,), saved_plan=path, **how | {"budget": 1})
    model.register_buffer("large", torch.zeros(1 << 20))
    with pytest.raises(PlanError, match="bytes of buffers"):
        ut.train_step(model, (x,), saved_plan=path, **how)


def test_planned_modules_too(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x = torch.randn(4, 3, 8, 8)
    for mode, numerics in ((model.train(), "exact"), (model.eval(), "fast")):
        planned = ut.plan(mode, (x,), numerics=numerics)
        ut.save_plan(planned, tmp_path / "module.plan")
        again = ut.plan(mode, (x,), numerics=numerics, saved_plan=tmp_path / "module.plan")
        assert [node.name for node in again.plan.nodes] == [node.name for node in planned.plan.nodes]
        state = {name: item.clone() for name, item in model.state_dict().items()}
        expected = planned(x)
        model.load_state_dict(state)
        assert same_bits(again(x), expected)
    with pytest.raises(ut.CallError, match="ut.train_step or ut.plan"):
        ut.save_plan(model, tmp_path / "module.plan")


def test_what_has_no_size_is_read_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(saving, "MAX_FILE_BYTES", 1000)
    with pytest.raises(PlanError, match="larger than any plan"):
        saving.read_plan("/dev/zero")
