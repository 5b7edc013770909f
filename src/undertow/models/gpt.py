"""GPT-2 (Radford, Wu, Child, Luan, Amodei & Sutskever, "Language models are unsupervised multitask learners", 2019), a
transformer decoder (Vaswani et al., NeurIPS 2017) with a norm before each part: 124,439,808 parameters when smallest.

In: token ids (batch, length), length <= context. Out: logits of the next token (batch, length, vocabulary).
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention: each position sees itself and the positions before it."""

    def __init__(self, num_heads: int, width: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4).unbind()
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, num_heads: int, width: int, dropout: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(num_heads, width, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expansion = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        y = F.gelu(self.expansion(self.norm2(x)), approximate="tanh")
        return x + self.dropout(self.projection(y))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a last norm, and an output layer that shares the token embedding."""

    def __init__(self, num_layers: int, num_heads: int, width: int, vocabulary: int, context: int, dropout: float):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(num_heads, width, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(num_layers)

    def _initialise(self, num_layers: int) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                # Two projections per layer add to the residual stream; the scale stops its variance growing with depth.
                scale = 1 / math.sqrt(2 * num_layers) if "projection" in name else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt(
    num_layers: int = 12,
    num_heads: int | None = None,
    width: int = 768,
    vocabulary: int = 50257,
    context: int = 1024,
    dropout: float = 0.1,
) -> GPT:
    """GPT-2 small by default; without `num_heads`, heads are 64 wide, as in all sizes of the paper."""
    if num_heads is None:
        num_heads = width // 64
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"gpt: width must be a multiple of num_heads; found width {width} and {num_heads} heads")
    return GPT(num_layers, num_heads, width, vocabulary, context, dropout)


def char_gpt(
    vocabulary: int = 65, context: int = 64, num_layers: int = 4, width: int = 128, dropout: float = 0.1
) -> GPT:
    """A GPT for single characters that trains on a CPU; the usual Shakespeare sample has 65 characters."""
    return gpt(num_layers, 4, width, vocabulary, context, dropout)
