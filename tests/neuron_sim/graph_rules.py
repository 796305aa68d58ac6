"""What the Neuron compiler does not take, checked on a traced graph (SPEC section 7): ``check`` lists the broken rules.

The rules:
    opaque-op       an operator the compiler does not know: anything but aten, prims and the NKI kernel call
    as-strided      wrong bytes under torch.compile
    data-dependent  nonzero, boolean indexing, reading a value: sizes or control that depend on data
    bitcast         ``view(dtype)`` of a computed tensor; see ``_bitcast`` for the two allowed forms
    float8          a float8 tensor that is not a graph input or an allowed bitcast about to be converted
    kernel-rows     a row count into an attention or score kernel that is not a power of two
    kernel-keys     a key count into such a kernel that is not a multiple of 128
    static          a size that is not a number
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Broken:
    rule: str
    node: str
    why: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.node}: {self.why}"


@dataclasses.dataclass(frozen=True)
class KernelSizes:
    """Where a kernel's row and key counts stand: (tensor argument, dimension)."""

    rows: tuple[str, int] | None
    keys: tuple[str, int] | None


KERNELS = {
    "gathered_attn": KernelSizes(rows=("mask_bias", 0), keys=("mask_bias", 1)),
    "gathered_attn_idx": KernelSizes(rows=("idx", 0), keys=("idx", 1)),
    "weighted_scores": KernelSizes(rows=("weights", 1), keys=("k", 0)),
    "softmax_pool": KernelSizes(rows=None, keys=None),
}
"""A kernel that is not listed is an error: nobody has said what its sizes are."""

_GATHERS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.gather.default}
_SAME = {aten.alias.default, aten.detach.default}  # AOTAutograd leaves a detach behind a dtype view in grad mode
# Move bytes or rename dimensions, compute nothing.
_SHAPE_ONLY = _SAME | {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default),
    *(aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims),
    *(aten.permute.default, aten.transpose.int, aten.expand.default, aten.split.Tensor, operator.getitem),
    *(aten.split_with_sizes.default, aten.unbind.int),
}
_CONVERSIONS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
_COMPACTING = {aten.masked_scatter.default, aten.nonzero_static.default}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default}


def check(graph: GraphModule, *, ignore: tuple[str, ...] = ()) -> list[Broken]:
    """Every broken rule of a graph as AOTAutograd hands it to a backend; empty if the compiler should take it."""
    return [
        Broken(rule, node.name, why)
        for module in graph.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        for rule, find in _RULES.items()
        if rule not in ignore and (why := find(node)) is not None
    ]


def kernel_name(node: Node) -> str:
    """The kernel that a ``nki_kernel_wrapper`` node calls."""
    from torch_neuronx.nki_hop import kernel_registry

    index = node.kwargs["kernel_idx"]
    if hasattr(kernel_registry, "name"):
        return kernel_registry.name(index)
    return kernel_registry.get_kernel(index).__name__


def kernel_nodes(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if _is_kernel(node)]


def dtypes(graph: GraphModule) -> set[torch.dtype]:
    """Every dtype of the graph, inputs included."""
    return {tensor.dtype for node in graph.graph.nodes for tensor in _tensors(node)}


def _is_kernel(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "nki_kernel_wrapper"


def _tensors(node: Node) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _value(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, Node) else node


def _opaque_op(node: Node) -> str | None:
    if node.op in ("call_module", "call_method"):
        return f"{node.op} of {node.target}"
    if node.op != "call_function" or _is_kernel(node) or node.target is operator.getitem:
        return None
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims"):
        return None
    return f"{node.target} is no aten operator"


def _as_strided(node: Node) -> str | None:
    return "as_strided" if getattr(node.target, "__name__", "").startswith("as_strided") else None


def _data_dependent(node: Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in _INDEXING:  # index.Tensor carries the tag for its boolean form only
        masks = [i for i in node.args[1] if i is not None and _value(i).dtype in (torch.bool, torch.uint8)]
        return "boolean indexing" if masks else None
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    if tags & set(node.target.tags) or node.target in _COMPACTING:
        return f"{node.target} depends on values, not only on shapes"
    return None


def _bitcast(node: Node) -> str | None:
    """Allowed: bytes that nothing has computed, contiguous, in one of two forms.

    uint8 gathered from a graph input (or the input's own bytes, for a cache decoded in place) -> float8_e4m3fn;
    a one-byte graph input, not gathered, as another one-byte dtype (a float8 or int8 query's bytes).
    """
    if node.target is not aten.view.dtype:
        return None
    source, target = _value(node.args[0]), node.args[1]
    if source.dtype == target:
        return None
    what = f"{_name(source.dtype)} -> {_name(target)}"
    if not source.is_contiguous():
        return f"{what} of a tensor that is not contiguous"
    origin, gathered = _origin(node.args[0])
    if origin.op != "placeholder":
        return f"{what} of a tensor computed by {origin.target}"
    if (source.dtype, target) == (torch.uint8, torch.float8_e4m3fn):
        return None
    if source.dtype.itemsize == target.itemsize == 1 and not gathered:
        return None
    return f"{what} of {'gathered' if gathered else 'input'} bytes"


def _origin(node: Node) -> tuple[Node, bool]:
    """Walk back over moves and gathers to where the values come from; whether a gather was on the way."""
    gathered = False
    while node.target in _SHAPE_ONLY | _GATHERS:
        gathered |= node.target in _GATHERS
        node = node.args[0]
    return node, gathered


def _float8(node: Node) -> str | None:
    if node.op in ("placeholder", "output") or not any("float8" in _name(t.dtype) for t in _tensors(node)):
        return None
    if node.target is not aten.view.dtype and node.target not in _SAME:
        return f"{node.target} gives a float8 tensor"
    wrong = [user.name for user in node.users if user.target not in _CONVERSIONS | _SAME]
    return f"a float8 tensor used by {', '.join(wrong)} without a conversion" if wrong else None


def _size(node: Node, what: str) -> tuple[int | None, str]:
    """A kernel node's row or key count and how it is called."""
    name = kernel_name(node)
    if name not in KERNELS:
        raise LookupError(f"kernel {name} is not in graph_rules.KERNELS")
    place = getattr(KERNELS[name], what)
    if place is None:
        return None, name
    argument, dim = place
    operands = dict(zip(node.kwargs["arg_names"], node.kwargs["args"], strict=True))
    return int(_value(operands[argument]).shape[dim]), f"{name}({argument}) has {{}} {what}"


def _kernel_rows(node: Node) -> str | None:
    size, text = _size(node, "rows") if _is_kernel(node) else (None, "")
    if size is None or (size > 0 and size & (size - 1) == 0):
        return None
    return text.format(size) + ", not a power of two"


def _kernel_keys(node: Node) -> str | None:
    size, text = _size(node, "keys") if _is_kernel(node) else (None, "")
    if size is None or (size > 0 and size % 128 == 0):
        return None
    return text.format(size) + ", not a multiple of 128"


def _static(node: Node) -> str | None:
    symbols = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.SymInt | torch.SymFloat)]
    symbols += [size for t in _tensors(node) for size in (*t.shape, *t.stride()) if isinstance(size, torch.SymInt)]
    return f"the size {symbols[0]} is symbolic" if symbols else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_RULES: dict[str, Callable[[Node], str | None]] = {
    "opaque-op": _opaque_op,
    "as-strided": _as_strided,
    "data-dependent": _data_dependent,
    "bitcast": _bitcast,
    "float8": _float8,
    "kernel-rows": _kernel_rows,
    "kernel-keys": _kernel_keys,
    "static": _static,
}
