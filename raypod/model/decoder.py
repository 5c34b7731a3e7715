"""A GPT-2 style decoder in plain PyTorch: learned positions, pre-norm blocks, causal self-attention.

The output layer has its own weights: a pipeline has it on another IPU than the embedding.
"""

from __future__ import annotations

import math
from typing import Dict, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class DecoderSize(NamedTuple):
    """The sizes of a decoder."""

    layers: int
    heads: int
    width: int


SIZES: Dict[str, DecoderSize] = {
    "tiny": DecoderSize(2, 4, 128),
    "small": DecoderSize(6, 6, 384),
    "gpt2": DecoderSize(12, 12, 768),
}
_STD = 0.02  # of initial weights, as GPT-2


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, size: DecoderSize, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to [n, length, width]."""
        samples, length, width = hidden.shape
        split = self.qkv(hidden).reshape(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width // self.heads)
        places = torch.arange(length, device=hidden.device)
        # Not -inf, whose differences are NaN in half precision on the device: the smallest value is enough.
        scores = scores.masked_fill(places[None, :] > places[:, None], torch.finfo(scores.dtype).min)
        weights = self.dropout(functional.softmax(scores, dim=-1))
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(samples, length, width)
        result: torch.Tensor = self.out(mixed)
        return result


class Block(nn.Module):
    """Attention and feed-forward layers with residual connections."""

    def __init__(self, size: DecoderSize, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size, dropout)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to [n, length, width]."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        wide = functional.gelu(self.up(self.norm2(hidden)))
        result: torch.Tensor = hidden + self.dropout(self.down(wide))
        return result


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [n, length] to [n, length, width]."""
        embedded = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        result: torch.Tensor = self.dropout(embedded)
        return result


class Decoder(nn.Module):
    """A causal language model.

    Args:
        size: one of `SIZES`.
        vocabulary: number of different tokens.
        length: the longest sequence.
        dropout: probability, of embeddings, attention weights and residual branches.
    """

    def __init__(self, size: DecoderSize, vocabulary: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = Embedding(vocabulary, size.width, length, dropout)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        self.apply(_initialize)
        for block in self.blocks:  # GPT-2: residual branches are scaled by the depth
            for layer in (block.attention.out, block.down):  # type: ignore[union-attr]
                nn.init.normal_(layer.weight, std=_STD / math.sqrt(2 * size.layers))  # type: ignore[arg-type, union-attr, unused-ignore]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [n, length] to logits [n, length, vocabulary]."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
