"""The exponential moving average of a run's weights, by the formula of `torch.optim.swa_utils`.

After each update, average = decay * average + (1 - decay) * weights; the first one and buffers are copied. Evaluation
uses the average. `AveragedModel` itself would copy its count to the GPU at every update, and wait for that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from undertow.train.checkpoint import NUM_AVERAGED, load_weights

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Average:
    """The average of a model's weights, as a model of its own."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._source = model
        self.model = copy.deepcopy(model)
        self._average = get_ema_multi_avg_fn(decay)
        self._num_averaged = torch.tensor(0)  # on the CPU, wherever the model is

    @property
    def num_bytes(self) -> int:
        """The memory that the average takes all the time."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers(), self._num_averaged))

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        pairs: Pairs = [*zip(self.model.parameters(), self._source.parameters(), strict=True)]
        buffers: Pairs = [*zip(self.model.buffers(), self._source.buffers(), strict=True)]
        is_first = int(self._num_averaged) == 0
        by_type: dict[torch.dtype, Pairs] = {}
        for own, given in () if is_first else pairs:
            by_type.setdefault(own.dtype, []).append((own, given))
        for group in by_type.values():
            averages, weights = map(list, zip(*group, strict=True))
            self._average(averages, weights, 0)  # the formula has no use for the count
        for own, given in [*pairs, *buffers] if is_first else buffers:
            own.copy_(given)
        self._num_averaged += 1

    def state(self) -> dict[str, torch.Tensor]:
        """Its tensors, by name; `NUM_AVERAGED` is how many updates it has taken in."""
        return {**self.model.state_dict(), NUM_AVERAGED: self._num_averaged}

    def restore(self, state: Mapping[str, torch.Tensor], what: str) -> None:
        """Set it to what `state` gave; raises DataError if that is another model's."""
        load_weights(self.model, {name: item for name, item in state.items() if name != NUM_AVERAGED}, what)
        if NUM_AVERAGED in state:
            self._num_averaged.copy_(state[NUM_AVERAGED])
