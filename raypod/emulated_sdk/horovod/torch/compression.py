"""Compression of tensors for the transfer: none, or float16."""

from __future__ import annotations

from typing import Optional, Tuple

import torch


class NoneCompressor:
    """Transfers tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.dtype]]:
        """Return the tensor to transfer, and the context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Optional[torch.dtype]) -> torch.Tensor:
        """Return the decompressed tensor."""
        return tensor


class FP16Compressor:
    """Transfers floating point tensors as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, torch.dtype]:
        """Return the tensor to transfer, and its original dtype."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(dtype=ctx) if ctx.is_floating_point else tensor


class Compression:
    """The values of the argument `compression`."""

    none = NoneCompressor
    fp16 = FP16Compressor
