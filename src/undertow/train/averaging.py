"""The exponential moving average of a run's weights, by `torch.optim.swa_utils`.

After each update, average = decay * average + (1 - decay) * weights; buffers are copied. Evaluation uses the average.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from undertow.train.checkpoint import NUM_AVERAGED, load_weights


class Average:
    """The average of a model's weights, as a model of its own."""

    def __init__(self, model: torch.nn.Module, decay: float) -> None:
        self._source = model
        self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))

    @property
    def model(self) -> torch.nn.Module:
        """The model with averaged weights."""
        found = self._averaged.module
        assert isinstance(found, torch.nn.Module)
        return found

    @property
    def num_bytes(self) -> int:
        """The memory that the average takes all the time."""
        return sum(tensor.nbytes for tensor in (*self._averaged.parameters(), *self._averaged.buffers()))

    def update(self) -> None:
        """Take in the weights after an update."""
        self._averaged.update_parameters(self._source)

    def state(self) -> dict[str, torch.Tensor]:
        """Its tensors, by name; `NUM_AVERAGED` is how many updates it has taken in."""
        return {**self.model.state_dict(), NUM_AVERAGED: self._averaged.n_averaged}

    def restore(self, state: Mapping[str, torch.Tensor], what: str) -> None:
        """Set it to what `state` gave; raises DataError if that is another model's."""
        load_weights(self.model, {name: item for name, item in state.items() if name != NUM_AVERAGED}, what)
        if NUM_AVERAGED in state:
            self._averaged.n_averaged.copy_(state[NUM_AVERAGED])
