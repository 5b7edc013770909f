"""In: the words that name a model and its inputs. Out: the model and example inputs.

A model is a zoo name, `file.py:factory` or `package.module:factory`. The factory takes no arguments and returns a
module, or `(module, args)`, or `(module, args, kwargs)`. If it returns no inputs, they come from `--input`, or from a
function `example_inputs(batch)` in the same module.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from undertow.cli.busy_line import busy_line
from undertow.errors import CallError, UndertowError
from undertow.ir.structure import replace_tensors, tensors_in
from undertow.models import ZOO, ZooModel
from undertow.record.lazy_modules import refuse_lazy
from undertow.train.devices import choose_device, move_model

_OWN_FOLDER = str(Path(__file__).parents[1]) + os.sep
_MODELS_FOLDER = os.path.join(_OWN_FOLDER, "models") + os.sep
_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True)
class Subject:
    """A model and a call of it."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def describe_inputs(self) -> str:
        """`float32[8,3,224,224]`."""
        shapes = [
            f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
            for _, tensor in tensors_in((self.args, self.kwargs))
        ]
        return ", ".join(shapes) or "no inputs"


def load(name: str, batch: int | None, inputs: list[str], device: str = "cpu") -> Subject:
    """The model called `name`, with the given inputs or its own, on a device."""
    where = choose_device(device)
    subject = _load(name, batch, inputs)
    move_model(subject.model, where)
    args, kwargs = (replace_tensors(item, lambda tensor: tensor.to(where)) for item in (subject.args, subject.kwargs))
    return Subject(subject.model, args, kwargs)


def _load(name: str, batch: int | None, inputs: list[str]) -> Subject:
    if batch is not None and batch < 1:
        raise CallError(f"--batch {batch}: a batch holds at least one example")
    if batch is not None and inputs:
        raise CallError("--batch and --input cannot both be given: write the batch as the first size of the input")
    torch.manual_seed(0)  # so that two runs agree
    given = tuple(parse_input(text) for text in inputs)
    if ":" not in name:
        return _load_from_zoo(name, batch or 1, given)
    module, module_name, attribute = resolve(name)
    return _call_factory(module, module_name, attribute, batch, given)


def resolve(name: str) -> tuple[ModuleType, str, str]:
    """The module of `file.py:factory` or `package.module:factory`, its name there, and the factory's name."""
    module_name, _, attribute = name.rpartition(":")
    return load_module(module_name), module_name, attribute


def load_module(name: str) -> ModuleType:
    """The module of `file.py` or `package.module`."""
    return _load_file(Path(name)) if name.endswith(".py") else _import_module(name)


def parse_input(text: str) -> torch.Tensor:
    """A tensor from `8,3,224,224` or `8,128:int64`: normal numbers, or zeros where the dtype has no fractions."""
    sizes, _, dtype_name = text.partition(":")
    dtype = getattr(torch, dtype_name or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise CallError(
            f"--input {text}: {dtype_name!r} is not a dtype of torch; give for example float32, int64, bool"
        )
    if not re.fullmatch(r"[1-9][0-9]*(,[1-9][0-9]*)*", sizes):
        raise CallError(
            f"--input {text}: {sizes!r} is not a shape; write positive sizes with commas, such as 8,3,224,224"
        )
    shape = [int(size) for size in sizes.split(",")]
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


@contextmanager
def running(what: str) -> Iterator[None]:
    """Turn an error of the user's code into one line with its location; what that code prints goes to stderr."""
    try:
        with busy_line(), redirect_stdout(sys.stderr):
            yield
    except UndertowError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_asked_for_here(error):
            raise
        message = error.msg if isinstance(error, SyntaxError) else error
        raise CallError(f"{what}: {type(error).__name__}: {message}{_find_location(error)}") from error


def _is_asked_for_here(error: ModuleNotFoundError) -> bool:
    """Whether Undertow itself imports the missing module."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return frames[-1].filename.startswith(_OWN_FOLDER) and not frames[-1].filename.startswith(_MODELS_FOLDER)


def _find_location(error: BaseException) -> str:
    """The innermost line outside PyTorch and Undertow; for a syntax error, its line."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename or '').name}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_users(filename: str) -> bool:
    if filename.startswith((_TORCH_FOLDER, "<")):
        return False
    return not filename.startswith(_OWN_FOLDER) or filename.startswith(_MODELS_FOLDER)


def _load_from_zoo(name: str, batch: int, given: tuple[torch.Tensor, ...]) -> Subject:
    entry = find_in_zoo(name)
    return Subject(entry.build(), given or entry.example_inputs(batch), {})


def find_in_zoo(name: str) -> ZooModel:
    """The network of that name; raises CallError that lists the names."""
    if name.endswith(".py"):
        raise CallError(f"{name} names no factory: write {name}:factory, where factory() returns the model")
    if name not in ZOO:
        near = difflib.get_close_matches(name.lower(), ZOO, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]}? The" if near else "the"
        raise CallError(
            f"there is no model {name!r}: {advice} zoo has {', '.join(ZOO)}; "
            f"a model of your own is file.py:factory or package.module:factory"
        )
    return ZOO[name]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CallError(f"there is no file {path}" + ("" if path.is_absolute() else f" in {os.getcwd()}"))
    spec = importlib.util.spec_from_file_location(f"undertow_model_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when Python runs the file itself: it can import files of its folder, and its classes can be found by name.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[module.__name__] = module
    with running(f"{path} cannot be loaded"):
        spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        with running(f"module {name} cannot be imported"):
            return importlib.import_module(name)
    except CallError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and name.startswith(error.__cause__.name or name):
            raise CallError(
                f"there is no module {name!r}; a model is a zoo name, file.py:factory or package.module:factory"
            ) from None
        raise


def _call_factory(
    module: ModuleType, module_name: str, attribute: str, batch: int | None, given: tuple[torch.Tensor, ...]
) -> Subject:
    model, args, kwargs = make_model(module, module_name, attribute)
    if given:
        return Subject(model, given, {})
    if args is not None:
        if batch is not None:
            raise CallError(
                f"--batch {batch}: {attribute}() in {module_name} returns its own inputs; leave --batch out"
            )
        return Subject(model, args, kwargs or {})
    return Subject(model, _example_inputs(module, module_name, attribute, batch or 1), {})


def make_model(module: ModuleType, module_name: str, attribute: str) -> tuple[torch.nn.Module, Any, Any]:
    """The model that a factory returns, and its args and kwargs; None where it returns none."""
    made = call(module, module_name, attribute, "the model")
    parts = made if isinstance(made, tuple) else (made,)
    model, args, kwargs = (*parts, *(None, None, None)[len(parts) :])[:3]
    if not isinstance(model, torch.nn.Module) or len(parts) > 3 or not _is_call(args, kwargs):
        raise CallError(
            f"{attribute}() in {module_name} returned {describe(made)}: "
            f"it must return a module, (module, args) or (module, args, kwargs) with a tuple args and a dict kwargs"
        )
    refuse_lazy(dict(model.named_modules()))
    return model, args, kwargs


def find_function(module: ModuleType, module_name: str, attribute: str, what: str) -> Any:
    """The function of that name in a module."""
    found = getattr(module, attribute, None)
    if not callable(found):
        names = [name for name, item in vars(module).items() if callable(item) and not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=1)
        advice = f"; did you mean {near[0]}?" if near else f": write a function that returns {what}"
        raise CallError(f"{module_name} has no function {attribute!r}{advice}")
    return found


def call(module: ModuleType, module_name: str, attribute: str, what: str) -> Any:
    """What the function of that name in a module returns; a torch module of that name is returned itself."""
    factory = find_function(module, module_name, attribute, what)
    if isinstance(factory, torch.nn.Module):
        return factory
    with running(f"{attribute}() in {module_name} failed"):
        return factory()


def _example_inputs(module: ModuleType, module_name: str, attribute: str, batch: int) -> tuple[Any, ...]:
    examples = getattr(module, "example_inputs", None)
    if not callable(examples):
        raise CallError(
            f"{attribute}() in {module_name} returned a module without inputs: give --input 8,3,224,224, "
            f"or write example_inputs(batch) in the same file"
        )
    with running(f"example_inputs({batch}) in {module_name} failed"):
        made = examples(batch)
    if isinstance(made, torch.Tensor):
        return (made,)
    if not isinstance(made, tuple):
        raise CallError(f"example_inputs({batch}) in {module_name} returned {describe(made)}: it must return a tuple")
    return made


def _is_call(args: Any, kwargs: Any) -> bool:
    return (args is None or isinstance(args, tuple)) and (kwargs is None or isinstance(kwargs, dict))


def describe(item: Any) -> str:
    """The type of an object; for a tuple, the types of its items."""
    if isinstance(item, tuple):
        return f"({', '.join(type(part).__name__ for part in item)})"
    return type(item).__name__
