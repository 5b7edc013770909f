"""Undertow: training with an explicit backward pass."""

from undertow.api import plan as plan
