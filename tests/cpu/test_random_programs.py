"""Random programs with fan-out: value, gradients and generator state have eager PyTorch's bits."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from exactness import assert_same_steps, same_bits
from random_programs import TEMPLATES, RandomProgram
from random_programs import make_program as make_new_program
from spread_cases import spread

import undertow as ut

NUM_TESTS, NUM_PROGRAMS = 20, 50

make_program = cache(make_new_program)


def differences(program: RandomProgram) -> list[str]:
    torch.manual_seed(program.seed)
    loss, gradients = program.run_eagerly()
    state = torch.get_rng_state()
    torch.manual_seed(program.seed)
    found_loss, found = ut.value_and_grad(program.function, program.wanted)(*program.inputs)
    wrong = [] if same_bits(found_loss, loss) else [f"loss {found_loss} instead of {loss}"]
    if not torch.equal(torch.get_rng_state(), state):
        wrong.append("generator state")
    for index, right, gradient in zip(program.wanted, gradients, found, strict=True):
        # Where the result does not depend on an input, autograd has None and `ut.grad`, like JAX, zeros.
        expected = torch.zeros_like(program.inputs[index]) if right is None else right
        if not same_bits(gradient, expected):
            wrong.append(f"gradient of x{index}: {first_difference(gradient, expected)}")
    return wrong


def first_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    indices = itertools.product(*map(range, found.shape))
    places = [place for place in indices if not same_bits(found[place], expected[place])]
    place = places[0]
    return f"{found[place].item()!r} instead of {expected[place].item()!r} at {place}, one of {len(places)} elements"


@contextmanager
def naming(program: RandomProgram) -> Iterator[None]:
    """Print the program after any error."""
    try:
        yield
    except Exception as error:
        error.add_note(str(program))
        raise


class AsModule(torch.nn.Module):
    """A program whose wanted inputs are parameters."""

    def __init__(self, program: RandomProgram) -> None:
        super().__init__()
        self.function, self.num_inputs = program.function, len(program.inputs)
        for index in program.wanted:
            self.register_parameter(f"x{index}", torch.nn.Parameter(program.inputs[index].clone()))

    def forward(self, *data: torch.Tensor) -> torch.Tensor:
        rest = iter(data)
        parameters = dict(self.named_parameters())
        names = [f"x{index}" for index in range(self.num_inputs)]
        return self.function(*(parameters[name] if name in parameters else next(rest) for name in names))


@pytest.mark.filterwarnings("ignore::UserWarning")  # of eager PyTorch, at degenerate shapes
def test_planned_steps_have_the_bits_of_eager():
    for seed in range(NUM_PROGRAMS):
        program = make_program(seed)
        data = tuple(x for index, x in enumerate(program.inputs) if index not in program.wanted)
        with naming(program):
            assert_same_steps(AsModule(program), data, {}, lambda loss: loss)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("block", spread(range(NUM_TESTS), str, every=10))
def test_same_bits_as_eager(block):
    reports = []
    for seed in range(block * NUM_PROGRAMS, (block + 1) * NUM_PROGRAMS):
        program = make_program(seed)
        with naming(program):
            wrong = differences(program)
        if wrong:
            reports.append("\n".join([str(program), *wrong]))
    assert not reports, f"{len(reports)} of {NUM_PROGRAMS} programs differ\n\n" + "\n\n".join(reports)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_programs_are_what_they_claim_to_be():
    programs = [make_program(seed) for seed in range(NUM_TESTS * NUM_PROGRAMS)]
    assert all(10 <= len(program.templates) <= 40 for program in programs)
    used = Counter(template for program in programs for template in program.templates)
    assert [item for family in TEMPLATES.values() for item in family if not used[item]] == []
    have = Counter()
    for program in programs:
        gradients = program.run_eagerly()[1]
        have["fan-out"] += sum(count > 1 for count in program.num_uses.values()) >= 2
        have["a write in place"] += any(item in TEMPLATES["in place"] for item in program.templates)
        have["several dtypes"] += len({x.dtype for x in program.inputs}) > 1
        have["several gradients"] += sum(gradient is not None for gradient in gradients) >= 2
        have["an input without influence"] += None in gradients
        have["finite gradients"] += all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    assert have["finite gradients"] > 0.9 * len(programs), have  # all NaN would agree with all NaN
    assert min(have.values()) > 0.2 * len(programs), have


def test_a_seed_is_a_program():
    first, second = make_program(7), make_new_program(7)
    assert str(first) == str(second)
    assert all(map(torch.equal, first.inputs, second.inputs))
    assert str(first) != str(make_program(8))
