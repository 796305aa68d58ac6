"""The one place where NKI kernels are reached.

``call(plan.kernel, name, ...)`` runs the kernel ``name`` or, where the plan says so, its plain-torch counterpart.
A kernel is imported and wrapped at its first call, and wrapped once: every wrap registers a new kernel, and graphs name
kernels by their number.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from . import plain

_MODULES = {
    "gathered_attn": "sparse_attn",
    "gathered_attn_idx": "sparse_attn",
    "weighted_scores": "index_score",
    "softmax_pool": "compress_pool",
}


def call(name: str, *args: Any, on_device: bool) -> torch.Tensor:
    """Run kernel ``name``, or its plain-torch counterpart unless ``on_device``; the same arguments in the same order.

    Tensors are handed to a kernel in order and without gaps: that is all a kernel knows of its operands.
    """
    if not on_device:
        return getattr(plain, name)(*args)  # type: ignore[no-any-return]
    ordered = (arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
    return _wrapped(name)(*ordered)  # type: ignore[no-any-return]


@functools.cache
def _wrapped(name: str) -> Any:
    try:
        from torch_neuronx.nki_hop import wrap_nki  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise RuntimeError(
            f"deepinfer_ops: NKI kernel {name}: expected torch_neuronx.nki_hop to be importable, got {error!r}. "
            "DEEPINFER_NEURON_NKI_ATTN=0 runs attention without NKI kernels."
        ) from error
    module = importlib.import_module(f"deepinfer_ops.nki.{_MODULES[name]}")
    return wrap_nki(getattr(module, name))
