"""Which dtypes cross the border of the device, and which it computes in (contract 2.2, 5)."""

from __future__ import annotations

from typing import Dict

import torch

# What a tensor becomes at the API, inputs and outputs alike.
API_DTYPE: Dict[torch.dtype, torch.dtype] = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float32,
}

# What the emulated device holds instead. CPU kernels for half are missing or slow, so it computes in float32; 32-bit
# integers are held in 64 bits, the only type that torch's losses and indexing take.
DEVICE_DTYPE: Dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float64: torch.float32,
    torch.int32: torch.int64,
}


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """A fresh copy with the device's dtype and nothing shared: its memory is aligned alike wherever the slice was."""
    # Vectorised kernels may round differently with another alignment, hence the copy even where a view would do.
    return tensor.detach().to(DEVICE_DTYPE.get(tensor.dtype, tensor.dtype), copy=True)
