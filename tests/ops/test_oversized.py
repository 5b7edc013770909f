"""All operations whose outputs take more memory than needed are declared, and their compact form is exact."""

import pytest
import torch

from undertow.ir import TensorType
from undertow.ir.pytorch import operation_of
from undertow.ir.schema import flatten_outputs, schema_of
from undertow.ops.own import compact
from undertow.rules.registry import Sampler, registered_ops

OVERSIZED = {op.target for op in registered_ops() if operation_of(op.target).is_oversized}


def excess_bytes(target, case):
    given = {item.untyped_storage()._cdata for item in flatten_outputs(case.args) if item is not None}
    result = target(*case.args, **case.kwargs)
    fresh = [item for item in flatten_outputs(result) if item is not None]
    return sum(
        item.untyped_storage().nbytes() - TensorType.of(item).num_bytes
        for item in fresh
        if item.untyped_storage()._cdata not in given
    )


@pytest.mark.filterwarnings("ignore")
def test_all_oversized_operations_are_declared():
    found = set()
    for op in registered_ops():
        if schema_of(op.target).is_view:
            continue
        for case in op.samples(Sampler()):
            try:
                excess = excess_bytes(op.target, case)
            except (RuntimeError, NotImplementedError):  # no kernel for this dtype; test_rules says which
                continue
            if excess > 0:
                found.add(op.target)
    assert found == OVERSIZED


@pytest.mark.parametrize("target", sorted(OVERSIZED, key=str), ids=str)
def test_the_compact_form_is_exact_and_small(target):
    (op,) = [item for item in registered_ops() if item.target is target]
    for case in op.samples(Sampler()):
        found = compact(operation_of(target))(*case.args, **case.kwargs)
        assert torch.equal(found, target(*case.args, **case.kwargs))
        assert found.untyped_storage().nbytes() == found.nbytes
