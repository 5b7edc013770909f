"""The definition of a step in shards, as a plain PyTorch loop: what every division over ranks must give, bit for bit.

It shares no code with Undertow but the seeds of shards and the blocks of the clipped norm, which are definitions.
"""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from undertow.api.sharding import shard_seed
from undertow.ops.clipping import clip_in_blocks


def add_up(terms):
    """The sum in the order of the tree: the left part is the largest power of two below the length."""
    if len(terms) == 1:
        return terms[0]
    middle = 1
    while middle * 2 < len(terms):
        middle *= 2
    return add_up(terms[:middle]) + add_up(terms[middle:])


def cut(num_examples, num_shards):
    sizes = [num_examples // num_shards + (shard < num_examples % num_shards) for shard in range(num_shards)]
    return [slice(sum(sizes[:shard]), sum(sizes[: shard + 1])) for shard in range(num_shards)]


def train_plainly(model, loss, optimizer, batches, num_shards, *, seed=0, clip_norm=None, accumulate=1):
    """Train on batches of (args, targets); the losses."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    parameters = [item for item in model.parameters() if item.requires_grad]
    losses, total = [], {}
    for step, (args, targets) in enumerate(batches):
        num_examples = len(args[0])
        running = [(norm.running_mean.clone(), norm.running_var.clone(), norm.momentum) for norm in norms]
        gradients, terms, statistics = [], [], []
        for shard, part in enumerate(cut(num_examples, num_shards)):
            share = (part.stop - part.start) / num_examples
            torch.manual_seed(shard_seed(seed, step, shard))
            for norm in norms:
                norm.running_mean.zero_()
                norm.running_var.zero_()
                norm.momentum = 1.0
            found = loss(model(*(item[part] for item in args)), *(item[part] for item in targets))
            found.backward(torch.tensor(share, dtype=found.dtype))
            terms.append(share * found.detach())
            gradients.append([item.grad for item in parameters])
            statistics.append([(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms])
            model.zero_grad(set_to_none=True)
        for norm, (mean, variance, momentum), *found in zip(norms, running, *statistics, strict=True):
            norm.momentum = momentum
            for shard_mean, shard_variance in found:
                mean = momentum * shard_mean + (1 - momentum) * mean
                variance = momentum * shard_variance + (1 - momentum) * variance
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
        for item, *found in zip(parameters, *gradients, strict=True):
            if found[0] is not None:
                summed = add_up(found)
                total[item] = total[item] + summed if item in total else summed
        losses.append(add_up(terms))
        if (step + 1) % accumulate == 0:
            for item, gradient in total.items():
                item.grad = gradient
            if clip_norm is not None:
                clip_in_blocks(parameters, clip_norm)
            optimizer.step()
            model.zero_grad(set_to_none=True)
            total = {}
    return losses
