"""The layers of a model that have units to look at.

In: a model and a few of its inputs. Out: its convolutions, linear, recurrent and embedding layers in the order in which
a forward pass calls them. A unit is one output of a layer: a channel of a convolution, a feature of a linear layer, a
hidden state of a recurrent one. Its response is read after the batch normalisation that follows the layer, if one does,
and before the ReLU, which changes no order: normalisation with a negative weight would swap the strongest and the
weakest example.

Not seen: weights that are used without calling their module, such as those of `nn.MultiheadAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from undertow.look.inputs import Inputs
from undertow.torch_internals import BatchNormBase

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
NUM_TRIED = 2  # examples that the first, short look runs on

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class UnitLayer:
    """A layer. `reader` is the module whose output has its responses; None where its units do not see the examples."""

    path: str
    module: nn.Module
    reader: nn.Module | None
    num_units: int
    reads_input: bool  # it is the first layer: its weights belong to pixels or characters
    input_shape: Shape | None = None  # of an example's input, as it was before a linear layer's input was flattened

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self.module).__name__

    @property
    def is_embedding(self) -> bool:
        """Whether it has a vector for each token or position, and no units."""
        return isinstance(self.module, nn.Embedding)

    def responses(self, output: Any) -> torch.Tensor:
        """What its units say, as (example, unit, position), from the output of `reader`."""
        found = output[0] if isinstance(output, tuple) else output
        if isinstance(self.module, CONVOLUTIONS):
            return found.flatten(2)
        if isinstance(self.module, RECURRENT) and not self.module.batch_first:
            found = found.transpose(0, 1)
        return found.reshape(found.shape[0], -1, found.shape[-1]).transpose(1, 2)


def find_layers(model: nn.Module, inputs: Inputs) -> list[UnitLayer]:
    """The layers that a forward pass on a few examples calls; `model` is in eval() already."""
    inputs = inputs[:NUM_TRIED]
    paths = {module: path for path, module in model.named_modules()}
    found: dict[nn.Module, UnitLayer] = {}
    made: list[tuple[torch.Tensor, nn.Module]] = []  # held, so that no later tensor gets the same memory
    whole: list[torch.Tensor] = [inputs.picture]

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if module not in found and _has_units(module):
            source = None if given is None else _before_flattening(given, whole)
            layer = UnitLayer(paths[module], module, module, _count_units(module), _is_same(source, inputs.picture))
            if isinstance(module, nn.Linear) and source is not None and source.dim() >= 3:
                layer = replace(layer, input_shape=tuple(source.shape[1:]))
            if isinstance(module, nn.Embedding) or not _sees_examples(layer, output, len(inputs)):
                layer = replace(layer, reader=None)
            found[module] = layer
        if isinstance(module, BatchNormBase):
            for tensor, maker in made:
                if tensor is given and maker in found:
                    found[maker] = replace(found[maker], reader=module)
        if isinstance(output, torch.Tensor):
            made.append((output, module))
            whole.append(output)

    with _hooked(paths, watch), torch.no_grad():
        inputs.run(model)
    return list(found.values())


@contextmanager
def hooked(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    """`hook(module, args, output)` at every call of the module while inside."""
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _hooked(modules: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules if not list(module.children())]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _has_units(module: nn.Module) -> bool:
    return isinstance(module, (*CONVOLUTIONS, *RECURRENT, nn.Linear, nn.Embedding))


def _count_units(module: Any) -> int:
    if isinstance(module, RECURRENT):
        return (module.proj_size or module.hidden_size) * (2 if module.bidirectional else 1)
    names = ("out_channels", "out_features", "num_embeddings")
    return next(int(getattr(module, name)) for name in names if hasattr(module, name))


def _sees_examples(layer: UnitLayer, output: Any, num_inputs: int) -> bool:
    """Whether its output has one part per example, and a number per unit."""
    first = output[0] if isinstance(output, tuple) else output
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        return False
    responses = layer.responses(first)
    return responses.dim() == 3 and responses.shape[:2] == (num_inputs, layer.num_units)


def _is_same(source: torch.Tensor | None, inputs: torch.Tensor) -> bool:
    return source is not None and source.data_ptr() == inputs.data_ptr()


def _before_flattening(given: torch.Tensor, whole: list[torch.Tensor]) -> torch.Tensor:
    """The tensor with most dimensions that has the memory and the elements of `given`; in a linear layer's input they
    are in one row."""
    count = given.numel()
    same = [item for item in whole if item.data_ptr() == given.data_ptr() and item.numel() == count]
    return max((given, *same), key=lambda item: item.dim())
