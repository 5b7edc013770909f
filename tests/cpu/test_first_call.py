"""A model that changes itself at its first call ends as in eager, or is refused; planning alone changes nothing."""

import collections
import copy
import types

import numpy
import pytest
import torch
import transformers as hf
from exactness import same_bits
from families import FAMILIES
from torch import nn

import undertow as ut


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.prepare()

    def prepare(self):
        pass


def double(module, args, result):
    return result * 2


class HookBefore(Base):
    """As `transformers` does it."""

    def forward(self, x):
        if not getattr(self, "is_ready", False):
            self.layer.register_forward_hook(double)
            self.is_ready = True
        return self.layer(x)


class HookAfter(Base):
    def forward(self, x):
        result = self.layer(x)
        if not hasattr(self, "handle"):
            self.handle = self.layer.register_forward_hook(double)
        return result


class HookInFront(Base):
    def prepare(self):
        self.layer.register_forward_hook(lambda module, args, result: result + 1)

    def forward(self, x):
        if len(self.layer._forward_hooks) == 1:
            self.layer.register_forward_hook(double, prepend=True)
        return self.layer(x)


class HookRemoved(Base):
    def prepare(self):
        self.handle = self.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))

    def forward(self, x):
        result = self.layer(x)
        self.handle.remove()
        return result


class WrappedForward(Base):
    def forward(self, x):
        if "forward" not in self.layer.__dict__:
            plain = self.layer.forward
            self.layer.forward = lambda x: plain(x).sin()
        return self.layer(x)


class NewBuffer(Base):
    def forward(self, x):
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.arange(4.0), persistent=False)
            return self.layer(x)
        return self.layer(x) * self.scale


class NewSubmodule(Base):
    def forward(self, x):
        if not hasattr(self, "activation"):
            self.activation = nn.Tanh()
            return self.layer(x)
        return self.activation(self.layer(x))


class DeletedAttribute(Base):
    def prepare(self):
        self.is_first = True

    def forward(self, x):
        if hasattr(self, "is_first"):
            del self.is_first
            return self.layer(x) * 3
        return self.layer(x)


class NoteOfShapes(Base):
    def forward(self, x):
        self.sizes = [x.shape[0], {"width": x.shape[1]}]
        return self.layer(x)


class PrivateList(Base):
    def prepare(self):
        self._seen = []

    def forward(self, x):
        if not self._seen:
            self._seen.append(1)
            return self.layer(x) * 3
        return self.layer(x)


class Settings:
    def __init__(self):
        self.flags = {"ready": [False]}


class DeepSettings(Base):
    def prepare(self):
        self.settings = Settings()

    def forward(self, x):
        flag = self.settings.flags["ready"]
        if not flag[0]:
            flag[0] = True
            return self.layer(x) * 3
        return self.layer(x)


class SlotSettings:
    __slots__ = ("is_ready",)

    def __init__(self):
        self.is_ready = False


class MarkedSlot(Base):
    def prepare(self):
        self.settings = SlotSettings()

    def forward(self, x):
        if not self.settings.is_ready:
            self.settings.is_ready = True
            return self.layer(x) * 3
        return self.layer(x)


class StrictDict(dict):
    """As the outputs of `transformers`, it refuses to be changed in some ways."""

    def pop(self, *args):
        raise RuntimeError("pop is refused")

    def update(self, *args):
        raise RuntimeError("update is refused")


class MarkedContainers(Base):
    def prepare(self):
        self.counts = collections.Counter()
        self.marks = StrictDict()
        self.namespace = types.SimpleNamespace(is_ready=False)

    def forward(self, x):
        result = self.layer(x)
        if "ready" not in self.marks:
            self.marks["ready"] = True
            result = result * 3
        if not self.counts["calls"]:
            self.counts["calls"] += 1
            result = result * 5
        if not self.namespace.is_ready:
            self.namespace.is_ready = True
            result = result * 7
        return result


class MarkedArray(Base):
    def prepare(self):
        self.calls = numpy.zeros(2)

    def forward(self, x):
        if self.calls[1] == 0:
            self.calls[1] = 1
            return self.layer(x) * 3
        return self.layer(x)


class MarkedParameter(Base):
    def forward(self, x):
        if not hasattr(self.layer.weight, "is_marked"):
            self.layer.weight.is_marked = True
            return self.layer(x) * 3
        return self.layer(x)


class FrozenParameter(Base):
    def forward(self, x):
        self.layer.weight.requires_grad_(False)
        return self.layer(x)


class MarkedClass(Base):
    is_ready = False

    def forward(self, x):
        if not MarkedClass.is_ready:
            MarkedClass.is_ready = True
            self.layer.register_forward_hook(double)
            return self.layer(x)
        return self.layer(x) + 1


MARKS = {}
SEEN = set()
LOG = []


class MarkedGlobal(Base):
    def forward(self, x):
        if id(self) not in MARKS:
            MARKS[id(self)] = True
            self.layer.register_forward_hook(double)
            return self.layer(x)
        return self.layer(x) + 1


class MarkedGlobalSet(Base):
    def forward(self, x):
        if type(self) not in SEEN:
            SEEN.add(type(self))
            return self.layer(x) * 3
        return self.layer(x)


class LoggedWithHook(Base):
    def forward(self, x):
        if id(self) not in LOG:
            LOG.append(id(self))
            self.layer.register_forward_hook(double)
        return self.layer(x)


class MarkedFunction(Base):
    def forward(self, x):
        if not hasattr(MarkedFunction.forward, "is_done"):
            MarkedFunction.forward.is_done = True
            return self.layer(x) * 3
        return self.layer(x)


def make_closure():
    marks, count = {}, 0

    class Closure(Base):
        def forward(self, x):
            nonlocal count
            if "ready" not in marks or count < 1:
                marks["ready"] = True
                count += 1
                self.layer.register_forward_hook(double)
                return self.layer(x)
            return self.layer(x) + 1

    return Closure()


MODELS = [
    *(HookBefore, HookAfter, HookInFront, HookRemoved, WrappedForward, NewBuffer, NewSubmodule, DeletedAttribute),
    *(
        NoteOfShapes,
        PrivateList,
        DeepSettings,
        MarkedSlot,
        MarkedContainers,
        MarkedArray,
        MarkedParameter,
        FrozenParameter,
        MarkedClass,
        MarkedGlobal,
    ),
    *(MarkedGlobalSet, LoggedWithHook, MarkedFunction, make_closure),
]


@pytest.fixture(autouse=True)
def no_marks():
    clear_marks()
    yield
    clear_marks()


def clear_marks():
    MarkedClass.is_ready = False
    MARKS.clear(), SEEN.clear(), LOG.clear()
    vars(MarkedFunction.forward).clear()


def train(model, num_calls=3):
    torch.manual_seed(2)
    found = []
    for _ in range(num_calls):
        model.zero_grad()
        result = model(torch.randn(3, 4))
        result.square().sum().backward()
        found += [result, *(parameter.grad for parameter in model.parameters())]
    return found


def state(model):
    return [
        (sorted(module.__dict__), len(module._forward_hooks), len(module._forward_pre_hooks), list(module._modules))
        for module in model.modules()
    ]


def make(kind):
    clear_marks()
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_every_call_is_eagers(kind):
    eager = make(kind)
    expected = train(eager)
    model = make(kind)
    planned = ut.plan(model, (torch.randn(3, 4),))
    planned.undertow_runner.prepare((torch.randn(5, 4),), {})
    assert all(map(same_bits, expected, train(planned)))
    assert state(model) == state(eager)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_planning_alone_changes_nothing(kind):
    expected = train(make(kind))
    model = make(kind)
    before = state(model)
    ut.plan(model, (torch.randn(3, 4),))
    assert state(model) == before
    assert all(map(same_bits, expected, train(model)))


class NewParameters(Base):
    def forward(self, x):
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 2)
        return self.head(self.layer(x))


class NewClass(Base):
    def forward(self, x):
        self.__class__ = Base
        return self.layer(x)


class NewRequirement(Base):
    def prepare(self):
        self.layer.weight.requires_grad_(False)

    def forward(self, x):
        self.layer.weight.requires_grad_(True)
        return self.layer(x)


class BackwardHook(Base):
    def forward(self, x):
        self.layer.register_full_backward_hook(lambda module, before, after: None)
        return self.layer(x)


class BackwardHookAfter(Base):
    def forward(self, x):
        result = self.layer(x)
        self.layer.register_full_backward_hook(lambda module, before, after: None)
        return result


class HiddenTensor(Base):
    def forward(self, x):
        scale = x.mean()
        self.layer.register_forward_hook(lambda module, args, result: result * scale)
        return self.layer(x)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (NewParameters, "head.*call the model once before planning"),
        (NewClass, "__class__"),
        (NewRequirement, r"layer\.weight\.requires_grad"),
        (BackwardHook, r"backward hook.*test_first_call\.py:\d+"),
        (BackwardHookAfter, r"layer\._backward_hooks"),
        (HiddenTensor, r"layer\._forward_hooks"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_a_step_cannot_do_again_is_refused(kind, place):
    model = make(kind)
    before = state(model)
    with pytest.raises(ut.CaptureError, match=place):
        ut.plan(model, (torch.randn(3, 4),))
    assert state(model) == before and type(model) is kind
    expected = train(make(kind), num_calls=1)
    assert all(map(same_bits, expected, train(model, num_calls=1)))


class PrivateCount(Base):
    def prepare(self):
        self._calls = []

    def forward(self, x):
        self._calls.append(1)
        return self.layer(x) * len(self._calls)


def test_a_list_that_grows_at_every_call_is_named():
    model = PrivateCount()
    planned = ut.plan(model, (torch.randn(3, 4),))
    with pytest.raises(ut.CaptureError, match="_calls"):
        for _ in range(12):
            planned(torch.randn(3, 4))


COUNTS = {"calls": 0}


class GlobalCount(Base):
    def forward(self, x):
        COUNTS["calls"] += 1
        return self.layer(x)


def test_a_count_outside_of_the_model_is_not_followed_for_ever():
    planned = ut.plan(GlobalCount(), (torch.randn(3, 4),))
    for _ in range(6):
        planned(torch.randn(3, 4))
    assert len(planned.undertow_runner._variants) <= 4


def test_a_failed_recording_leaves_the_model_as_it_was():
    class Broken(HookBefore):
        def forward(self, x):
            result = super().forward(x)
            return result if type(x) is torch.Tensor else torch.ops.aten.no_such_operation(result)

    model = make(Broken)
    before = state(model)
    with pytest.raises(ut.CaptureError, match="the model runs, but recording it failed"):
        ut.plan(model, (torch.randn(3, 4),))
    assert state(model) == before


def test_changing_a_given_list_is_refused():
    class Count(Base):
        def forward(self, x, counts):
            counts.append(1)
            return self.layer(x)

    with pytest.raises(ut.CaptureError, match="changes an object that it was given"):
        ut.plan(Count(), (torch.randn(3, 4), []))


def make_segformer():
    config = hf.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=4,
    )
    return hf.SegformerForSemanticSegmentation(config)


@pytest.mark.parametrize("name", ["llama", "segformer"])
def test_hidden_states_of_transformers(name):
    if name == "llama":
        make_model, batch = FAMILIES[name]
    else:
        make_model = make_segformer
        batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 4, (2, 32, 32))}
    kwargs = {**batch, "output_hidden_states": True}
    torch.manual_seed(0)
    eager = make_model().train()
    model = copy.deepcopy(eager)
    planned = ut.plan(model, (), kwargs)
    found = []
    for network in (eager, planned):
        torch.manual_seed(1)
        found.append([])
        for _ in range(3):
            network.zero_grad()
            result = network(**kwargs)
            result.loss.backward()
            gradients = [parameter.grad for parameter in network.parameters()]
            found[-1].append([result.loss, result.logits, *result.hidden_states, *gradients])
    for expected, other in zip(*found, strict=True):
        assert len(expected) == len(other) and all(map(same_bits, expected, other))
