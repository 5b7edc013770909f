"""PyTorch's own databases of operators and modules: bits beside eager, by `ut.vjp` and in a module at its least memory.

The samples are PyTorch's (`torch.testing._internal`), made for its own tests, so Undertow's makers did not choose them.
"""

import copy
import warnings

import pytest
import torch
from exactness import same_bits
from spread_cases import spread
from torch import nn
from torch.testing._internal import common_methods_invocations as operators
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import undertow as ut

# Random operators are wrapped so that each call seeds the generator, which a step may not do: the tests seed it.
operators.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)

DTYPES = (torch.float32, torch.float64)
NUM_SAMPLES = 3
DIFFERENT = {
    "as_strided_scatter": "eager's gradient is wrong: numerical derivatives agree with ours",
}


def name_of(case):
    item, dtype = case
    variant = getattr(item, "variant_test_name", "")
    return f"{item.name}{'.' + variant if variant else ''}-{str(dtype).removeprefix('torch.')}"


OPERATORS = [
    (item, dtype)
    for item in operators.op_db
    for dtype in DTYPES
    if item.supports_autograd and dtype in item.supported_backward_dtypes("cpu")
]
MODULES = [(item, dtype) for item in module_db for dtype in DTYPES if dtype in item.dtypes]


def spread_samples(samples):
    """A few of many samples, the first and others at equal distances."""
    samples = list(samples)
    return samples[:: max(1, -(-len(samples) // NUM_SAMPLES))]


class Call(nn.Module):
    """A call of an operator, with the tensors that it is differentiated by as parameters."""

    def __init__(self, operator, sample):
        super().__init__()
        items, self.structure = tree_flatten((sample.input, sample.args, sample.kwargs))
        self.items = list(items)
        self.places = [
            place for place, item in enumerate(items) if isinstance(item, torch.Tensor) and item.requires_grad
        ]
        leaves = [items[place].detach().clone(memory_format=torch.preserve_format) for place in self.places]
        self.leaves = nn.ParameterList(leaves)
        self.operator = operator

    def call(self, *leaves):
        items = list(self.items)
        for place, leaf in zip(self.places, leaves, strict=True):
            items[place] = leaf
        first, args, kwargs = tree_unflatten(items, self.structure)
        return outputs_in(self.operator(first, *args, **kwargs))

    def forward(self):
        return self.call(*self.leaves)


def outputs_in(result):
    return tuple(
        item
        for item in tree_leaves(result)
        if isinstance(item, torch.Tensor) and (item.is_floating_point() or item.is_complex())
    )


def gradients_of(outputs, leaves, seed):
    """Gradients from cotangents that follow from the seed; None where there are none."""
    generator = torch.Generator().manual_seed(seed)
    reached = [item for item in outputs if item.requires_grad]
    cts = [torch.randn(item.shape, dtype=item.dtype, generator=generator) for item in reached]
    if not reached:
        return [None] * len(leaves)
    return list(torch.autograd.grad(reached, leaves, cts, allow_unused=True))


def run(module, *args, **kwargs):
    """The outputs and gradients of a module, and the generator's state after it."""
    torch.manual_seed(3)
    outputs = outputs_in(module(*args, **kwargs))
    found = gradients_of(outputs, list(module.parameters()), 1)
    return [*outputs, *found, *module.buffers(), torch.get_rng_state()]


def plan_at_minimum(module, args=(), kwargs=None):
    """The module, planned for the least memory that is found."""
    try:
        return ut.plan(module, args, kwargs or {}, budget=1, costs="model")
    except ut.InfeasibleBudget as refusal:
        return ut.plan(module, args, kwargs or {}, budget=refusal.minimum_bytes, costs="model")


def assert_same(expected, found):
    assert len(expected) == len(found)
    for index, (left, right) in enumerate(zip(expected, found, strict=True)):
        if isinstance(left, torch.Tensor) and left.is_complex():
            left, right = torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj())
        assert same_bits(left, right), f"number {index} of outputs, gradients, buffers, generator differs"


@pytest.mark.parametrize("case", spread(OPERATORS, name_of, every=120))
def test_operators(case):
    item, dtype = case
    if item.name in DIFFERENT:
        pytest.skip(DIFFERENT[item.name])
    num_compared = 0
    for sample in spread_samples(item.sample_inputs("cpu", dtype, requires_grad=True)):
        module = Call(item.op, sample)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = run(module)
        except RuntimeError:  # also eager cannot
            continue
        leaves = [leaf.detach() for leaf in module.leaves]
        torch.manual_seed(3)
        outputs, pull_back = ut.vjp(module.call, *leaves)
        num_outputs = len(outputs)
        assert_same(expected[:num_outputs], list(outputs))
        gradients = expected[num_outputs : num_outputs + len(leaves)]
        generator = torch.Generator().manual_seed(1)
        cts = []
        with torch.enable_grad():
            torch.manual_seed(3)
            eager = module()
        for output in eager:
            is_reached = output.requires_grad
            drawn = torch.randn(output.shape, dtype=output.dtype, generator=generator) if is_reached else None
            cts.append(torch.zeros_like(output) if drawn is None else drawn)
        if any(output.requires_grad for output in eager):
            found = pull_back(tuple(cts))
            zeros = [torch.zeros_like(leaf) if ct is None else ct for leaf, ct in zip(leaves, gradients, strict=True)]
            assert_same(zeros, list(found))
        assert_same(expected, run(plan_at_minimum(module)))
        num_compared += 1
    assert num_compared or not item.supports_autograd


@pytest.mark.parametrize("case", spread(MODULES, name_of, every=48))
def test_modules(case):
    item, dtype = case
    for training in (True, False):
        samples = item.module_inputs_func(item, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for sample in spread_samples(samples):
            given, forward = sample.constructor_input, sample.forward_input
            torch.manual_seed(0)
            module = item.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
            if any(torch.nn.parameter.is_lazy(parameter) for parameter in module.parameters()):
                module(*forward.args, **forward.kwargs)
            args, kwargs = tree_map(_detached, (forward.args, forward.kwargs))
            expected = run(copy.deepcopy(module), *args, **kwargs)
            assert_same(expected, run(plan_at_minimum(copy.deepcopy(module), args, kwargs), *args, **kwargs))


def _detached(item):
    return item.detach() if isinstance(item, torch.Tensor) else item
