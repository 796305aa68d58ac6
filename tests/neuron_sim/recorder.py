"""What ran on the simulated device: aten calls with shapes, dtypes, index tensors and integer ranges, and kernels.

``with neuron_sim.record() as seen:`` collects; ``with neuron_sim.int32_only():`` makes every int64 result 32 bits wide.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from .gathers import IndexUse, base_name, index_uses

INT32 = torch.iinfo(torch.int32)
# Whose int32 results can exceed 32 bits; each is run again on 64-bit copies while a recorder is on.
_ARITHMETIC = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "addcmul", "sum", "cumsum", "prod", "cumprod", "square", "pow"),
    *(
        "bitwise_left_shift",
        "__lshift__",
        "__ilshift__",
        "mm",
        "bmm",
        "dot",
        "addmm",
        "scatter_add",
        "index_add",
        "scatter_reduce",
    ),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class OpCall:
    """One executed aten operator."""

    name: str
    overload: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    indices: tuple[IndexUse, ...]
    integers: tuple[int, int] | None
    """Smallest and largest value of the int32 and int64 results before any wrap to 32 bits, or None."""


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """One executed NKI kernel call. ``nan`` names the tensor arguments and results that held a NaN."""

    name: str
    tensors: dict[str, TensorInfo]
    constants: dict[str, Any]
    nan: tuple[str, ...]


@dataclasses.dataclass
class Recording:
    ops: list[OpCall] = dataclasses.field(default_factory=list)
    kernels: list[KernelCall] = dataclasses.field(default_factory=list)

    def names(self) -> set[str]:
        """Names of the operators that ran, without overload and in-place underscore."""
        return {call.name for call in self.ops}

    def indices(self) -> list[IndexUse]:
        return [use for call in self.ops for use in call.indices]

    def out_of_range(self) -> list[IndexUse]:
        """Index tensors that point outside their tables (such a call also raises)."""
        return [use for use in self.indices() if use.out_of_range.numel()]

    def overflows(self) -> list[OpCall]:
        """Calls with an integer result that does not fit 32 bits."""
        return [c for c in self.ops if c.integers and (c.integers[0] < INT32.min or c.integers[1] > INT32.max)]

    def nan_kernels(self) -> list[KernelCall]:
        """Kernel calls that received or produced a NaN."""
        return [call for call in self.kernels if call.nan]

    def largest_integer(self) -> int:
        """The largest magnitude of any integer result."""
        return max((max(-low, high) for low, high in (c.integers for c in self.ops if c.integers)), default=0)


_recordings: list[Recording] = []
_int32_depth: list[bool] = []


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Record every aten operator and kernel the simulated device executes inside the block, eager or compiled."""
    recording = Recording()
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)


@contextlib.contextmanager
def int32_only() -> Iterator[None]:
    """Wrap every int64 result to 32 bits: the device's compiler lowers int64 to int32."""
    _int32_depth.append(True)
    try:
        yield
    finally:
        _int32_depth.pop()


@dataclasses.dataclass
class Pending:
    """What has to be seen before a call, because the call may overwrite its own arguments."""

    op: torch._ops.OpOverload
    inputs: tuple[TensorInfo, ...] = ()
    indices: tuple[IndexUse, ...] = ()
    wide: Any = None
    """The result computed with 64-bit integers, where the call is 32-bit integer arithmetic."""


def before(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> Pending:
    """Called by the device with host tensors by schema name."""
    if not _recordings:
        return Pending(op)
    tensors = _tensors(list(arguments.values()))
    indices = tuple(dataclasses.replace(use, values=use.values.clone()) for use in index_uses(op, arguments))
    wide = None
    if base_name(op) in _ARITHMETIC and any(tensor.dtype == torch.int32 for tensor in tensors):
        wide = op(**{name: tree_map(_widened, value) for name, value in arguments.items()})
    return Pending(op, tuple(map(_info, tensors)), indices, wide)


def after(pending: Pending, result: Any) -> None:
    """Called by the device once the call has run."""
    op = pending.op
    if _recordings:
        integers = _integer_range(_tensors(result if pending.wide is None else pending.wide))
        outputs = tuple(map(_info, _tensors(result)))
        call = OpCall(base_name(op), op._overloadname, pending.inputs, outputs, pending.indices, integers)
        for recording in _recordings:
            recording.ops.append(call)
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
    if _int32_depth and not is_view:
        for tensor in _tensors(result):
            if tensor.dtype == torch.int64:
                tensor.copy_(tensor.to(torch.int32))


def kernel_executed(name: str, arguments: dict[str, Any], results: Any) -> None:
    """Called by the nki_hop stand-in after a kernel has run, with host tensors."""
    if not _recordings:
        return
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    constants = {key: value for key, value in arguments.items() if key not in tensors}
    results = {f"result {index}": value for index, value in enumerate(_tensors(results))}
    nan = tuple(key for key, value in (tensors | results).items() if _has_nan(value))
    call = KernelCall(name, {key: _info(value) for key, value in tensors.items()}, constants, nan)
    for recording in _recordings:
        recording.kernels.append(call)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _info(tensor: torch.Tensor) -> TensorInfo:
    return TensorInfo(tuple(tensor.shape), tensor.dtype)


def _widened(value: Any) -> Any:
    """A 64-bit copy of an int32 argument (tensor or dtype); a plain copy of every other tensor."""
    if isinstance(value, torch.Tensor):
        return value.long() if value.dtype == torch.int32 else value.clone()
    return torch.int64 if value is torch.int32 else value


def _integer_range(tensors: list[torch.Tensor]) -> tuple[int, int] | None:
    ranges = [t.aminmax() for t in tensors if t.dtype in (torch.int32, torch.int64) and t.numel()]
    if not ranges:
        return None
    return min(int(low) for low, _ in ranges), max(int(high) for _, high in ranges)


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.float().isnan().any())
