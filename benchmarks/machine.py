"""Which machine this is, how fast its GEMM and its copy are, and how quiet it was."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from deepinfer_ops import _C

from .timing import Budget, Spread, interleave

_GEMM = 1024  # a product of 1024 x 1024 matrices: 12 MiB of operands, far from memory-bound
_COPIES = {"copy, from memory": 1 << 28, "copy, in cache": 1 << 21}  # bytes read; as many are written


def describe() -> dict[str, object]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "deepinfer_capability": _C.cpu_capability(),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "compiler": _C.build_info()["compiler"],
        "system": platform.platform(terse=True),
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    fields = dict(line.partition(":")[::2] for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    name = fields.get("model name", platform.processor() or platform.machine())
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return name + family


def load_average() -> float:
    """Runnable processes over the last minute: above the core count, others had a share of ours."""
    return os.getloadavg()[0]


def peaks(budget: Budget) -> dict[str, dict[str, float]]:
    """fp32 operations per second of ``torch.mm`` and bytes moved per second by ``copy_``; the GEMM's spread is the
    machine's noise, since its work is the same every time."""
    a, b = torch.randn(_GEMM, _GEMM), torch.randn(_GEMM, _GEMM)
    candidates = {"gemm": lambda: torch.mm(a, b)}
    work = {"gemm": 2 * _GEMM**3}
    for name, size in _COPIES.items():
        source = torch.zeros(size, dtype=torch.uint8)
        target = torch.empty_like(source)
        candidates[name] = lambda source=source, target=target: target.copy_(source)
        work[name] = 2 * size
    times = interleave(candidates, budget)
    return {name: vars(Spread.of([work[name] / t for t in values])) for name, values in times.items()}
