"""What is private to PyTorch and used by Undertow: all of it goes through this file.

Nobody promises that these names stay. All of them were found in PyTorch 2.11, 2.12, 2.13, 2.14 and 2.15, except where
a line says otherwise; `scripts/test --torch 2.15.0` tries one version. A new version is added to `NEWEST` when its
tests are green.

An older version is refused when this file is imported, which is when something of Undertow is first used. A newer one
gets one warning. If a name is missing, the error says which. What is heavy is imported when it is called for.

Attributes of PyTorch's objects (`overload._schema`, `parameter._backward_hooks`) are used where they are needed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from undertow.errors import UnsupportedTorch

OLDEST, NEWEST = (2, 11), (2, 15)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def release_of(version: str) -> tuple[int, int]:
    """`2.13.0+cpu` as (2, 13)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


if release_of(torch.__version__) < OLDEST:
    raise UnsupportedTorch(
        f"PyTorch {torch.__version__} is too old: Undertow works with {TESTED}; "
        f'install a newer one: pip install "torch>={OLDEST[0]}.{OLDEST[1]}"'
    )


@contextmanager
def _naming_what_is_missing() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorch(
            f"PyTorch {torch.__version__} lacks something private that Undertow needs ({error}); "
            f'it was tested with {TESTED}: pip install "torch=={NEWEST[0]}.{NEWEST[1]}.*"'
        ) from error


with _naming_what_is_missing():
    from torch import _foreach_copy_ as foreach_copy_
    from torch._C import DispatchKey, TensorBase
    from torch._C import TensorType as SchemaTensorType
    from torch._C import _AutoDispatchBelowADInplaceOrView as AutoDispatchBelowADInplaceOrView
    from torch._C import _autograd as c_autograd
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _DisableAutocast as DisableAutocast
    from torch._C import _disabled_torch_function_impl as disabled_torch_function
    from torch._C import _DisableTorchDispatch as DisableTorchDispatch
    from torch._C import _dispatch_has_kernel as has_kernel
    from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel_for_key
    from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_key_excluded
    from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled
    from torch._C import _nn as c_nn
    from torch._C import _profiler as c_profiler
    from torch._C import _select_conv_backend as select_conv_backend
    from torch._C import _SetExcludeDispatchKeyGuard as SetExcludeDispatchKeyGuard
    from torch._C import _storage_Use_Count as storage_use_count
    from torch._C import _VariableFunctions as VariableFunctions
    from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensor_hooks
    from torch._C._functorch import is_batchedtensor as is_mapped
    from torch._ops import OpOverload, OpOverloadPacket
    from torch._prims_common import suggest_memory_format
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
    from torch.nn.modules._functions import BackwardHookFunction
    from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
    from torch.optim.optimizer import _global_optimizer_post_hooks as global_step_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as global_step_pre_hooks
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import tree_map

    autograd_engine = torch.autograd.Variable._execution_engine
    call_module = torch.nn.Module._call_impl
    make_wrapper_tensor = torch.Tensor._make_wrapper_subclass

# The name under which FakeTensor logs.
FAKE_TENSOR_LOGGER = "torch._subclasses.fake_tensor"


@cache
def load_dynamo() -> Any:
    """The module of `torch.compile`, which PyTorch itself imports at the first recording; it takes a second."""
    with _naming_what_is_missing():
        import torch._compile
        import torch._dynamo.eval_frame

        return torch._dynamo


def is_compiled(model: Any) -> bool:
    """Whether a model was wrapped by `torch.compile`."""
    return isinstance(model, load_dynamo().eval_frame.OptimizedModule)


@cache
def dispatcher_files() -> tuple[str, ...]:
    """The Python files of PyTorch through which an operation called in a dispatch mode may pass."""
    load_dynamo()
    return torch._compile.__file__, torch._dynamo.eval_frame.__file__


def has_saved_tensor_hooks() -> bool:
    """Whether hooks on saved tensors are set for all code that runs here."""
    return top_saved_tensor_hooks(True) is not None  # also where a tracer would ignore them


def activation_memory_budget(share: float) -> Any:
    """A context in which `torch.compile` recomputes until this share of activations is kept."""
    with _naming_what_is_missing():
        import torch._functorch.config

        return torch._functorch.config.patch(activation_memory_budget=share)


def inductor_decompositions(further: tuple[Any, ...]) -> dict[Any, Callable[..., Any]]:
    """Operations as the smaller ones that Inductor takes them apart into, and those of `further`."""
    with _naming_what_is_missing():
        from torch._decomp import get_decompositions
        from torch._inductor import lowering  # noqa: F401  the decompositions use it without importing it
        from torch._inductor.decomposition import select_decomp_table

        return {**get_decompositions(further), **select_decomp_table()}


def inductor_compilers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Inductor's compilers of a graph: the whole one, and the inner one without AOTAutograd."""
    with _naming_what_is_missing():
        from torch._inductor import lowering  # noqa: F401  its decompositions use it without importing it
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        return compile_fx, compile_fx_inner


def can_inductor_fuse(overload: OpOverload) -> bool:
    """Whether Inductor writes the operation itself, and does not call PyTorch's kernel."""
    with _naming_what_is_missing():
        from torch._inductor.lowering import fallbacks, lowerings

        return overload in lowerings and overload not in fallbacks


def default_store() -> Any:
    """The store of the process group that the user's own code made."""
    with _naming_what_is_missing():
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()


def make_gloo_group(store: Any, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """A process group of gloo that listens on this address alone."""
    with _naming_what_is_missing():
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return ProcessGroupGloo(store, rank, size, options)


def make_nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group of NCCL for the current GPU, that leaves it to others to notice whether a rank is gone."""
    with _naming_what_is_missing():
        from torch.distributed import ProcessGroupNCCL

        # Read when the group is made; otherwise PyTorch ends the process when a peer is gone, and nobody says why.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)


if release_of(torch.__version__) > NEWEST:
    # Shown once: a module is imported once.
    warnings.warn(
        f"PyTorch {torch.__version__} is newer than those that Undertow was tested with ({TESTED}): what it needs is "
        f"there, but that bits are eager's and that budgets hold is not known",
        stacklevel=2,
    )

__all__ = [
    "FAKE_TENSOR_LOGGER",
    "NEWEST",
    "OLDEST",
    "TESTED",
    "AutoDispatchBelowADInplaceOrView",
    "BackwardHookFunction",
    "BatchNormBase",
    "DisableAutocast",
    "DisableTorchDispatch",
    "DispatchKey",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "SetExcludeDispatchKeyGuard",
    "TensorBase",
    "SchemaTensorType",
    "TorchDispatchMode",
    "VariableFunctions",
    "activation_memory_budget",
    "autograd_engine",
    "c_autograd",
    "c_nn",
    "c_profiler",
    "call_module",
    "can_inductor_fuse",
    "current_graph_task_id",
    "default_store",
    "disable_current_modes",
    "disabled_torch_function",
    "dispatcher_files",
    "foreach_copy_",
    "global_step_post_hooks",
    "global_step_pre_hooks",
    "has_kernel",
    "has_kernel_for_key",
    "inductor_compilers",
    "inductor_decompositions",
    "is_any_autocast_enabled",
    "is_compiled",
    "is_key_excluded",
    "is_mapped",
    "load_dynamo",
    "make_gloo_group",
    "make_nccl_group",
    "make_wrapper_tensor",
    "release_of",
    "select_conv_backend",
    "storage_use_count",
    "suggest_memory_format",
    "tree_map",
]
