"""The ``neuron`` device: PrivateUse1 renamed, and a fallback that executes every aten operator.

Only aten operators run here. An operator of another namespace without a PrivateUse1 kernel raises, as on the real
device: its CPU kernel is never tried. Operators that PyTorch composes from others (CompositeImplicitAutograd,
CompositeExplicitAutograd) are composed above this level, so what arrives is what a backend has to implement.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from . import recorder
from .gathers import base_name, check_indices
from .memory import adopt, host_alias, host_bytes, is_neuron, poison, regrow, set_, strided

_CPU = torch.device("cpu")
_ALLOCATIONS = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}
# ``torch.tensor(5, device="neuron")`` inside a trace makes a real tensor below the tracing modes. There a Python
# fallback fails inside PyTorch (it looks for a registration of the very operator), so what such code uses is registered
# by name.
_DIRECT = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten._copy_from.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.view.default,
    torch.ops.aten.fill_.Scalar,
)
_LIBRARIES: list[torch.library.Library] = []


class NeuronModule:
    """What PyTorch asks of ``torch.neuron``: one device, always there."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: object = None) -> None:
        """Execution is synchronous."""

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers come from the CPU generator."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


def setup() -> None:
    """Make the device exist; once per process, since PrivateUse1 can be renamed only once."""
    if _LIBRARIES:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("neuron", backend_module=NeuronModule())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    direct = torch.library.Library("aten", "IMPL")
    for op in _DIRECT:
        direct.impl(op, functools.partial(_run, op), "PrivateUse1")
    _LIBRARIES.extend((fallback, direct))


def to_host(value: Any) -> Any:
    """An argument as the host sees it: the alias of a neuron tensor, "cpu" for the device.

    A tensor of another device is refused, except for a 0-dim CPU scalar, which PyTorch lets meet any device.
    """
    if isinstance(value, torch.Tensor):
        if is_neuron(value):
            return host_alias(value)
        if value.dim() > 0:
            found = f"neuron:0 and {value.device}"
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {found}!"
            )
    if isinstance(value, list | tuple):
        return [to_host(item) for item in value]
    return _CPU if isinstance(value, torch.device) else value


def _run(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The PrivateUse1 fallback: run one aten operator on the bytes of its arguments."""
    if op.namespace not in ("aten", "prims"):
        raise NotImplementedError(
            f"Could not run '{op.name()}' with arguments from the 'neuron' backend: it has no PrivateUse1 kernel"
        )
    names = [argument.name for argument in op._schema.arguments]
    arguments = _numbers_as_tensors(op, dict(zip(names, args, strict=False)) | kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        if op is torch.ops.aten._copy_from.default:
            return _copy(op, arguments["self"], arguments["dst"])
        if base_name(op) == "set" and "source" in arguments and not is_neuron(arguments["source"]):
            return set_(*arguments.values())
        host = {name: to_host(value) for name, value in arguments.items()}
        check_indices(op, host)
        pending = recorder.before(op, host)
        result = op(**host)
        if op.overloadpacket.__name__ in _ALLOCATIONS:
            poison(result)
        recorder.after(pending, result)
        return _results(op, arguments, host, result)


def _numbers_as_tensors(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> dict[str, Any]:
    """Undo what boxing does to the 5 of ``x % 5``: the schema wants a tensor, the fallback is handed a number.

    Dtypes are chosen so that, as with PyTorch's own wrapped numbers, the number does not widen the tensor it meets.
    """
    dtypes = {value.dtype for value in arguments.values() if isinstance(value, torch.Tensor)}
    integer = next((dtype for dtype in dtypes if not dtype.is_floating_point and dtype != torch.bool), torch.int64)
    real = torch.float64 if torch.float64 in dtypes else torch.float32
    for argument in op._schema.arguments:
        value = arguments.get(argument.name)
        if isinstance(argument.type, torch.TensorType) and isinstance(value, bool | int | float):
            dtype = torch.bool if isinstance(value, bool) else integer if isinstance(value, int) else real
            arguments[argument.name] = torch.tensor(value, dtype=dtype)
    return arguments


def _copy(op: torch._ops.OpOverload, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """``_copy_from``: the one operator whose arguments may lie on two devices."""
    host_source = host_alias(source) if is_neuron(source) else source
    host_target = host_alias(target) if is_neuron(target) else target
    pending = recorder.before(op, {"self": host_source, "dst": host_target})
    on_device = is_neuron(source) and is_neuron(target) and source.dtype != target.dtype
    host_target.copy_(_trn2_values(host_source) if on_device else host_source)
    recorder.after(pending, host_target)
    return target


def _trn2_values(source: torch.Tensor) -> torch.Tensor:
    """What a conversion on the device reads: Trn2's e4m3 is IEEE-like, exponent field 15 is infinity or NaN."""
    if source.dtype != torch.float8_e4m3fn:
        return source
    values = source.float()
    magnitude = source.view(torch.uint8) & 0x7F
    values = values.masked_fill(magnitude > 0x78, torch.nan)
    return torch.where(magnitude == 0x78, torch.copysign(torch.tensor(torch.inf), values), values)


def _results(op: torch._ops.OpOverload, arguments: dict[str, Any], host: dict[str, Any], result: Any) -> Any:
    """Turn host results into device ones: written arguments are returned as themselves, aliases become views."""
    written: dict[str, str] = {}  # alias set of the schema -> argument name
    for argument in op._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.update((alias, argument.name) for alias in argument.alias_info.before_set)
            _follow_resize(arguments.get(argument.name), host.get(argument.name))
    owners = {
        host_bytes(tensor)._cdata: tensor for tensor in tree_leaves(list(arguments.values())) if is_neuron(tensor)
    }

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        owner = owners.get(value.untyped_storage()._cdata)
        return adopt(value) if owner is None else strided(owner, value)

    def one(value: Any, schema: Any) -> Any:
        if schema.alias_info is not None and schema.alias_info.is_write:
            return arguments[written[next(iter(schema.alias_info.before_set))]]
        return tree_map(wrap, value)

    returns = op._schema.returns
    if len(returns) == 1:
        return one(result, returns[0])
    return tuple(one(value, schema) for value, schema in zip(result, returns, strict=True)) or None


def _follow_resize(tensor: Any, alias: Any) -> None:
    """``resize_`` and ``out=`` may change a written tensor's geometry."""
    for device_side, host_side in zip(tree_leaves(tensor), tree_leaves(alias), strict=True):
        if is_neuron(device_side) and (
            device_side.shape != host_side.shape
            or device_side.stride() != host_side.stride()
            or device_side.storage_offset() != host_side.storage_offset()
        ):
            regrow(device_side, host_side)
