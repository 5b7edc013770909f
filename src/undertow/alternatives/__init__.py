"""Other ways to the same bits, for the planner to choose from. Importing this package registers them."""

import pkgutil
from importlib import import_module

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    import_module(_module.name)
