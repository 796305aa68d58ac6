"""What runs when an NKI kernel is called on the simulated device.

A runner gets one ``KernelLaunch`` with host tensors and computes the kernel's result, and it tells the result's shapes
and dtypes for fake tensors. ``DefinitionRunner`` computes plain-torch definitions, registered by kernel name with
``define``; ``SimulatorRunner`` runs the kernel itself on the tests' NKI simulator.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

Result = torch.Tensor | tuple[torch.Tensor, ...]
Definition = Callable[..., Result]


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One call of a kernel: ``arguments`` are complete, by parameter name, in the kernel's order."""

    kernel: Callable[..., Any]
    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KernelLaunch:
        changed = {
            name: change(value) if isinstance(value, torch.Tensor) else value for name, value in self.arguments.items()
        }
        return dataclasses.replace(self, arguments=changed)


class Runner(Protocol):
    def run(self, launch: KernelLaunch) -> Result:
        """The kernel's result from host tensors."""

    def meta(self, launch: KernelLaunch) -> Result:
        """Meta tensors shaped like the kernel's result, from meta tensors."""


_DEFINITIONS: dict[str, Definition] = {}


def define(name: str) -> Callable[[Definition], Definition]:
    """Register the plain-torch definition of the kernel called ``name``; it takes the kernel's arguments by keyword."""

    def register(definition: Definition) -> Definition:
        _DEFINITIONS[name] = definition
        return definition

    return register


class DefinitionRunner:
    """Runs the plain-torch definition; shapes come from the definition on meta tensors."""

    def run(self, launch: KernelLaunch) -> Result:
        if launch.name not in _DEFINITIONS:
            known = ", ".join(sorted(_DEFINITIONS)) or "none"
            raise LookupError(f"neuron_sim: no definition for NKI kernel {launch.name!r}; defined: {known}")
        return _DEFINITIONS[launch.name](**launch.arguments)

    meta = run


class SimulatorRunner:
    """Runs the kernel itself on ``nki_sim`` (the kernel's tensors are host tensors; the simulator copies them).

    ``ones_for_shapes`` learns result shapes by running the kernel on ones, as AWS's own simulator integration does
    under fake tensors: a kernel must then survive indices and masks that are all 1. Otherwise the definition tells.
    """

    def __init__(self, *, ones_for_shapes: bool = False) -> None:
        self._ones_for_shapes = ones_for_shapes
        self._shapes: dict[Any, Result] = {}

    def run(self, launch: KernelLaunch) -> Result:
        import nki_sim

        kernel = launch.kernel[launch.grid] if launch.grid else launch.kernel
        return nki_sim.simulate(kernel)(**launch.arguments)

    def meta(self, launch: KernelLaunch) -> Result:
        if not self._ones_for_shapes:
            return DefinitionRunner().meta(launch)
        key = (launch.kernel, launch.grid, tuple(map(_signature, launch.arguments.values())))
        if key not in self._shapes:
            ones = launch.with_tensors(lambda t: torch.ones(t.shape, dtype=t.dtype))
            self._shapes[key] = tree_map(lambda t: t.to("meta"), self.run(ones))
        return self._shapes[key]


def _signature(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


_active: list[Runner] = [DefinitionRunner()]


def active() -> Runner:
    return _active[-1]


@contextlib.contextmanager
def use_runner(runner: Runner) -> Iterator[None]:
    """Run kernels with ``runner`` inside the block. Graphs traced outside it use it too: a node names a kernel only."""
    _active.append(runner)
    try:
        yield
    finally:
        _active.pop()
