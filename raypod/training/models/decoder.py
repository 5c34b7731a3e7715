"""A GPT-2 style decoder in plain PyTorch: learned positions, pre-norm blocks, causal self-attention.

The output layer has its own weights, so that a pipeline can have it on another IPU than the embedding, unless they are
tied.
"""

from __future__ import annotations

import math
from typing import Any, Dict, NamedTuple, Optional

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
    "gpt2-medium": DecoderSize(24, 16, 1024),
    "gpt2-large": DecoderSize(36, 20, 1280),
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

    def forward(self, hidden: torch.Tensor, segments: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Map [n, length, width] to [n, length, width]. A token attends to its own of the `segments` [n, length]."""
        samples, length, width = hidden.shape
        split = self.qkv(hidden).reshape(samples, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(width // self.heads)
        places = torch.arange(length, device=hidden.device)
        is_hidden = places[None, :] > places[:, None]
        if segments is not None:
            is_hidden = is_hidden | (segments[:, None, :, None] != segments[:, None, None, :])
        # Not -inf, whose differences are NaN in half precision on the device: the smallest value is enough.
        scores = scores.masked_fill(is_hidden, torch.finfo(scores.dtype).min)
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

    def forward(self, hidden: torch.Tensor, segments: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Map [n, length, width] to [n, length, width]; `segments` are those of `Attention.forward`."""
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden), segments))
        wide = functional.gelu(self.up(self.norm2(hidden)))
        result: torch.Tensor = hidden + self.dropout(self.down(wide))
        return result


class TokenEmbedding(nn.Embedding):
    """The embedding of tokens, looked up in `parts` of the vocabulary one after the other."""

    def __init__(self, vocabulary: int, width: int, parts: int = 1) -> None:
        super().__init__(vocabulary, width)
        self.parts = parts

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens [n, length] to [n, length, width]."""
        if self.parts == 1:
            return super().forward(tokens)
        size, found = self.num_embeddings // self.parts, []
        for part, weight in enumerate(torch.split(self.weight, size)):
            places = tokens - part * size
            is_here = (places >= 0) & (places < size)
            found.append(functional.embedding(places * is_here, weight) * is_here.unsqueeze(-1).to(weight.dtype))
        total = found[0]
        for each in found[1:]:  # all but one are zero
            total = total + each
        return total


class Projection(nn.Linear):
    """An output layer without bias, whose product a device can compute in `parts` of its outputs.

    Attributes:
        product: computes the product of two matrices in place of torch, if it is not None.
    """

    def __init__(self, width: int, outputs: int, parts: int = 1) -> None:
        super().__init__(width, outputs, bias=False)
        self.parts = parts
        self.product: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, length, width] to [n, length, outputs]."""
        if self.product is None:
            return super().forward(hidden)
        found: torch.Tensor = self.product(hidden, self.weight.t())
        return found


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocabulary: int, width: int, length: int, dropout: float, parts: int = 1) -> None:
        super().__init__()
        self.tokens, self.places = TokenEmbedding(vocabulary, width, parts), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor, places: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Map tokens and their places [n, length] to [n, length, width]. Places count from 0 by default."""
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.tokens(tokens) + self.places(places)
        result: torch.Tensor = self.dropout(embedded)
        return result


class Decoder(nn.Module):
    """A causal language model.

    Args:
        size: one of `SIZES`.
        vocabulary: number of different tokens, a multiple of `parts`.
        length: the longest sequence.
        dropout: probability, of embeddings, attention weights and residual branches.
        is_tied: the output layer has the weights of the embedding.
        parts: in which the output layer and an embedding of its own are computed.
    """

    def __init__(
        self,
        size: DecoderSize,
        vocabulary: int,
        length: int,
        dropout: float = 0.0,
        is_tied: bool = False,
        parts: int = 1,
    ) -> None:
        super().__init__()
        # A tied embedding is one operator: PopART merges its gradient with that of the output layer.
        self.embedding = Embedding(vocabulary, size.width, length, dropout, 1 if is_tied else parts)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = Projection(size.width, vocabulary, parts)
        self.apply(_initialize)
        if is_tied:
            self.head.weight = self.embedding.tokens.weight
        for block in self.blocks:  # GPT-2: residual branches are scaled by the depth
            for layer in (block.attention.out, block.down):  # type: ignore[union-attr]
                nn.init.normal_(layer.weight, std=_STD / math.sqrt(2 * size.layers))  # type: ignore[arg-type, union-attr, unused-ignore]

    def forward(
        self, tokens: torch.Tensor, segments: Optional[torch.Tensor] = None, places: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Map tokens [n, length] to logits [n, length, vocabulary].

        Args:
            tokens: integers [n, length].
            segments: of each token, integers [n, length]: it attends to those before it with the same one. None: all.
            places: of each token in its sequence, integers [n, length]. None: those in the window.
        """
        hidden = self.embedding(tokens, places)
        for block in self.blocks:
            hidden = block(hidden, segments)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
