"""Where in the user's code an operation comes from: read off the Python stack."""

from __future__ import annotations

import os
import sys
import traceback
from functools import lru_cache
from types import CodeType, FrameType

import torch

from undertow.ir import Origin
from undertow.torch_internals import call_module

_TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_STANDARD_FOLDER = os.path.dirname(os.__file__) + os.sep
_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep
_COMMAND_FOLDER = os.path.join(_OWN_FOLDER, "cli") + os.sep
_MODELS_FOLDER = os.path.join(_OWN_FOLDER, "models") + os.sep
_MODULE_CALL: CodeType = call_module.__code__


def current_origin(module_paths: dict[int, str]) -> Origin:
    """The innermost line outside PyTorch and Undertow, and the path of the innermost module being called.

    What calls the command line is not the user's code, though it lies outside of both: the search ends there.
    """
    frame: FrameType | None = sys._getframe(1)
    file, line, path = "", 0, None
    while frame is not None and (path is None or not file):
        code = frame.f_code
        if code.co_filename.startswith(_COMMAND_FOLDER):
            break
        if path is None and code is _MODULE_CALL:
            path = module_paths.get(id(frame.f_locals["self"]))
        if not file and is_users(code.co_filename):
            file, line = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return origin_at(path or "", file, line)


@lru_cache(maxsize=1 << 14)
def origin_at(module_path: str, file: str, line: int, derived_from: str = "") -> Origin:
    """One object for equal origins: every length of a sequence records the same ones."""
    return Origin(module_path, file, line, derived_from)


@lru_cache(maxsize=1 << 12)
def is_users(filename: str) -> bool:
    """Whether a file is the user's: not PyTorch's, Python's or Undertow's. The zoo counts as the user's."""
    if filename.startswith((_TORCH_FOLDER, "<")):
        return False
    if filename.startswith(_STANDARD_FOLDER) and "site-packages" not in filename:
        return False
    return not filename.startswith(_OWN_FOLDER) or filename.startswith(_MODELS_FOLDER)


def place_of(error: BaseException) -> str:
    """The innermost line of the user's code that an error went through."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else "an unknown line"
