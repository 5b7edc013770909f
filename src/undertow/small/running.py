"""`run_small`: a model that evaluates from coded weights, layer by layer in the form that was measured to be best.

In: a model, its tensors, coded or plain, and an example of its inputs. Out: a module with the same outputs, within the
rounding of sums, on the CPU. The example is evaluated once; where it reaches a linear or convolutional layer whose
weight is coded, all forms that hold this weight are timed on the layer's own input, in turns with the dense layer, and
the fastest stays, or the smallest. What is chosen for one batch gives the same outputs for all, if not as fast.

Layers of other kinds, subclasses, and layers whose weight the model reads itself get their dense weights.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from undertow.coding.tensors import CodedTensor
from undertow.errors import CallError
from undertow.kernels.compiler import HAS_NUMBA
from undertow.small.binary_layers import BinaryConv2d, BinaryLinear
from undertow.small.layers import Layer, SmallLayer, window_of

if HAS_NUMBA:
    from undertow.small.bit_layers import BitLayer, fits
    from undertow.small.packed_layers import PackedLayer, bits_for
    from undertow.small.sparse_layers import SparseLayer

Prefer = Literal["time", "memory"]
_KINDS = (nn.Linear, nn.Conv2d, BinaryLinear, BinaryConv2d)
_REPEATS = 9
_LAYER_S = 1.0  # a layer that takes long is timed less often


@dataclass(frozen=True)
class LayerChoice:
    """What was measured for a layer, on the example, and what it will run as."""

    name: str
    form: str  # "dense" or a form of `forms`
    input_shape: tuple[int, ...]
    dense_us: float
    dense_bytes: int
    forms: dict[str, tuple[float, int]]  # microseconds, and bytes of the weight, by form

    @property
    def speedup(self) -> float:
        """How many times as fast as dense."""
        return 1.0 if self.form == "dense" else self.dense_us / self.forms[self.form][0]


class SmallModel(nn.Module):
    """A model that evaluates from small forms; `choices` says in which each layer does."""

    def __init__(self, model: nn.Module, choices: Sequence[LayerChoice]) -> None:
        super().__init__()
        self.model = model
        self.choices = list(choices)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> SmallModel:
        """Refused: small forms are for evaluation."""
        if mode:
            raise CallError("a model from run_small evaluates only; train the model that it was made from")
        return super().train(False)


def run_small(
    model: nn.Module,
    tensors: Mapping[str, Tensor | CodedTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    prefer: Prefer = "time",
) -> SmallModel:
    """A copy of `model` that evaluates from `tensors`, whose names are those of its state; others stay as they are.

    `args` and `kwargs` are an example. `prefer="memory"` takes the smallest form of each weight, not the fastest.
    """
    if not isinstance(args, tuple):
        raise CallError(f"run_small: args is a tuple of the model's inputs; found {type(args).__name__}")
    if prefer not in ("time", "memory"):
        raise CallError(f"run_small: prefer is 'time' or 'memory'; found {prefer!r}")
    copied = copy.deepcopy(model).eval()
    _load(copied, tensors)
    choices = _measure(copied, tensors, args, kwargs or {}, prefer) if HAS_NUMBA else {}
    for layer, choice in choices.items():
        if choice.form != "dense":
            tensor = tensors[_weight_of(choice.name)]
            assert isinstance(tensor, CodedTensor)
            _replace(copied, layer, _make_form(layer, tensor, choice.form))
    return SmallModel(copied, list(choices.values()))


def _weight_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _load(model: nn.Module, tensors: Mapping[str, Tensor | CodedTensor]) -> None:
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name not in state:
            raise CallError(f"run_small: the model has no parameter or buffer {name!r}")
        own = state[name]
        if tuple(own.shape) != tuple(tensor.shape) or own.dtype != tensor.dtype:
            raise CallError(
                f"run_small: {name} is {tuple(own.shape)} of {own.dtype} in the model, and {tuple(tensor.shape)} of "
                f"{tensor.dtype} among the tensors"
            )
        with torch.no_grad():
            own.copy_(tensor.dense() if isinstance(tensor, CodedTensor) else tensor)


def _forms_for(layer: Layer, tensor: CodedTensor) -> list[str]:
    """The forms that can hold a layer's weight and give its outputs."""
    if tensor.dtype is not torch.float32 or not tensor.num_kept or layer.weight.device.type != "cpu":
        return []
    if isinstance(layer, nn.Conv2d) and window_of(layer) is None:
        return []
    if isinstance(layer, BinaryLinear | BinaryConv2d):
        if layer.binary_inputs:
            return ["bits"] if fits(tensor) else []
        # Such a layer takes the signs of its weight and their mean magnitude; other tensors are not what it multiplies.
        return ["signs"] if fits(tensor) else []
    if tensor.mask is not None:
        return ["sparse"]
    num_bits = bits_for(tensor)
    return [] if num_bits is None else ["signs" if num_bits == 1 else f"int{num_bits}"]


def _make_form(layer: Layer, tensor: CodedTensor, form: str) -> SmallLayer:
    if form == "bits":
        assert isinstance(layer, BinaryLinear | BinaryConv2d)
        return BitLayer(layer, tensor)
    if form == "sparse":
        return SparseLayer(layer, tensor)
    return PackedLayer(layer, tensor, 1 if form == "signs" else int(form.removeprefix("int")))


def _measure(
    model: nn.Module,
    tensors: Mapping[str, Tensor | CodedTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prefer: Prefer,
) -> dict[Layer, LayerChoice]:
    """Every layer that the example reaches and that has other forms, timed on what it is given."""
    found: dict[Layer, LayerChoice] = {}
    hooks = []

    def watch(name: str, layer: Layer, tensor: CodedTensor, forms: list[str]) -> None:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if layer not in found and len(inputs) == 1 and _is_timed(inputs[0]):
                candidates = {form: _make_form(layer, tensor, form) for form in forms}
                found[layer] = _time_forms(name, layer, candidates, inputs[0], prefer)

        hooks.append(layer.register_forward_hook(hook))

    for name, layer in model.named_modules():
        tensor = tensors.get(_weight_of(name))
        if type(layer) in _KINDS and isinstance(layer, nn.Linear | nn.Conv2d) and isinstance(tensor, CodedTensor):
            forms = _forms_for(layer, tensor)
            if forms:
                watch(name, layer, tensor, forms)
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _is_timed(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _time_forms(name: str, layer: Layer, candidates: dict[str, SmallLayer], x: Tensor, prefer: Prefer) -> LayerChoice:
    modules: dict[str, nn.Module] = {"dense": layer, **candidates}
    times: dict[str, list[float]] = {form: [] for form in modules}
    # `forward` itself: a call would run the hook again.
    for module in modules.values():
        module.forward(x)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        for form, module in modules.items():
            start = time.perf_counter()
            module.forward(x)
            times[form].append(1e6 * (time.perf_counter() - start))
        if time.perf_counter() - began > _LAYER_S:
            break
    medians = {form: statistics.median(values) for form, values in times.items()}
    sizes = {"dense": layer.weight.nbytes, **{form: item.weight_bytes for form, item in candidates.items()}}
    ranks: Mapping[str, float] = medians if prefer == "time" else sizes
    return LayerChoice(
        name,
        min(ranks, key=lambda form: ranks[form]),
        tuple(x.shape),
        medians["dense"],
        sizes["dense"],
        {form: (medians[form], sizes[form]) for form in candidates},
    )


def _replace(model: nn.Module, layer: Layer, small: SmallLayer) -> None:
    """Put `small` everywhere where the model has `layer`."""
    for parent in model.modules():
        # named_children leaves out a second name of the same layer.
        for name, child in list(parent._modules.items()):
            if child is layer:
                setattr(parent, name, small)
