"""nki.jit and nki.simulate: run a kernel on numpy arrays or torch tensors."""

import numpy as np

from . import dtypes, source_rules
from .cost import Trace
from .enums import MemoryRegion
from .errors import NkiValidationError
from .machine import Machine, running
from .memory import Storage
from .tensor import NkiTensor

_traces = []  # open `trace()` blocks, innermost last


class Kernel:
    """What @nki.jit returns. Calling it simulates it; kernel[lnc] takes one number, of which only 1 is modelled."""

    def __init__(self, function):
        self.function = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __getitem__(self, grid):
        grid = grid[0] if isinstance(grid, tuple) and len(grid) == 1 else grid
        if grid != 1:
            raise NkiValidationError(f"{self.__name__}[{grid!r}]: only one core (LNC=1) is simulated")
        return self

    def __call__(self, *args, **kwargs):
        if running():
            raise NkiValidationError(f"{self.__name__}: nested @nki.jit kernels are refused; leave helpers undecorated")
        return simulate(self)(*args, **kwargs)


def jit(fn=None, **kwargs):
    """Decorator: @nki.jit or @nki.jit(...). Compiling is not simulated, so calling the kernel runs it here."""
    if "platform_target" in kwargs:
        raise NkiValidationError("nki.jit: platform_target was removed; set NEURON_PLATFORM_TARGET_OVERRIDE")
    unknown = set(kwargs) - {"mode"}  # mode is accepted and ignored
    if unknown:
        raise NkiValidationError(f"nki.jit: unknown argument {unknown.pop()}")
    return Kernel if fn is None else Kernel(fn)


def simulate(kernel):
    """A callable that runs `kernel` (a Kernel or a plain function) on numpy arrays or torch tensors.

    Other arguments pass through as compile-time values. Every run is a fresh machine: nothing survives a call.
    """
    kernel = kernel if isinstance(kernel, Kernel) else Kernel(kernel)

    def run(*args, **kwargs):
        source_rules.check(kernel.function)
        trace = _traces[-1] if _traces else Trace()
        with Machine(trace) as machine:
            call = _Call(machine)
            bound = [call.take(value, f"argument {i}") for i, value in enumerate(args)]
            named = {key: call.take(value, key) for key, value in kwargs.items()}
            machine.instruction = kernel.__name__
            result = kernel.function(*bound, **named)
            machine.instruction = kernel.__name__
            return call.give(result)

    return run


class _Call:
    """Arguments in, results out: inputs are copied in, and written back if the kernel changed them."""

    def __init__(self, machine):
        self.machine = machine
        self.inputs = []  # (storage, the caller's array or tensor)
        self.torch = False

    def take(self, value, what):
        if isinstance(value, list):
            raise NkiValidationError(f"{what}: list arguments are refused; pass a tuple")
        if isinstance(value, tuple):
            return tuple(self.take(v, f"{what}[{i}]") for i, v in enumerate(value))
        if hasattr(value, "detach"):
            self.torch = True
            array, original = torch_to_numpy(value), value
        elif isinstance(value, np.ndarray):
            array, original = value, value
        else:
            return value
        dtype = dtypes.name_of(array.dtype, what)
        data = np.array(array, order="C").reshape(-1).view(np.uint8)
        storage = Storage(self.machine, array.shape, dtype, MemoryRegion.private_hbm, what, data)
        self.inputs.append((storage, original))
        return NkiTensor(array.shape, dtype, storage)

    def give(self, result):
        for storage, original in self.inputs:
            if storage.modified:
                self._write_back(storage, original)
        if isinstance(result, tuple):
            return tuple(self._output(value) for value in result)
        return self._output(result)

    def _write_back(self, storage, original):
        if isinstance(original, np.ndarray):
            original[...] = storage.data.view(original.dtype).reshape(original.shape)
        else:
            original.copy_(numpy_to_torch(storage.data.view(torch_to_numpy(original).dtype).reshape(storage.shape)))

    def _output(self, value):
        if value is None:
            return None
        if not isinstance(value, NkiTensor):
            self.machine.fail(f"returns {value!r}; a kernel returns tensors")
        if value.buffer is not MemoryRegion.shared_hbm and not value.storage.is_argument:
            self.machine.fail(f"output {value.name} is in {value.buffer.value}; outputs must be nl.shared_hbm")
        array = value.storage.array(value, value.offset).copy()
        array = array.astype(np.bool_) if value.dtype == "bool" else array
        return numpy_to_torch(array) if self.torch else array


# torch dtypes numpy does not know, by (torch name, numpy dtype): moved through an integer of the same width.
_TORCH = {
    "bfloat16": dtypes.NUMPY["bfloat16"],
    "float8_e4m3fn": dtypes.NUMPY["float8_e4m3fn"],
    "float8_e5m2": dtypes.NUMPY["float8_e5m2"],
    "float8_e8m0fnu": dtypes.NUMPY["float8_e8m0fnu"],
}


def torch_to_numpy(tensor):
    import torch

    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _TORCH:
        carrier = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return tensor.view(carrier).numpy().view(_TORCH[name])
    return tensor.numpy()


def numpy_to_torch(array):
    import torch

    for name, dtype in _TORCH.items():
        if array.dtype == dtype:
            carrier = np.int16 if dtype.itemsize == 2 else np.uint8
            return torch.from_numpy(np.ascontiguousarray(array).view(carrier)).view(getattr(torch, name))
    return torch.from_numpy(array)
