"""Divided parameters in a plan: gathered as often as it likes, never after their gradients were sent."""

import pytest
import torch

from undertow.errors import PlanError, UndertowError
from undertow.ir import Input, InputKind, Node, OpaqueType, Origin, Program, TensorType, Value
from undertow.ir.check_plan import check_plan
from undertow.memory.tables import make_plan
from undertow.ops.communication import LINK
from undertow.ops.divided_parameters import DividedParameter, DividedParameters
from undertow.ops.gathering import END_GATHERING, FINISH_GATHER, START_GATHER
from undertow.planner.problem import make_problem


def row(size):
    return TensorType(torch.float32, (size,), (1,), torch.device("cpu"))


PART = Value("w", row(4))


def gather(number):
    whole, transfer, found = Value(f"whole{number}", row(8)), Value(f"t{number}", OpaqueType("transfer")), None
    found = Value(f"w{number}", row(8))
    start = Node(START_GATHER, (PART, LINK, "w", 16), {}, (whole, transfer), Origin())
    return [start, Node(FINISH_GATHER, (whole, transfer, LINK, "w"), {}, (found,), Origin())], found


def program_of(*nodes, output):
    inputs = (Input(PART, InputKind.PARAMETER, "w"),)
    return Program(inputs=inputs, nodes=tuple(nodes), outputs=(output,), boundary=len(nodes))


END = Node(END_GATHERING, (LINK, ("w",), PART), {}, (), Origin())


def read(value, number):
    found = Value(f"norm{number}", row(8))
    return Node(torch.ops.aten.neg.default, (value,), {}, (found,), Origin()), found


def test_a_gathered_parameter_is_freed_after_its_last_read_and_counts_until_then():
    (first, second), found = gather(1)
    node, output = read(found, 1)
    plan = check_plan(make_plan(program_of(first, second, node, END, output=output), held={"parameters": 16}))
    # 16 bytes here, 32 of the whole from its start on, and its negative in the same memory or beside it.
    assert plan.live_bytes[0] == 16 + 32
    assert plan.live_bytes[-1] == 16 + 32


def test_nothing_is_gathered_after_gradients_were_sent():
    (first, second), found = gather(1)
    node, output = read(found, 1)
    plan = make_plan(program_of(END, first, second, node, output=output), held={"parameters": 16})
    with pytest.raises(PlanError, match="start_gather, reads %w, which .*end_gathering, overwrote"):
        check_plan(plan)


def test_the_planner_may_gather_again_until_then():
    (first, second), found = gather(1)
    node, output = read(found, 1)
    problem = make_problem(program_of(first, second, node, END, output=output), (), lambda _: _cost(), 16)
    (start, *_), instance = problem.instance.order.tolist(), problem.instance
    assert instance.can_repeat[start]
    (end,) = [place for place, kind in enumerate(problem.kinds) if problem.program.nodes[kind.node] is END]
    assert instance.destroys.row(end) and not instance.can_repeat[end]
    assert set(instance.destroys.row(end)) <= set(instance.reads.row(start))


def _cost():
    from undertow.ir.cost import Cost

    return Cost(1, 0)


def test_a_parameter_without_memory_says_what_to_call():
    parameter = torch.nn.Parameter(torch.ones(3))
    divided = DividedParameters()
    divided._parameters["w"] = parameter
    with divided.opened():
        with divided.opened():
            assert type(parameter) is torch.nn.Parameter
        assert type(parameter) is torch.nn.Parameter
    assert type(parameter) is DividedParameter
    assert (parameter.shape, parameter.dtype, parameter.grad) == ((3,), torch.float32, None)
    for touch in (parameter.sum, parameter.detach, lambda: parameter + 1, lambda: parameter[0], lambda: str(parameter)):
        with pytest.raises(UndertowError, match="call step.settle\\(\\) on all ranks first"):
            touch()
