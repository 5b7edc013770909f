"""Undertow: training with an explicit backward pass."""

from undertow.api.checks import check_gradients as check_gradients
from undertow.api.checks import numerical_gradient as numerical_gradient
from undertow.api.functional import grad as grad
from undertow.api.functional import hessian as hessian
from undertow.api.functional import hvp as hvp
from undertow.api.functional import value_and_grad as value_and_grad
from undertow.api.functional import vjp as vjp
from undertow.api.planning import plan as plan
from undertow.api.traces import trace as trace
from undertow.errors import CallError as CallError
from undertow.errors import CaptureError as CaptureError
from undertow.errors import GradientCheckFailed as GradientCheckFailed
from undertow.errors import MissingRule as MissingRule
from undertow.errors import TooManyOutcomes as TooManyOutcomes
from undertow.errors import UndertowError as UndertowError
