"""Custom autograd Functions as opaque operations.

Recording would look inside `Function.forward` and lose its `backward`. While a capture is under way, `Function.apply`
is therefore replaced (for the capturing thread; others pass through) by one that records a single node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from undertow.ir import OpaqueType, Value
from undertow.ops.modes import autocast_state
from undertow.ops.opaque import CustomFunction, OriginalApply, gradients_through_autograd
from undertow.ops.schema import flatten_outputs

if TYPE_CHECKING:
    from undertow.capture.recorder import CaptureRecorder


@contextmanager
def opaque_functions(recorder: CaptureRecorder) -> Iterator[None]:
    """Record calls of custom Functions as single nodes."""
    thread = threading.get_ident()
    previous = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or cls is _Opaque:
            return previous.__func__(cls, *args, **kwargs)
        return _record_function(recorder, cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = previous  # type: ignore[method-assign]


def _record_function(recorder: CaptureRecorder, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    if function.__name__ == "CheckpointFunction":
        recorder.refuse("torch.utils.checkpoint with use_reentrant=True", "use use_reentrant=False")
    is_grad_enabled = torch.is_grad_enabled()
    requires_grad = tuple(is_grad_enabled and isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    with _disable_current_modes():
        fake_args, result = _run_on_fakes(recorder, function, args, requires_grad)
        fakes = flatten_outputs(result)
        context_type = _context_type(fakes)
        plain = [None if fake is None else fake.detach() for fake in fakes]
        has_gradient = _find_gradients(recorder, fake_args, fakes, requires_grad)
    target = CustomFunction(function, requires_grad, has_gradient, autocast_state())
    values = recorder.emit(target, recorder._values(args), {}, fakes)
    if any(requires_grad):
        context = Value(recorder.names.unique("context"), context_type)
        recorder.append_output(context)
    written = {id(fake): arg for fake, arg in zip(fake_args, args, strict=True) if isinstance(arg, torch.Tensor)}
    outputs: list[Any] = []
    for value, fake, plain_fake in zip(values, fakes, plain, strict=True):
        if value is None or plain_fake is None:
            outputs.append(None)
        elif id(fake) in written:
            recorder.write(recorder.traced(written[id(fake)]), value, plain_fake)
            outputs.append(written[id(fake)])
        else:
            outputs.append(recorder.adopt(plain_fake, value))
    flags = [fake is not None and fake.requires_grad for fake in fakes]
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    connected = _Opaque.apply(recorder, function.__name__, outputs, flags, *tensors)
    if isinstance(result, torch.Tensor):
        return connected[0]
    return type(result)(connected) if type(result) in (tuple, list) else tuple(connected)


def _run_on_fakes(
    recorder: CaptureRecorder, function: type[torch.autograd.Function], args: tuple[Any, ...], requires_grad: Any
) -> tuple[list[Any], Any]:
    fakes = []
    for arg, needs in zip(args, requires_grad, strict=True):
        if isinstance(arg, torch.Tensor):
            fake = recorder.traced(arg).fake.detach().requires_grad_(needs)
            arg = fake.view_as(fake) if needs else fake
        fakes.append(arg)
    try:
        with recorder.on_fakes():
            return fakes, OriginalApply(function, *fakes)
    except Exception:
        # The forward of a Function may do what only real tensors can (NumPy, foreign kernels): then it is run on them.
        reals = recorder.evaluate_arguments(args)
        with torch.enable_grad():
            leaves = [
                real.detach().requires_grad_(needs) if isinstance(real, torch.Tensor) else real
                for real, needs in zip(reals, requires_grad, strict=True)
            ]
            result = OriginalApply(function, *leaves)
        fake_of = recorder.fake_like
        if isinstance(result, torch.Tensor):
            return fakes, fake_of(result)
        return fakes, tuple(fake_of(item) if isinstance(item, torch.Tensor) else item for item in result)


def _find_gradients(recorder: CaptureRecorder, args: list[Any], outputs: list[Any], requires_grad: Any) -> Any:
    """Which arguments the Function's backward gives a gradient, from running it on fake tensors."""
    leaves = [arg for arg, needs in zip(args, requires_grad, strict=True) if needs]
    try:
        with recorder.on_fakes():
            cts = [None if out is None else torch.ones_like(out) for out in outputs]
            found = iter(gradients_through_autograd(outputs, leaves, cts) if leaves else ())
    except Exception:
        return requires_grad  # its backward needs real tensors; a None it returns then counts as zeros
    return tuple(needs and next(found) is not None for needs in requires_grad)


def _context_type(fakes: list[Any]) -> OpaqueType:
    saved: dict[int, int] = {}
    for fake in fakes:
        for tensor in getattr(getattr(fake, "grad_fn", None), "saved_tensors", ()):
            if isinstance(tensor, torch.Tensor):
                saved[id(tensor)] = tensor.numel() * tensor.element_size()
    return OpaqueType("context", sum(saved.values()))


class _Opaque(torch.autograd.Function):
    """Gives the outputs of an opaque Function the autograd history that decides what requires a gradient."""

    @staticmethod
    def forward(ctx: Any, recorder: Any, name: str, outputs: list[Any], flags: list[bool], *tensors: Any) -> Any:
        ctx.recorder, ctx.name = recorder, name
        ctx.mark_non_differentiable(*(out for out, flag in zip(outputs, flags, strict=True) if not flag and out is not None))
        ctx.mark_dirty(*(out for out in outputs if any(out is tensor for tensor in tensors)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *cts: Any) -> Any:
        ctx.recorder.refuse(
            f"torch.autograd.grad through the custom Function {ctx.name} inside the recorded code",
            "write its derivative in ordinary operations",
        )


