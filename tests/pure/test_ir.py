"""The IR: the checker refuses malformed Programs; the printer is readable and gives the same text every time."""

from dataclasses import replace

import pytest
import torch

from undertow.errors import ProgramError
from undertow.ir import (
    Gradient,
    Input,
    InputKind,
    Node,
    Origin,
    Program,
    TensorType,
    Update,
    Value,
    check_program,
    format_bytes,
    print_program,
)
from undertow.ir.structure import Slot, fill_slots, replace_tensors, structure_key, tensors_in
from undertow.ir.types import contiguous_strides

aten = torch.ops.aten
F32 = TensorType(torch.float32, (2, 3), (3, 1), torch.device("cpu"))
X, Y, Z, CT, GX = (Value(name, F32) for name in ("x", "y", "z", "ct", "gx"))


def program(**changes):
    whole = Program(
        inputs=(Input(X, InputKind.ARGUMENT, "x"),),
        nodes=(
            Node(aten.relu.default, (X,), {}, (Y,), Origin("layer", "model.py", 7)),
            Node(aten.mul.Tensor, (Y, 2.0), {}, (Z,), Origin("", "model.py", 8)),
            Node(aten.threshold_backward.default, (CT, Y, 0), {}, (GX,), Origin("layer", "model.py", 7, "y")),
        ),
        outputs=(Z,),
        differentiable=frozenset((X, Y, Z)),
        boundary=2,
        cotangents=(Input(CT, InputKind.COTANGENT, "z"),),
        gradients=(Gradient(X, GX),),
    )
    return replace(whole, **changes)


def test_a_sound_program_passes_and_prints():
    assert print_program(check_program(program())) == "\n".join(
        [
            "%x : argument                         f32[2,3]  24 B",
            "%y = relu(%x)                         f32[2,3]  24 B  layer  model.py:7",
            "%z = mul.Tensor(%y, 2.0)              f32[2,3]  24 B  model.py:8",
            "return %z",
            "backward",
            "%ct : cotangent                       f32[2,3]  24 B",
            "%gx = threshold_backward(%ct, %y, 0)  f32[2,3]  24 B  layer  model.py:7",
            "gradient of %x = %gx",
        ]
    )


OTHER = Value("w", F32)
SMALL = Value("gx", TensorType(torch.float32, (3,), (1,), torch.device("cpu")))
MALFORMED = {
    "read before assigned": ({"nodes": program().nodes[::-1]}, "not assigned yet"),
    "assigned twice": ({"nodes": program().nodes[:1] * 2, "boundary": 2}, "assigned already"),
    "missing output": ({"outputs": (OTHER,)}, "never assigned"),
    "update of no input": ({"updates": (Update(Y, Z),)}, "not an input"),
    "gradient of no input": ({"gradients": (Gradient(Y, GX),)}, "not an input"),
    "gradient of another type": (
        {
            "nodes": (*program().nodes[:2], replace(program().nodes[2], outputs=(SMALL,))),
            "gradients": (Gradient(X, SMALL),),
        },
        "is required",
    ),
    "too many forward nodes": ({"boundary": 9}, "boundary"),
    "integer gradient": (
        {"differentiable": frozenset([Value("i", TensorType(torch.int64, (), (), torch.device("cpu")))])},
        "cannot carry a gradient",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_programs_are_refused(name):
    changes, message = MALFORMED[name]
    with pytest.raises(ProgramError, match=message):
        check_program(program(**changes))


def test_bytes_and_strides():
    assert [format_bytes(item) for item in (0, 1023, 1024, 98 * 2**20, 5 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "98.0 MiB", "5120.0 GiB",
    ]  # fmt: skip
    for shape in ((), (3,), (2, 0, 3), (1, 5, 1, 2)):
        assert contiguous_strides(shape) == torch.empty(shape).stride()
    assert TensorType.of(torch.empty(4, 8)[:, ::2]).num_bytes == (1 + 3 * 8 + 3 * 2) * 4


def test_structures():
    a, b = torch.zeros(1), torch.ones(2)
    tree = {"x": (a, [b, None, "text"]), "y": 3}
    assert [path for path, _ in tensors_in(tree)] == ["['x'][0]", "['x'][1][0]"]
    skeleton = replace_tensors(tree, lambda tensor: Slot(0 if tensor is a else 1))
    assert fill_slots(skeleton, [a, b]) == tree
    assert structure_key(tree) == structure_key({"x": (a + 1, [b + 1, None, "text"]), "y": 3})
    assert structure_key(tree) != structure_key({"x": (a, [b, None, "text"]), "y": 4})
    assert structure_key(0.0) != structure_key(-0.0)
