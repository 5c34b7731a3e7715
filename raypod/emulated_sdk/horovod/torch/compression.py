"""Compression of tensors for the way (contract section 8): none, or float16."""

from __future__ import annotations

from typing import Optional, Tuple

import torch


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.dtype]]:
        """The tensor to send, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Optional[torch.dtype]) -> torch.Tensor:
        """The tensor as the caller expects it."""
        return tensor


class FP16Compressor:
    """Sends floating point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.dtype]]:
        """The tensor to send, and its own dtype."""
        return (tensor.to(torch.float16), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Optional[torch.dtype]) -> torch.Tensor:
        """The tensor in its own dtype again."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The choices for the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
