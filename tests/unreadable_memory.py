"""Tensors in memory pages that cannot be read: touching one byte of them is a segmentation fault."""

from __future__ import annotations

import ctypes
import mmap

import torch

_PROT_NONE = 0
_PAGES: list[mmap.mmap] = []


def extent(tensor: torch.Tensor) -> int:
    """Elements from the start of the storage to the last one the tensor can address."""
    if tensor.numel() == 0:
        return tensor.storage_offset()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + reach + 1


def unreadable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, dtype and ``requires_grad``, on pages of its own."""
    used = extent(tensor) * tensor.element_size()
    pages = mmap.mmap(-1, -(-max(1, used) // mmap.PAGESIZE) * mmap.PAGESIZE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    copy = memory[:used].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    protected = ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(pages)), _PROT_NONE)
    assert protected == 0
    _PAGES.append(pages)
    return copy.requires_grad_(tensor.requires_grad)
