"""The operation registry: one record per operation whose derivative Undertow knows.

In: the other files of this folder, each calling `register(Op(...))` for its family. Out: `find_op(target)`.

A record has only what PyTorch does not know. Shapes, aliasing, randomness and flops come from PyTorch (`schema.py`,
`tracing.py`). A derivative is an ordinary Python function of tensors, written with ATen operations. On real tensors it
computes; under a recorder it becomes nodes of a Program. What it reads from the forward pass is kept for the backward
pass; nothing else declares that.

Formulas need not care about broadcasting: autodiff sums a cotangent to the shape of its value, then casts it to its
dtype, in the same order as eager PyTorch (`conform` in `autodiff/backward.py`). So a formula may return the broadcast
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from undertow.ir.out_overloads import mark_compared
from undertow.ir.schema import bind_arguments
from undertow.torch_internals import OpOverload

Cotangent = torch.Tensor | None
Formula = Callable[..., Any]


@dataclass(frozen=True)
class Vjp:
    """One formulation of an operation's derivative.

    `formulas` maps argument names to `formula(call, *cts)`, the cotangent of that argument: a tensor, None for "no
    contribution", or a list for a list of tensors. `joint(call, *cts)` is for kernels that make several cotangents
    together. It returns a mapping, or the cotangents in the order of `joint_arguments`; `call.wants(name)` tells it
    which are needed. The cotangent of an output that nothing depends on is None.
    """

    name: str
    formulas: dict[str, Formula] = field(default_factory=dict)
    joint: Formula | None = None
    joint_arguments: tuple[str, ...] = ()
    is_composed: bool = True  # all its operations have rules, so it can be differentiated again

    @property
    def arguments(self) -> tuple[str, ...]:
        """The argument names that can receive a cotangent."""
        return self.joint_arguments or tuple(self.formulas)

    def cotangents(self, call: Call, cts: Sequence[Cotangent]) -> dict[str, Any]:
        """The cotangent of every argument that `call` wants."""
        if self.joint is not None:
            made = self.joint(call, *cts)
            named = made if isinstance(made, dict) else dict(zip(self.joint_arguments, made, strict=True))
            return {name: ct for name, ct in named.items() if call.wants(name)}
        return {name: formula(call, *cts) for name, formula in self.formulas.items() if call.wants(name)}


def composed(**formulas: Formula) -> Vjp:
    """A formulation in ordinary operations, one formula per argument."""
    return Vjp("composed", formulas)


def composed_joint(*arguments: str, by: Formula) -> Vjp:
    """A formulation in ordinary operations that makes the cotangents of all `arguments`."""
    return Vjp("composed", joint=by, joint_arguments=arguments)


def fused(**formulas: Formula) -> Vjp:
    """A formulation through PyTorch's own backward kernels, one formula per argument."""
    return Vjp("fused", formulas, is_composed=False)


def fused_joint(*arguments: str, by: Formula) -> Vjp:
    """One backward kernel that makes the cotangents of all `arguments`."""
    return Vjp("fused", joint=by, joint_arguments=arguments, is_composed=False)


@dataclass(frozen=True)
class Op:
    """What Undertow knows about one operation in addition to PyTorch.

    The first formulation has eager's bits; the others are further ways to write the rule. An operation whose output
    never has a gradient has no formulation. `samples` makes example calls for the tests, which iterate the registry and
    compare every formulation with finite differences and with `torch.autograd`.
    """

    target: OpOverload
    vjps: tuple[Vjp, ...] = ()
    samples: Callable[[Sampler], list[Case]] = lambda draw: []
    devices: tuple[str, ...] = ("cpu", "cuda")  # where the operation exists

    @property
    def exact_vjp(self) -> Vjp:
        """The formulation whose bits are eager's."""
        return self.vjps[0]

    @property
    def composed_vjp(self) -> Vjp | None:
        """The formulation that can be differentiated again."""
        return next((vjp for vjp in self.vjps if vjp.is_composed), None)


@dataclass(frozen=True)
class Case:
    """One example call of an operation. If it is not smooth, it is not compared with finite differences."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_smooth: bool = True


def case(*args: Any, **kwargs: Any) -> Case:
    """An example call, written like the call itself."""
    return Case(args, kwargs)


def kink(*args: Any, **kwargs: Any) -> Case:
    """An example call at a tie, a boundary or in low precision: compared with `torch.autograd` only."""
    return Case(args, kwargs, is_smooth=False)


class Sampler:
    """Draws the arguments of example calls, in float64 and reproducibly."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        """Standard normal."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        """Uniform between `low` and `high`."""
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) * (high - low) + low

    def distinct(self, *shape: int) -> torch.Tensor:
        """Well-separated values in random order, none near zero: away from the kinks of max, abs, relu."""
        count = torch.Size(shape).numel()
        order = torch.randperm(count, generator=self._generator)
        return ((order.to(torch.float64) - count / 2 + 0.25) * (4.0 / max(count, 1))).reshape(shape)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Indices in [0, high)."""
        return torch.randint(high, shape, generator=self._generator)

    def booleans(self, *shape: int) -> torch.Tensor:
        """A random mask."""
        return torch.rand(shape, generator=self._generator) < 0.5


class Call:
    """One call of an operation as a formula sees it: arguments by schema name, outputs, and wanted cotangents."""

    def __init__(
        self, target: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Any], wanted: set[str]
    ) -> None:
        self._target = target
        self._arguments = bind_arguments(target, args, kwargs)
        self._wanted = wanted
        self.outs = tuple(outs)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._arguments[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def out(self) -> Any:
        """The first output."""
        return self.outs[0]

    def as_data(self) -> tuple[Any, ...]:
        """All that it holds."""
        return self._target, self._arguments, self.outs, tuple(sorted(self._wanted))

    def wants(self, name: str) -> bool:
        """Whether the cotangent of argument `name` is needed."""
        return name in self._wanted


_REGISTRY: dict[OpOverload, Op] = {}


def register(op: Op) -> Op:
    """Add the record of an operation, which must have none yet."""
    if op.target in _REGISTRY:
        raise ValueError(f"register: an operation can have one record; {op.target} has one already")
    _REGISTRY[op.target] = op
    mark_compared(op.target)
    return op


def find_op(target: Any) -> Op | None:
    """The record of `target`, or None if it has none."""
    return _REGISTRY.get(target)


def registered_ops(device: str = "cpu") -> tuple[Op, ...]:
    """The records of the operations that `device` has, in the order of their names."""
    return tuple(sorted((op for op in _REGISTRY.values() if device in op.devices), key=lambda op: str(op.target)))
