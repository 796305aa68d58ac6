"""Which tensors of an aten call are indices, and how large the table is they point into.

On the device an index outside its table aborts a DMA, which can leave the device broken for every later program, so the
simulated device refuses the call. Negative indices are refused too: PyTorch counts them from the end, a DMA does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Arguments = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class IndexUse:
    """One index tensor of one executed call."""

    op: str
    values: torch.Tensor
    table: int
    """Number of rows the values may point at: 0 <= value < table."""

    @property
    def out_of_range(self) -> torch.Tensor:
        """The offending values, flat; empty if all is well."""
        flat = self.values.reshape(-1).long()
        return flat[(flat < 0) | (flat >= self.table)]


def _along_dim(table: str, index: str) -> Callable[[Arguments], list[tuple[torch.Tensor, int]]]:
    def pairs(arguments: Arguments) -> list[tuple[torch.Tensor, int]]:
        shape = arguments[table].shape
        return [(arguments[index], shape[arguments["dim"]] if shape else 1)]

    return pairs


def _advanced(arguments: Arguments) -> list[tuple[torch.Tensor, int]]:
    """``x[i, j]``: one index tensor or None per leading dimension; a boolean one spans as many as it has itself."""
    pairs, dim = [], 0
    for index in arguments["indices"]:
        if index is None:
            dim += 1
        elif index.dtype in (torch.bool, torch.uint8):
            dim += index.dim()
        else:
            pairs.append((index, arguments["self"].shape[dim]))
            dim += 1
    return pairs


_PAIRS: dict[str, Callable[[Arguments], list[tuple[torch.Tensor, int]]]] = {
    "index_select": _along_dim("self", "index"),
    "gather": _along_dim("self", "index"),
    "scatter": _along_dim("self", "index"),
    "scatter_add": _along_dim("self", "index"),
    "scatter_reduce": _along_dim("self", "index"),
    "index_add": _along_dim("self", "index"),
    "index_copy": _along_dim("self", "index"),
    "index_fill": _along_dim("self", "index"),
    "index_reduce": _along_dim("self", "index"),
    "embedding": lambda arguments: [(arguments["indices"], arguments["weight"].shape[0])],
    "take": lambda arguments: [(arguments["index"], arguments["self"].numel())],
    "put": lambda arguments: [(arguments["index"], arguments["self"].numel())],
    "index": _advanced,
    "_unsafe_index": _advanced,
    "index_put": _advanced,
    "_index_put_impl": _advanced,
    "_unsafe_index_put": _advanced,
}


def base_name(op: torch._ops.OpOverload) -> str:
    """The operator's name without overload and in-place underscore: ``aten.add_.Tensor`` and ``add.out`` are "add"."""
    name = op.overloadpacket.__name__
    if name.startswith("__"):
        return name
    return "copy" if name == "_copy_from" else name.removesuffix("_")


def index_uses(op: torch._ops.OpOverload, arguments: Arguments) -> list[IndexUse]:
    """Every index tensor of a call given by schema names, with host tensors."""
    name = base_name(op)
    if name not in _PAIRS:
        return []
    return [IndexUse(name, index, table) for index, table in _PAIRS[name](arguments)]


def check_indices(op: torch._ops.OpOverload, arguments: Arguments) -> None:
    for use in index_uses(op, arguments):
        wrong = use.out_of_range
        if wrong.numel():
            raise IndexError(
                f"neuron_sim: {use.op}: index {int(wrong[0])} reaches a table of {use.table} rows "
                f"({wrong.numel()} of {use.values.numel()} are outside); on the device the DMA aborts"
            )
