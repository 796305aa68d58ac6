"""What a call costs when there is nothing to compute: the operator beside an empty one registered the same way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch.utils import cpp_extension

import deepinfer_ops

from .cases import OVERHEAD_GOAL
from .problems import Problem
from .timing import Budget, Spread, excess, interleave

EMPTY = torch.library.Library("deepinfer_empty", "FRAGMENT")


@cache
def load_empty_operators() -> None:
    """Compiles ``empty_ops.cpp`` (some seconds); the schemas are the real operators' own."""
    for name in ("softmax_pool", "flash_mla_decode"):
        schema = str(getattr(torch.ops.deepinfer, name).default._schema)
        EMPTY.define(schema.removeprefix("deepinfer::"))
    flags = ["-O2", "-std=c++17", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-ltorch"]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libdeepinfer_empty.so"
        source = Path(__file__).with_name("empty_ops.cpp")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, *flags, *includes, str(source), "-o", str(library), *links], check=True)
        torch.ops.load_library(library)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(name: str, problem: Problem, grad: bool, budget: Budget) -> dict[str, object]:
    """Seconds of the operator, of the empty one and of the public Python function, and the first less the second."""
    load_empty_operators()
    arguments = problem.arguments
    if problem.operator == "flash_mla_decode":
        arguments = (*arguments, None, 512**-0.5)  # the operator itself has no default softmax_scale
    candidates = {
        "op": bind(getattr(torch.ops.deepinfer, problem.operator).default, arguments),
        "empty": bind(getattr(torch.ops.deepinfer_empty, problem.operator).default, arguments),
        "python": bind(getattr(deepinfer_ops, problem.operator), arguments),
    }
    with one_thread(), torch.set_grad_enabled(grad):
        times = interleave(candidates, budget)
    beyond = excess(times, "op", "empty")
    return {
        "call": name,
        "mode": "grad" if grad else "no_grad",
        "seconds": {key: Spread.of(values).median for key, values in times.items()},
        "beyond_empty": vars(beyond),
        "met": beyond.median <= OVERHEAD_GOAL,
    }


def bind(function: Callable[..., torch.Tensor], arguments: tuple[object, ...]) -> Callable[[], torch.Tensor]:
    return lambda: function(*arguments)
