"""An LSTM language model (Hochreiter & Schmidhuber, "Long short-term memory", Neural Computation 9, 1997), regularised
and sized like the "medium" model of Zaremba, Sutskever & Vinyals ("Recurrent neural network regularization", 2014).

In: token ids (batch, length). Out: logits of the next token (batch, length, vocabulary).

Every sequence starts from a zero state; the paper carries the state from one batch to the next.
"""

import torch
from torch import nn


class LSTM(nn.Module):
    """An embedding, stacked LSTM layers, a linear layer; dropout on every connection but the recurrent ones."""

    def __init__(self, vocabulary: int, width: int, num_layers: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(dropout)
        # nn.LSTM applies dropout only between layers, and warns if there is one layer.
        between = dropout if num_layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, num_layers, batch_first=True, dropout=between)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        x, _ = self.lstm(x)
        return self.head(self.dropout(x))


def lstm(vocabulary: int = 10000, width: int = 650, num_layers: int = 2, dropout: float = 0.5) -> LSTM:
    """A language model over `vocabulary` tokens with `num_layers` LSTM layers of `width` units."""
    return LSTM(vocabulary, width, num_layers, dropout)
