"""Compile a function the way a device backend sees it, and keep the graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd


@dataclasses.dataclass
class Compiled:
    """A compiled function and every forward graph made for it so far; more than one means it retraced."""

    call: Callable[..., Any]
    graphs: list[torch.fx.GraphModule]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    @property
    def graph(self) -> torch.fx.GraphModule:
        """The one graph."""
        if len(self.graphs) != 1:
            raise RuntimeError(f"expected one graph, got {len(self.graphs)}")
        return self.graphs[0]

    def targets(self) -> list[str]:
        """What the one graph calls, in order: "aten.add.Tensor", "nki_kernel_wrapper"."""
        return [str(node.target) for node in self.graph.graph.nodes if node.op == "call_function"]


def compile_fullgraph(function: Callable[..., Any], *, dynamic: bool = False) -> Compiled:
    """``torch.compile(fullgraph=True)`` with a backend that runs AOTAutograd's graph node by node."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, example_inputs: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep)
    return Compiled(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), graphs)
