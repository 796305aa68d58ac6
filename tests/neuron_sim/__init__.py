"""A simulated Neuron device and NKI bridge, for tests only. See docs/neuron-simulation.md."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types

from . import graph_rules, kernel_definitions
from .recorder import Recording, int32_only, record
from .runners import DefinitionRunner, SimulatorRunner, define, use_runner
from .tracing import Compiled, compile_fullgraph

__all__ = [
    "Compiled",
    "DefinitionRunner",
    "Recording",
    "SimulatorRunner",
    "compile_fullgraph",
    "define",
    "graph_rules",
    "install",
    "int32_only",
    "kernel_definitions",
    "record",
    "use_runner",
]


def install() -> str:
    """Make device ``neuron`` and module ``torch_neuronx.nki_hop`` exist; returns "real" or "simulated".

    Where the real ``torch_neuronx`` can be imported it is used and nothing is simulated. Calling again changes nothing.
    """
    try:
        hop = importlib.import_module("torch_neuronx.nki_hop")
    except ImportError:
        hop = None
    if hop is not None:
        return "simulated" if hop.__name__ == f"{__name__}.nki_hop" else "real"

    import nki_sim

    from . import device, nki_hop

    nki_sim.install()  # the package's kernels import nki
    device.setup()
    package = types.ModuleType("torch_neuronx", "The tests' stand-in; see tests/neuron_sim.")
    package.__spec__ = importlib.machinery.ModuleSpec("torch_neuronx", None, is_package=True)
    package.__path__ = []
    package.nki_hop = nki_hop
    package.wrap_nki = nki_hop.wrap_nki
    sys.modules["torch_neuronx"] = package
    sys.modules["torch_neuronx.nki_hop"] = nki_hop
    return "simulated"
