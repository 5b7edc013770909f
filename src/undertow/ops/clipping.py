"""The norm of gradients by blocks of fixed size, and clipping to it.

In: parameters with gradients. Out: their norm, with the same bits however the gradients are divided over ranks, as long
as nobody divides a block. `torch.nn.utils.clip_grad_norm_` takes the norm of each gradient as one sum, whose last bit
depends on all of its elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

BLOCK = 4096  # elements


def block_norms(flat: torch.Tensor) -> torch.Tensor:
    """The norm of each block of a flat tensor; the last block may be shorter."""
    num_whole = flat.numel() // BLOCK * BLOCK
    norms = torch.linalg.vector_norm(flat[:num_whole].view(-1, BLOCK), dim=1)
    if num_whole == flat.numel():
        return norms
    return torch.cat([norms, torch.linalg.vector_norm(flat[num_whole:]).view(1)])


def norm_of_blocks(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norm of all gradients, by the norms of their blocks in order."""
    return torch.linalg.vector_norm(torch.cat(list(norms)))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as a flat view of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def clip_in_blocks(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm by blocks is at most `max_norm`; the norm before that."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = norm_of_blocks([block_norms(in_memory_order(gradient)) for gradient in gradients])
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return norm
