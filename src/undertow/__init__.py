"""Undertow: training with an explicit backward pass.

Public names are imported when they are first used: `undertow --help` must not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from undertow.errors import CallError as CallError
from undertow.errors import CaptureError as CaptureError
from undertow.errors import GradientCheckFailed as GradientCheckFailed
from undertow.errors import InfeasibleBudget as InfeasibleBudget
from undertow.errors import MissingRule as MissingRule
from undertow.errors import PlanError as PlanError
from undertow.errors import RankLost as RankLost
from undertow.errors import TooManyOutcomes as TooManyOutcomes
from undertow.errors import UndertowError as UndertowError
from undertow.errors import UnsupportedTorch as UnsupportedTorch
from undertow.version import __version__ as __version__

if TYPE_CHECKING:
    from undertow.api.buckets import buckets as buckets
    from undertow.api.checks import check_gradients as check_gradients
    from undertow.api.checks import numerical_gradient as numerical_gradient
    from undertow.api.functional import grad as grad
    from undertow.api.functional import hessian as hessian
    from undertow.api.functional import hvp as hvp
    from undertow.api.functional import value_and_grad as value_and_grad
    from undertow.api.functional import vjp as vjp
    from undertow.api.inspection import inspect as inspect
    from undertow.api.measuring import measure as measure
    from undertow.api.planning import plan as plan
    from undertow.api.saved_plans import load_plan as load_plan
    from undertow.api.saved_plans import save_plan as save_plan
    from undertow.api.traces import trace as trace
    from undertow.api.tradeoffs import largest_batch as largest_batch
    from undertow.api.tradeoffs import tradeoff as tradeoff
    from undertow.api.training import TrainStep as TrainStep
    from undertow.api.training import train_step as train_step
    from undertow.ir.plan import Plan as Plan
    from undertow.ops.projection import Masks as Masks
    from undertow.ranks.mesh import Mesh as Mesh
    from undertow.shrink.compressed import Compressed as Compressed
    from undertow.shrink.compressed import load_compressed as load_compressed
    from undertow.shrink.compressing import compress as compress
    from undertow.small.binary_layers import BinaryConv2d as BinaryConv2d
    from undertow.small.binary_layers import BinaryLinear as BinaryLinear
    from undertow.small.energy import estimate_energy as estimate_energy
    from undertow.small.quantising import code_model as code_model
    from undertow.small.running import run_small as run_small


_HOMES = {
    "BinaryConv2d": "small.binary_layers",
    "BinaryLinear": "small.binary_layers",
    "Compressed": "shrink.compressed",
    "Masks": "ops.projection",
    "Mesh": "ranks.mesh",
    "Plan": "ir.plan",
    "TrainStep": "api.training",
    "buckets": "api.buckets",
    "check_gradients": "api.checks",
    "code_model": "small.quantising",
    "compress": "shrink.compressing",
    "estimate_energy": "small.energy",
    "grad": "api.functional",
    "hessian": "api.functional",
    "hvp": "api.functional",
    "inspect": "api.inspection",
    "largest_batch": "api.tradeoffs",
    "load_compressed": "shrink.compressed",
    "load_plan": "api.saved_plans",
    "measure": "api.measuring",
    "numerical_gradient": "api.checks",
    "plan": "api.planning",
    "run_small": "small.running",
    "save_plan": "api.saved_plans",
    "trace": "api.traces",
    "tradeoff": "api.tradeoffs",
    "train_step": "api.training",
    "value_and_grad": "api.functional",
    "vjp": "api.functional",
}

# Written out: type checkers read it, and cannot run code.
__all__ = [
    "BinaryConv2d",
    "BinaryLinear",
    "CallError",
    "CaptureError",
    "Compressed",
    "GradientCheckFailed",
    "InfeasibleBudget",
    "Masks",
    "Mesh",
    "MissingRule",
    "Plan",
    "PlanError",
    "RankLost",
    "TooManyOutcomes",
    "TrainStep",
    "UndertowError",
    "UnsupportedTorch",
    "__version__",
    "buckets",
    "check_gradients",
    "code_model",
    "compress",
    "estimate_energy",
    "grad",
    "hessian",
    "hvp",
    "inspect",
    "largest_batch",
    "load_compressed",
    "load_plan",
    "measure",
    "numerical_gradient",
    "plan",
    "run_small",
    "save_plan",
    "trace",
    "tradeoff",
    "train_step",
    "value_and_grad",
    "vjp",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'undertow' has no attribute {name!r}")
    return getattr(import_module(f"undertow.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
