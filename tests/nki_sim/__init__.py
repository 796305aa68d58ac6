"""A functional simulator of NKI for Trn2: the modules `nki`, `nki.isa` and `nki.language` on numpy.

It runs a kernel's Python eagerly and gives every instruction the semantics the public documentation gives it
(NKI 0.6.0): fp32 inside the engines and one cast on write, PSUM accumulation per location, access patterns,
run-time addresses, device loops. It refuses, with `NkiValidationError` and a message naming the limit, what hardware
or compiler forbid: tile and partition limits, wrong memories and dtypes, SBUF and PSUM capacity, reads of memory
never written, out-of-range addresses, Python the compiler does not take. AWS's simulator checks less.

    import nki_sim
    nki_sim.install()                       # "simulator", or "nki" if the real package is importable
    import nki, nki.isa as nisa, nki.language as nl

    result = nki.simulate(kernel)(a, b)     # numpy arrays or torch tensors in, the same kind out

    with nki_sim.trace() as t:              # the cost model
        nki.simulate(kernel)(a, b)
    print(t.table())                        # busy time of each engine against the bound
    t.engines["vector"].ns                  # also .program, .issued, .elements
    t.by_instruction["dma", "dma_copy"].ns
    t.bound(flops=..., hbm_bytes=..., gathered_rows=...).ns   # defaults: the trace's own counts
    t.program_size                          # instructions compiled; a device loop's body counts once

Not here: collectives and the second core, random numbers, dropout, batch-norm statistics, sequence_bounds, topk,
local_gather, nonzero_with_count, manual addresses, and the computing helpers of nl (nl.add(x, y), nl.softmax, ...).

A tensor occupies SBUF or PSUM while Python references it. A variable that a loop rebinds holds its old tensor until
the new one exists, so such a tile counts twice, which is what overlapping two iterations needs on the device too.
"""

import contextlib
import importlib
import os
import sys
import types

from . import isa, language
from .cost import Bound, Trace
from .errors import NkiOutOfBounds, NkiValidationError
from .jit import Kernel, _traces, jit, simulate

__all__ = [
    "Bound",
    "Kernel",
    "NkiOutOfBounds",
    "NkiValidationError",
    "Trace",
    "install",
    "jit",
    "simulate",
    "standing_in",
    "trace",
]


def install():
    """Make `nki`, `nki.isa` and `nki.language` importable; returns "nki" (the real package) or "simulator"."""
    os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", "trn2")  # AWS's simulator would take trn3
    present = sys.modules.get("nki")
    if present is not None and hasattr(present, "jit"):
        return getattr(present, "_deepinfer_backend", "nki")
    sys.modules.pop("nki", None)  # a namespace package: this repository's folder of kernels has the same name
    with contextlib.suppress(ImportError):
        if hasattr(importlib.import_module("nki"), "jit"):
            return "nki"
    sys.modules.update(_modules(getattr(sys.modules.get("nki"), "__path__", [])))
    return "simulator"


def _modules(path):
    """`nki` and its two submodules. `path`: folders named nki, whose kernels stay importable as nki.<file>."""
    module = types.ModuleType("nki", "Simulated by nki_sim.")
    module.__path__ = list(path)
    module._deepinfer_backend = "simulator"
    module.jit, module.simulate = jit, simulate
    module.isa, module.language = isa, language
    return {"nki": module, "nki.isa": isa, "nki.language": language}


@contextlib.contextmanager
def standing_in():
    """Let imports in the block find the simulator's modules even where the real package is installed."""
    ours = _modules([])
    names = [name for name in sys.modules if name == "nki" or name.startswith("nki.")]
    saved = {name: sys.modules.pop(name) for name in names}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del sys.modules[name]
        sys.modules.update(saved)


@contextlib.contextmanager
def trace():
    """Collect the counters of all kernels simulated in the block."""
    opened = Trace()
    _traces.append(opened)
    try:
        yield opened
    finally:
        _traces.remove(opened)
