"""Undertow's own kernels as operations, and the nodes they may replace: one file per family, all registered here."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
