"""``explain``: which route a call takes on Neuron, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import flash_mla_decode, paged_mqa_logits, softmax_pool
from .plans import Plan

_PLANS: dict[str, Callable[..., Plan]] = {
    "flash_mla_decode": flash_mla_decode.plan_call,
    "paged_mqa_logits": paged_mqa_logits.plan_call,
    "softmax_pool": softmax_pool.plan_call,
}


def explain(op: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Plan:
    """The route that a call takes on Neuron under the settings in force: nothing runs, on any machine.

    Args:
        op: ``"flash_mla_decode"``, ``"paged_mqa_logits"`` or ``"softmax_pool"``, or the operator or function itself.
        args, kwargs: the operator's arguments. Only shapes, strides, dtypes and hints are looked at, so tensors on
            ``device="meta"`` will do.

    Returns:
        A frozen record with the route, why it was taken, the kernel and its calls, sizes and costs. ``print`` shows it.

    Raises:
        RuntimeError: what the operator raises for these arguments.
        ValueError: an unknown operator.

    Example:
        >>> rows = torch.empty(64, 8, 512, device="meta")
        >>> print(explain("softmax_pool", rows, rows))
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op)).removesuffix(".default")
    if name not in _PLANS:
        raise ValueError(f"deepinfer_ops.neuron.explain: op: expected one of {', '.join(_PLANS)}, got {name}")
    return _PLANS[name](*args, **kwargs)
