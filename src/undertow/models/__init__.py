"""The zoo: well-known networks as plain modules, with what is needed to train them on random data.

`ZOO` has each network at its published size, `SMALL` the same architectures at sizes that train in milliseconds. The
modules import only torch and know nothing of Undertow: they are examples of users' models. The caller sets seeds.

    entry = ZOO["lenet5"]
    model = entry.build()
    loss = entry.loss(model(*entry.example_inputs(8)), *entry.example_targets(8))
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from undertow.models.alexnet import alexnet
from undertow.models.gpt import char_gpt, gpt
from undertow.models.lenet import lenet5, lenet300
from undertow.models.lstm import lstm
from undertow.models.mlp import mlp
from undertow.models.resnet import resnet18_small, resnet50
from undertow.models.unet import unet
from undertow.models.vgg import vgg16, vgg_small

__all__ = [
    "SMALL",
    "ZOO",
    "ZooModel",
    "alexnet",
    "char_gpt",
    "gpt",
    "lenet300",
    "lenet5",
    "lstm",
    "mlp",
    "resnet18_small",
    "resnet50",
    "unet",
    "vgg16",
    "vgg_small",
]


class Draw(Protocol):
    """Draws random tensors for a batch from `generator`, or from torch's default one."""

    def __call__(self, batch: int, generator: torch.Generator | None = None) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class ZooModel:
    """One network of the zoo: `loss(build()(*example_inputs(batch)), *example_targets(batch))` can be trained.

    `build` takes the sizes as keywords; the examples fit the model that it builds without keywords.
    """

    name: str
    build: Callable[..., nn.Module]
    example_inputs: Draw
    example_targets: Draw
    loss: Callable[..., torch.Tensor] = cross_entropy


def normal(*shape: int) -> Draw:
    """Examples of this shape, each element from N(0, 1)."""
    return lambda batch, generator=None: (torch.randn(batch, *shape, generator=generator),)


def classes(count: int, *shape: int) -> Draw:
    """Examples of this shape, each element a class in [0, count)."""
    return lambda batch, generator=None: (torch.randint(count, (batch, *shape), generator=generator),)


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits (batch, length, vocabulary) over all tokens (batch, length)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


ZOO = {
    entry.name: entry
    for entry in (
        ZooModel("mlp", mlp, normal(784), classes(10)),
        ZooModel("lenet300", lenet300, normal(1, 28, 28), classes(10)),
        ZooModel("lenet5", lenet5, normal(1, 28, 28), classes(10)),
        ZooModel("alexnet", alexnet, normal(3, 224, 224), classes(1000)),
        ZooModel("vgg16", vgg16, normal(3, 224, 224), classes(1000)),
        ZooModel("vgg_small", vgg_small, normal(3, 32, 32), classes(10)),
        ZooModel("resnet50", resnet50, normal(3, 224, 224), classes(1000)),
        ZooModel("resnet18_small", resnet18_small, normal(3, 32, 32), classes(10)),
        ZooModel("unet", unet, normal(1, 256, 256), classes(2, 256, 256)),
        # A quarter of the context, so that a step of a few sequences takes seconds on a CPU.
        ZooModel("gpt", gpt, classes(50257, 256), classes(50257, 256), token_loss),
        ZooModel("char_gpt", char_gpt, classes(65, 64), classes(65, 64), token_loss),
        # Zaremba et al. unroll to a length of 35.
        ZooModel("lstm", lstm, classes(10000, 35), classes(10000, 35), token_loss),
    )
}

SMALL = {
    entry.name: entry
    for entry in (
        ZooModel("mlp", partial(mlp, (16, 32, 32, 10)), normal(16), classes(10)),
        ZOO["lenet300"],
        ZOO["lenet5"],
        ZooModel(
            "alexnet",
            partial(alexnet, num_classes=10, channels=(8, 16, 24, 24, 16), hidden=32, image_size=64),
            normal(3, 64, 64),
            classes(10),
        ),
        ZooModel(
            "vgg16",
            partial(vgg16, num_classes=10, width=4, hidden=32, image_size=32),
            normal(3, 32, 32),
            classes(10),
        ),
        ZooModel("vgg_small", partial(vgg_small, width=4, hidden=32, image_size=16), normal(3, 16, 16), classes(10)),
        ZooModel(
            "resnet50", partial(resnet50, num_classes=10, width=4, depths=(1, 2, 1, 1)), normal(3, 64, 64), classes(10)
        ),
        ZooModel("resnet18_small", partial(resnet18_small, width=4, depths=(1, 2, 1)), normal(3, 16, 16), classes(10)),
        ZooModel("unet", partial(unet, width=4, depth=2), normal(1, 32, 32), classes(2, 32, 32)),
        ZooModel(
            "gpt",
            partial(gpt, num_layers=2, num_heads=4, width=64, vocabulary=97, context=32),
            classes(97, 24),
            classes(97, 24),
            token_loss,
        ),
        ZooModel(
            "char_gpt",
            partial(char_gpt, vocabulary=17, context=16, num_layers=1, width=32),
            classes(17, 16),
            classes(17, 16),
            token_loss,
        ),
        ZooModel("lstm", partial(lstm, vocabulary=97, width=32), classes(97, 12), classes(97, 12), token_loss),
    )
}
