"""Puts the compositions on Neuron's dispatch key, and makes compiled graphs see through the operators.

``torch_neuronx`` renames PrivateUse1 to "neuron". The key's own name works before and after that, so nothing here needs
torch_neuronx, and the order of imports does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode

from ..library import OPS
from .flash_mla_decode import flash_mla_decode
from .paged_mqa_logits import paged_mqa_logits
from .settings_guard import guard_settings
from .softmax_pool import softmax_pool

BACKEND = "neuron"

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
"""Kept out of a composition: under autocast its fp32 logits would become bf16 ones."""

COMPOSITIONS: dict[str, Callable[..., torch.Tensor]] = {
    "flash_mla_decode": flash_mla_decode,
    "paged_mqa_logits": paged_mqa_logits,
    "softmax_pool": softmax_pool,
}


def register() -> None:
    """Register every composition; called once, at import."""
    for op, composition in COMPOSITIONS.items():
        OPS.impl(op, functools.partial(_eager, op, composition), "PrivateUse1")
        name = f"deepinfer::{op}"
        torch.library.register_torch_dispatch(
            name, FunctionalTensorMode, functools.partial(_see_through, composition), lib=OPS
        )
        torch.library.register_torch_dispatch(name, FakeTensorMode, _fake, lib=OPS)


def _eager(op: str, composition: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """An eager call on a PrivateUse1 tensor. Whose backend that is, is only known when one has been named."""
    backend = torch._C._get_privateuse1_backend_name()
    if backend != BACKEND:
        raise RuntimeError(f"deepinfer::{op}: device: expected the PrivateUse1 backend {BACKEND}, got {backend}")
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return composition(*args, **kwargs)


def _see_through(
    composition: Callable[..., torch.Tensor],
    mode: FunctionalTensorMode,
    op: torch._ops.OpOverload,
    types: Sequence[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """AOT tracing: on Neuron the composition takes the operator's place in the graph, elsewhere it stays one node.

    The compiler cannot run an opaque operator, so leaving it in would fail, and late.
    """
    if not _on_neuron(args):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    with mode, torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return composition(*args, **(kwargs or {}))


def _fake(
    mode: FakeTensorMode,
    op: torch._ops.OpOverload,
    types: Sequence[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    """Dynamo runs the operator on fake tensors once, which is where a graph comes to depend on the settings."""
    if _on_neuron(args):
        guard_settings()
    return mode.__torch_dispatch__(op, types, args, kwargs or {})


def _on_neuron(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.device.type == BACKEND for arg in args)
