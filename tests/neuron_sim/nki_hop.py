"""A stand-in for ``torch_neuronx.nki_hop``: ``wrap_nki`` and the higher-order operator ``nki_kernel_wrapper``.

The public surface and the node's keywords are those of AWS's package, because graph passes read them: ``kernel_idx``,
``grid``, ``backend_config``, ``operand_output_aliases``, ``args``, ``arg_names``, ``constant_args_key``. Outside a
trace ``args`` holds every argument and the key is -1; a traced node lists the tensors only, and its key finds the
compile-time constants in ``kernel_registry``. Not simulated: kernels that write to an argument (no aliases, ever).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map

from . import recorder, runners
from .memory import adopt, host_alias, is_neuron

NO_KEY = -1


class KernelRegistry:
    """Kernels by index, compile-time constants by key. Every wrap adds an entry, even of a kernel already there."""

    def __init__(self) -> None:
        self.kernels: list[Callable[..., Any]] = []
        self._constants: list[dict[str, Any]] = []

    def add(self, kernel: Callable[..., Any]) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def name(self, kernel_idx: int) -> str:
        return self.kernels[kernel_idx].__name__

    def key_of(self, constants: dict[str, Any]) -> int:
        """The same constants get the same key, so that equal graphs stay equal."""
        if constants not in self._constants:
            self._constants.append(constants)
        return self._constants.index(constants)

    def constants(self, key: int) -> dict[str, Any]:
        return {} if key == NO_KEY else self._constants[key]


kernel_registry = KernelRegistry()


class NKIKernelWrapper(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("nki_kernel_wrapper", cacheable=True)

    def __call__(
        self,
        kernel_idx: int,
        grid: Sequence[int],
        backend_config: str,
        operand_output_aliases: dict[int, int],
        args: Sequence[Any],
        arg_names: Sequence[str],
        constant_args_key: int,
    ) -> Any:
        return super().__call__(
            kernel_idx=kernel_idx,
            grid=grid,
            backend_config=backend_config,
            operand_output_aliases=operand_output_aliases,
            args=args,
            arg_names=arg_names,
            constant_args_key=constant_args_key,
        )


nki_kernel_wrapper = torch._dynamo.allow_in_graph(NKIKernelWrapper())


def _launch(call: dict[str, Any]) -> runners.KernelLaunch:
    """The complete call a node or an eager call stands for."""
    arguments = dict(zip(call["arg_names"], call["args"], strict=True))
    arguments |= kernel_registry.constants(call["constant_args_key"])
    kernel = kernel_registry.kernels[call["kernel_idx"]]
    return runners.KernelLaunch(kernel, kernel.__name__, tuple(call["grid"]), arguments)


@nki_kernel_wrapper.py_impl(DispatchKey.CompositeExplicitAutograd)
def _eager(**call: Any) -> Any:
    """Reached with PrivateUse1 tensors outside a trace, and by an executed graph."""
    launch = _launch(call)
    for name, value in launch.arguments.items():
        if isinstance(value, torch.Tensor) and not is_neuron(value):
            raise RuntimeError(f"NKI kernel {launch.name}: {name} lies on {value.device}, expected a neuron tensor")
    with torch._C._AutoDispatchBelowAutograd():
        # A kernel sees what its DMAs would bring: the values, in order. It cannot write to its arguments.
        host = launch.with_tensors(lambda t: host_alias(t).clone(memory_format=torch.contiguous_format))
        result = runners.active().run(host)
        recorder.kernel_executed(launch.name, host.arguments, result)
        return tree_map(lambda t: adopt(t.contiguous().clone()), result)


@nki_kernel_wrapper.py_impl(FakeTensorMode)
def _fake(mode: FakeTensorMode, **call: Any) -> Any:
    launch = _launch(call)
    device = next(value.device for value in launch.arguments.values() if isinstance(value, torch.Tensor))
    with unset_fake_temporarily():
        # A symbolic size becomes a number here, which specializes the graph on it: a kernel is compiled for one shape.
        meta = launch.with_tensors(lambda t: torch.empty([int(s) for s in t.shape], dtype=t.dtype, device="meta"))
        result = runners.active().meta(meta)
    with mode:
        return tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), result)


@nki_kernel_wrapper.py_impl(ProxyTorchDispatchMode)
def _proxy(mode: ProxyTorchDispatchMode, **call: Any) -> Any:
    """One node, tensors listed, constants folded into the key."""
    if call["constant_args_key"] == NO_KEY:
        pairs = list(zip(call["arg_names"], call["args"], strict=True))
        tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
        constants = {name: value for name, value in pairs if not isinstance(value, torch.Tensor)}
        call["arg_names"] = [name for name, _ in tensors]
        call["args"] = [value for _, value in tensors]
        call["constant_args_key"] = kernel_registry.key_of(constants)
    with disable_proxy_modes_tracing():
        result = nki_kernel_wrapper(**call)
    node = mode.tracer.create_proxy(
        "call_function",
        nki_kernel_wrapper,
        (),
        tree_map(mode.tracer.unwrap_proxy, call),
        name=f"{kernel_registry.name(call['kernel_idx'])}_proxy",
    )
    return track_tensor_tree(result, node, constant=None, tracer=mode.tracer)


@nki_kernel_wrapper.py_functionalize_impl
def _functionalize(ctx: Any, **call: Any) -> Any:
    call["args"] = ctx.unwrap_tensors(tuple(call["args"]))
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(nki_kernel_wrapper(**call))


# As AWS does. Leaving out one backend's autograd key leaves out autograd altogether (the mask knows functionalities,
# not pairs), so an eager call with AutogradPrivateUse1 active goes straight to the kernel: no gradient, no error.
for _key in (DispatchKey.AutocastPrivateUse1, DispatchKey.AutogradCUDA, DispatchKey.AutogradCPU):
    nki_kernel_wrapper.fallthrough(_key)


class NKIHOPCaller:
    """A wrapped kernel: ``caller(*args, **kwargs)`` or ``caller[grid](...)``."""

    def __init__(self, kernel_idx: int, grid: tuple[int, ...], parameters: dict[str, inspect.Parameter]) -> None:
        self.kernel_idx = kernel_idx
        self.grid = grid
        self._parameters = parameters

    def __getitem__(self, grid: int | Sequence[int]) -> NKIHOPCaller:
        return NKIHOPCaller(self.kernel_idx, (grid,) if isinstance(grid, int) else tuple(grid), self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(self._parameters)
        given = dict(zip(names, args, strict=False)) | kwargs
        defaults = {name: p.default for name, p in self._parameters.items() if p.default is not p.empty}
        complete = defaults | given
        if len(args) > len(names) or set(complete) != set(names):
            raise TypeError(f"NKI kernel takes ({', '.join(names)}), got {len(args)} positional and {sorted(kwargs)}")
        return nki_kernel_wrapper(
            kernel_idx=self.kernel_idx,
            grid=self.grid,
            backend_config="",
            operand_output_aliases={},
            args=tuple(complete[name] for name in names),
            arg_names=tuple(names),
            constant_args_key=NO_KEY,
        )


def wrap_nki(nki_kernel: Any) -> NKIHOPCaller:
    """Wrap a kernel (a ``@nki.jit`` object or a plain function); each call registers a new kernel."""
    signature = getattr(nki_kernel, "sign", None) or inspect.signature(nki_kernel)
    kernel = getattr(nki_kernel, "func", nki_kernel)
    return NKIHOPCaller(kernel_registry.add(kernel), (), dict(signature.parameters))
