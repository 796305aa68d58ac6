"""The torch.library fragment every operator module defines its schema in, and the compiled CPU kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch.torch_version import TorchVersion

MINIMUM_TORCH = "2.10"
"""The stable ABI the compiled library targets; pyproject.toml and CMakeLists.txt ask for the same."""

if TorchVersion(torch.__version__) < MINIMUM_TORCH:
    raise ImportError(f"deepinfer_ops needs torch >= {MINIMUM_TORCH}, found {torch.__version__}")

Implementation = TypeVar("Implementation", bound=Callable[..., torch.Tensor])

OPS = torch.library.Library("deepinfer", "FRAGMENT")
"""Kept alive for the life of the process: a Library that dies takes its registrations with it."""

# Inductor must hand over the strides the caller wrote: a cache record's bytes are adjacent by contract.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(schema: str) -> None:
    """Declare ``deepinfer::<schema>``."""
    OPS.define(schema, tags=_TAGS)
    op = schema.partition("(")[0]

    # This key is only looked at inside torch.func's transforms, where an operator without rules counts as a constant.
    def refuse(*args: object, **kwargs: object) -> torch.Tensor:
        raise RuntimeError(f"deepinfer::{op}: torch.func: expected a call outside its transforms, got one inside")

    OPS.impl(op, refuse, "FuncTorchDynamicLayerFrontMode")


def fake(op: str) -> Callable[[Implementation], Implementation]:
    """Register the decorated function as ``deepinfer::<op>`` for fake and meta tensors."""

    def register(function: Implementation) -> Implementation:
        torch.library.register_fake(f"deepinfer::{op}", function, lib=OPS)
        return function

    return register


def load_cpu_kernels() -> bool:
    """Load ``libdeepinfer_ops.so``, which registers the CPU kernels; False where it was never built.

    Without it the schemas, fake functions and the Neuron composition still work: a Trainium host needs no compiler.
    ``DEEPINFER_LIBRARY`` names another build to load instead, say one with a sanitizer.
    """
    library = Path(os.environ.get("DEEPINFER_LIBRARY") or Path(__file__).with_name("libdeepinfer_ops.so"))
    if not library.exists():
        warnings.warn(
            f"{library.name} is missing: deepinfer_ops has no CPU kernels in this process. "
            "Build it with: pip install --no-build-isolation -e .",
            stacklevel=2,
        )
        return False
    torch.ops.load_library(library)
    return True
