"""Device memory of the simulated Neuron: real PrivateUse1 tensors whose bytes lie where no CPU kernel can reach them.

A neuron tensor here is a plain ``torch.Tensor`` with the PrivateUse1 dispatch key, a storage of the right size whose
data pointer is null, and ordinary sizes, strides and offset. The bytes live in a CPU storage hung on the device
storage's Python object (``HOST``), so views share them and they are freed with the last view. Whoever takes the data
pointer at face value crashes at once instead of reading something plausible.

Why no tensor subclass: with ``__torch_dispatch__`` the dispatcher would stop at the Python key, an operator registered
for PrivateUse1 would not be reached, and torch.compile would trace a subclass no user of the real device has.
"""

from __future__ import annotations

import torch

HOST = "_neuron_sim_host"
POISON = 0xFF
"""Byte of unwritten memory: NaN in every float format, -1 in every signed integer."""

# The Meta kernels of these touch sizes, strides and storage bookkeeping only, never data, and keep the tensor's own
# dispatch keys. ``set_`` sizes the storage for the new geometry, which is the only allocator there is: a Python backend
# cannot register one with c10.
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_set_storage = torch.ops.aten.set_.source_Storage_storage_offset
_as_strided = torch.ops.aten.as_strided.default
_view_dtype = torch.ops.aten.view.dtype


def is_neuron(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "neuron"


def host_bytes(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The CPU storage that holds ``tensor``'s bytes."""
    host = getattr(tensor.untyped_storage(), HOST, None)
    if host is None:
        raise RuntimeError("neuron_sim: a neuron tensor without memory (was it made outside the simulated device?)")
    return host


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes: writing to it writes the device memory."""
    alias = torch.empty(0, dtype=tensor.dtype)
    return alias.set_(host_bytes(tensor), tensor.storage_offset(), tensor.size(), tensor.stride())


def strided(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A neuron tensor on ``base``'s storage with the dtype and geometry of the CPU tensor ``like``."""
    if base.dtype != like.dtype:
        whole = base.untyped_storage().nbytes() // base.dtype.itemsize
        flat = _as_strided.redispatch(_META, base, [whole], [1], 0)
        base = _view_dtype.redispatch(_META, flat, like.dtype)
    return _as_strided.redispatch(_META, base, list(like.shape), list(like.stride()), like.storage_offset())


def adopt(host: torch.Tensor) -> torch.Tensor:
    """A new neuron tensor that takes over the storage and geometry of a CPU tensor nobody else keeps."""
    storage = host.untyped_storage()
    device = torch._C._acc.create_empty_tensor((0,), host.dtype)
    _grow(device, storage.nbytes())
    device_storage = device.untyped_storage()
    setattr(device_storage, HOST, storage)
    # UntypedStorage's own deepcopy asks c10 for an allocator, which a Python backend does not have: a crash. The
    # closure holds the host storage only, so it makes no reference cycle.
    device_storage.__deepcopy__ = lambda memo: _copy_of(storage)
    return strided(device, host)


def _copy_of(host: torch.UntypedStorage) -> torch.UntypedStorage:
    return adopt(torch.empty(0, dtype=torch.uint8).set_(host.clone())).untyped_storage()


def set_(tensor: torch.Tensor, storage: torch.UntypedStorage, *geometry: object) -> torch.Tensor:
    """``tensor.set_(storage, offset, size, stride)``; without a geometry the tensor becomes flat over the storage."""
    nbytes = storage.nbytes()
    offset, size, stride = geometry or (0, [nbytes // tensor.dtype.itemsize], [1])
    result = _set_storage.redispatch(_META, tensor, storage, offset, size, stride)
    if storage.nbytes() != nbytes:  # the Meta kernel resizes the storage to exactly what the geometry needs
        _grow(strided(tensor, torch.empty(0, dtype=torch.uint8)), nbytes)
    return result


def regrow(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    """Give ``tensor`` the geometry that an operator such as ``resize_`` gave its host alias."""
    bytes_now = alias.untyped_storage().nbytes()
    if bytes_now > tensor.untyped_storage().nbytes():
        _grow(tensor, bytes_now)
    torch.ops.aten.as_strided_.default.redispatch(
        _META, tensor, list(alias.shape), list(alias.stride()), alias.storage_offset()
    )


def poison(host: torch.Tensor) -> None:
    """Fill what an allocation returned: a kernel that forgets to write a lane must not get zeros for free."""
    host.untyped_storage().fill_(POISON)


def _grow(tensor: torch.Tensor, nbytes: int) -> None:
    elements = nbytes // tensor.dtype.itemsize
    _set_storage.redispatch(_META, tensor, tensor.untyped_storage(), 0, [elements], [1])
