"""Custom autograd Functions as opaque operations.

Recording would look inside `Function.forward` and lose its `backward`. So during a capture `Function.apply` is
replaced by a function that records a single node. Other threads still reach the original.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from undertow.ir import OpaqueType, Value
from undertow.ir.schema import flatten_outputs
from undertow.ops.looking_up import OWN_DERIVATIVES
from undertow.ops.modes import autocast_state
from undertow.ops.opaque import apply_function, custom_function, gradients_through_autograd
from undertow.torch_internals import BackwardHookFunction, disable_current_modes

if TYPE_CHECKING:
    from undertow.record.recorder import CaptureRecorder


@contextmanager
def opaque_functions(recorder: CaptureRecorder) -> Iterator[None]:
    """Record calls of custom Functions as single nodes."""
    thread = threading.get_ident()
    previous = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        # PyTorch's own wrapper around an operation of ours, which has a rule: it is recorded as that operation.
        is_own = cls.__name__.startswith(OWN_DERIVATIVES)
        if threading.get_ident() != thread or cls is _Opaque or is_own:
            return previous.__get__(None, cls)(*args, **kwargs)
        return _record_function(recorder, cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = previous  # type: ignore[method-assign]


def _record_function(recorder: CaptureRecorder, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    if function.__name__ == "CheckpointFunction":
        recorder.refuse("torch.utils.checkpoint with use_reentrant=True", "use use_reentrant=False")
    if function is BackwardHookFunction:
        recorder.refuse("a backward hook of a module", "hook a parameter instead, or remove it before planning")
    is_grad_enabled = torch.is_grad_enabled()
    requires_grad = tuple(is_grad_enabled and isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with disable_current_modes():
        inputs, result = _run_once(recorder, function, args, requires_grad)
        tried = flatten_outputs(result)
        context_type = _context_type(inputs, tried)
        has_gradient = _find_gradients(recorder, inputs, tried, requires_grad)
        flags = [output is not None and output.requires_grad for output in tried]
        fakes = [None if output is None else recorder.fake_like(output).detach() for output in tried]
    written = {id(given): arg for given, arg in zip(inputs, args, strict=True) if isinstance(arg, torch.Tensor)}
    is_dirty = any(id(output) in written for output in tried)
    target = custom_function(function.__name__, requires_grad, tuple(has_gradient), autocast_state(), is_dirty)
    live = recorder.name_live(function.__name__, function)
    values = recorder.emit(target, (live, *recorder.values_of(args)), {}, fakes)
    if any(requires_grad):
        recorder.append_output(Value(recorder.names.unique("context"), context_type))
    outputs: list[Any] = []
    for value, fake, output in zip(values, fakes, tried, strict=True):
        if value is None or fake is None:
            outputs.append(None)
        elif id(output) in written:
            recorder.write(recorder.traced(written[id(output)]), value, fake)
            outputs.append(written[id(output)])
        else:
            outputs.append(recorder.adopt(fake, value))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    connected = _Opaque.apply(recorder, function.__name__, outputs, flags, *tensors)
    if isinstance(result, torch.Tensor):
        return connected[0]
    return type(result)(connected) if type(result) in (tuple, list) else tuple(connected)


def _run_once(
    recorder: CaptureRecorder, function: type[torch.autograd.Function], args: tuple[Any, ...], requires_grad: Any
) -> tuple[list[Any], Any]:
    """The arguments that it ran on, and what it returned: fake tensors, or real ones where it needs them."""
    try:
        with recorder.on_fakes():
            inputs = _make_inputs(recorder.fakes_of(args), requires_grad)
            return inputs, apply_function(function, *inputs)
    except Exception:
        # The forward of a Function may need real tensors: for NumPy, or for kernels of other libraries.
        with torch.enable_grad(), recorder.untraced():
            inputs = _make_inputs(recorder.evaluate_arguments(args), requires_grad)
            return inputs, apply_function(function, *inputs)


def _make_inputs(args: Any, requires_grad: Any) -> list[Any]:
    # Copies: a Function may write into its argument (mark_dirty), which autograd allows neither for leaves nor views.
    return [
        arg.detach().requires_grad_(needs).clone() if isinstance(arg, torch.Tensor) else arg
        for arg, needs in zip(args, requires_grad, strict=True)
    ]


def _find_gradients(recorder: CaptureRecorder, inputs: list[Any], outputs: list[Any], requires_grad: Any) -> Any:
    """Which arguments the Function's backward gives a gradient, from running it once."""
    sources = [given for given, needs in zip(inputs, requires_grad, strict=True) if needs]
    if any(given is output for given in sources for output in outputs):
        return requires_grad  # a written argument is its own output, and its value before that is gone
    try:
        with recorder.on_fakes() if recorder.is_fake(outputs) else recorder.untraced():
            cts = [None if output is None else torch.ones_like(output) for output in outputs]
            found = iter(gradients_through_autograd(outputs, sources, cts) if sources else ())
    except Exception:
        return requires_grad  # its backward needs real tensors; a None it returns then counts as zeros
    return tuple(needs and next(found) is not None for needs in requires_grad)


def _context_type(inputs: list[Any], outputs: list[Any]) -> OpaqueType:
    """The bytes that the Function saved, without its arguments and outputs, which are counted elsewhere."""
    known = {item.untyped_storage()._cdata for item in (*inputs, *outputs) if isinstance(item, torch.Tensor)}
    saved: dict[int, int] = {}
    for output in outputs:
        for tensor in getattr(getattr(output, "grad_fn", None), "saved_tensors", ()):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                saved[tensor.untyped_storage()._cdata] = tensor.numel() * tensor.element_size()
    return OpaqueType("context", sum(saved.values()))


class _Opaque(torch.autograd.Function):
    """Gives the outputs of an opaque Function the autograd history that decides what requires a gradient."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, name: str, outputs: list[Any], flags: list[bool], *tensors: Any) -> Any:
        ctx.recorder, ctx.name = recorder, name
        ctx.mark_non_differentiable(
            *(out for out, flag in zip(outputs, flags, strict=True) if not flag and out is not None)
        )
        ctx.mark_dirty(*(out for out in outputs if any(out is tensor for tensor in tensors)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        ctx.recorder.refuse(
            f"torch.autograd.grad through the custom Function {ctx.name} inside the recorded code",
            "write its derivative in ordinary operations",
        )
