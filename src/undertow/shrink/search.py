"""The search for the smallest file that is good enough, round by round.

In: a trained model, a trainer, a judge on validation data. Out: the bytes of the best file. A round of pruning leaves a
share of the weights and retrains; as long as the network is good enough the next one goes on from there, otherwise the
same is tried with a larger share. Then rounds of sharing allow more and more error of the outputs, each from the same
pruned network, retraining the shared values. A round depends on the state before it and on nothing else, so a killed
search repeats its round and ends in the same bytes. Test data plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from undertow.coding.small_file import pack_small_file
from undertow.coding.tensors import CodedTensor
from undertow.ops.projection import Masks
from undertow.shrink.network import SharedNetwork, write_back
from undertow.shrink.norms import fold_norms
from undertow.shrink.pruning import choose_again, find_prunable, keep_all
from undertow.shrink.retraining import Between, Trainer
from undertow.shrink.sensitivity import measure_prices, on_grid, without_smallest
from undertow.shrink.settings import Settings
from undertow.shrink.sharing import Prices, share
from undertow.shrink.state import DONE, PRUNE, SHARE, Pruned, State

_LEAST_STEP = 0.9  # pruning ends when less than a tenth of what is left may go
_SURGERIES = 30  # a round of pruning changes its masks so often at most
_FALLING, _CHOOSING = 0.5, 0.7  # shares of a round: the masks shrink, and they are chosen again
_MAX_PRUNED = 3  # networks that are gone back to
_MAX_TRIES = 3
_WIDENING = 2.0  # of the allowed error, from one round of sharing to the next
_MAX_DISTORTION = 4.0
_SHARED_RATE = 0.1  # of the learning rate: a step of a shared value moves all of its weights


@dataclass(eq=False)
class Search:
    """`judge()` gives the model's score on validation data, higher is better; `floor` is the least that will do.

    `run()` gives the model's outputs for the batch that sensitivities are measured on.
    """

    model: nn.Module
    trainer: Trainer
    settings: Settings
    judge: Callable[[], float]
    run: Callable[[], Any]
    floor: float
    metadata: dict[str, Any]
    say: Callable[[str], None] = lambda line: None
    _masks: Masks | None = None  # the same in all rounds, so that their step is planned once

    def run_round(self, state: State) -> None:
        """Run one round, and change the state by what it found."""
        self.trainer.costs = dict(state.costs)
        if not state.pruned:
            first = Pruned(_clone(self.model.state_dict()), keep_all(find_prunable(self.model)), 1.0, state.dense_score)
            state.pruned = [first]
        if state.kind == PRUNE:
            self._prune(state)
        else:
            self._share(state)
        state.epoch += self.settings.epochs
        state.costs = dict(self.trainer.costs)

    def _prune(self, state: State) -> None:
        start = state.pruned[0]
        if not start.kept:
            state.kind = SHARE
            return
        self._load(start)
        parameters = find_prunable(self.model)
        num_weights = sum(item.numel() for item in parameters.values())
        num_before = sum(int(mask.count_nonzero()) for mask in start.kept.values())
        num_wanted = max(int(num_before * state.factor), len(parameters))
        prices = measure_prices(self.run, parameters, without_smallest(0.3))
        if self._masks is None:
            self._masks = Masks(self.model, start.kept)
        masks, last = self._masks, 0
        masks.begin(start.kept)

        def choose(done: float, optimizer: torch.optim.Optimizer) -> None:
            nonlocal last
            number = int(done * _SURGERIES)
            if number == last or done > _CHOOSING:
                return
            last = number
            share_left = state.factor ** min(number / (_SURGERIES * _FALLING), 1.0)
            choose_again(masks, prices, max(int(num_before * share_left), num_wanted), optimizer)

        trained = [item for item in self.model.parameters() if item.is_floating_point() and item.numel()]
        self._train(state, self.model, trained, self.settings.lr, masks, choose)
        masks.project()
        num_kept = sum(int(mask.count_nonzero()) for mask in masks.kept.values())
        score, density = self.judge(), num_kept / num_weights
        is_good = score >= self.floor and num_kept < num_before
        self._note(state, {"kind": PRUNE, "kept": density, "score": score, "is_good": is_good})
        if is_good:
            found = Pruned(_clone(self.model.state_dict()), _clone(masks.kept), density, score)
            state.pruned = [found, *state.pruned][:_MAX_PRUNED]
            return
        state.factor = math.sqrt(state.factor)
        if state.factor > _LEAST_STEP:
            state.kind = SHARE

    def _share(self, state: State) -> None:
        start, distortion = state.pruned[0], state.distortion
        self._load(start)
        fold_norms(self.model)
        parameters = {
            name: item for name, item in self.model.named_parameters() if item.is_floating_point() and item.numel()
        }
        prices = measure_prices(self.run, parameters, on_grid(8))
        num_kept = sum(int(item.count_nonzero()) for item in parameters.values())
        # With error = price * step^2 / 12 and d error / d bit = -2 ln 2 error, all errors add up to the distortion.
        bit_price = 2 * math.log(2) * distortion / max(num_kept, 1)
        kept = {**keep_all(parameters), **start.kept}
        coded = {name: share(item, kept[name], Prices(prices[name], bit_price)) for name, item in parameters.items()}
        network = SharedNetwork(self.model, coded).to(self.trainer.device)
        write_back(self.model, coded)
        score = self.judge()
        self._train(state, network, list(network.codebooks), self.settings.lr * _SHARED_RATE)
        trained = network.coded()
        write_back(self.model, trained)
        if (after := self.judge()) >= score:
            coded, score = trained, after
        else:
            write_back(self.model, coded)
        data = pack_model(self.model, coded, self.metadata, self.settings.coder)
        is_good = score >= self.floor
        about = {"kind": SHARE, "distortion": distortion, "bytes": len(data), "score": score, "is_good": is_good}
        self._note(state, about)
        is_nearer = not state.is_kept and (state.score is None or score > state.score)
        if (is_good and (not state.is_kept or len(data) < len(state.best))) or (not is_good and is_nearer):
            state.best, state.score, state.is_kept = data, score, is_good
        self._choose_distortion(state, is_good)

    def _choose_distortion(self, state: State, is_good: bool) -> None:
        """What the next round of sharing allows: more and more, then once the middle; less if nothing was good yet."""
        if is_good:
            state.low = state.distortion
            state.distortion *= _WIDENING if not state.num_refused else math.sqrt(_WIDENING)
            if state.num_refused or state.distortion > _MAX_DISTORTION:
                state.kind = DONE
            return
        state.num_refused += 1
        if state.low:
            state.distortion = math.sqrt(state.low * state.distortion)
            state.kind = SHARE if state.num_refused < 2 else DONE
        elif state.num_refused < _MAX_TRIES:
            state.distortion /= 4
        elif len(state.pruned) > 1:
            state.pruned, state.num_refused, state.distortion = state.pruned[1:], 0, State.distortion
        else:
            state.kind = DONE

    def _train(
        self,
        state: State,
        network: nn.Module,
        parameters: list[nn.Parameter],
        lr: float,
        masks: Masks | None = None,
        between: Between | None = None,
    ) -> None:
        first = state.epoch
        epochs = self.settings.epochs
        self.trainer.train(
            network, parameters, first_epoch=first, num_epochs=epochs, lr=lr, masks=masks, between=between
        )

    def _load(self, pruned: Pruned) -> None:
        self.model.load_state_dict(pruned.model)

    def _note(self, state: State, about: dict[str, Any]) -> None:
        state.history.append(about)
        what = f"{about['kept']:.2%} kept" if about["kind"] == PRUNE else f"{about['bytes']:,} bytes"
        verdict = "good enough" if about["is_good"] else "not good enough"
        self.say(f"round {len(state.history)}: {about['kind']}, {what}, score {about['score']:.4f}: {verdict}")


def pack_model(model: nn.Module, coded: Mapping[str, CodedTensor], metadata: dict[str, Any], coder: Any) -> bytes:
    """The bytes of the file: every parameter and buffer of the model, those that are coded as they are in `coded`."""
    first_names = {id(item): name for name, item in model.named_parameters()}
    tensors: dict[str, Tensor | CodedTensor] = {}
    equal: dict[Any, Tensor] = {}
    for name, item in model.state_dict(keep_vars=True).items():
        if not isinstance(item, Tensor):
            continue
        first = first_names.get(id(item), name)
        if first in coded:
            tensors[name] = coded[first]
        else:
            plain = item.detach().cpu().contiguous()
            # Statistics of folded norms are equal; the file has them once.
            key = plain.dtype, tuple(plain.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[name] = equal.setdefault(key, plain) if plain.numel() else plain
    return pack_small_file(tensors, metadata, coder)


def _clone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: item.detach().cpu().clone() for name, item in tensors.items() if isinstance(item, Tensor)}
