"""The mechanism the package relies on, shown on a toy operator of its own namespace.

The toy has a CPU kernel, a composition on PrivateUse1 (aten operators and one NKI kernel call), a fake function, and a
rule for FunctionalTensorMode that runs the composition for neuron tensors. So eager calls dispatch to the composition
and AOT tracing sees through it; on CPU it stays one opaque node.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from pathlib import Path

import neuron_sim
import pytest
import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.skipif(neuron_sim.install() != "simulated", reason="the real torch_neuronx is in use")

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
SEEN_THROUGH = [
    *("aten.mul.Tensor", "aten.add.Tensor", "aten.view.default", "nki_kernel_wrapper", "aten.view.default"),
    *("aten.mul.Tensor", "aten.sub.Tensor"),
]
OPAQUE = ["aten.mul.Tensor", "simtest.toy.default", "aten.sub.Tensor"]


@pytest.fixture(scope="module")
def toy():
    """Registers ``simtest::toy(x, y) = 2 * (3 * (x + 1) + y)``; counts how often each implementation runs."""
    from torch_neuronx.nki_hop import wrap_nki

    def scale_add(x, y, factor=2.0):
        raise AssertionError("the definition runs in its place")

    neuron_sim.define("scale_add")(lambda x, y, factor: x * factor + y)
    kernel = wrap_nki(scale_add)
    calls = types.SimpleNamespace(cpu=0, neuron=0)

    def cpu(x, y):
        calls.cpu += 1
        return (3 * (x + 1) + y.view(x.shape)) * 2

    def composition(x, y):
        calls.neuron += 1
        flat = (x + 1).view(-1)
        return kernel(flat, y, factor=3.0).view(x.shape) * 2

    def rule(mode, op, types, args, kwargs):
        if any(isinstance(arg, torch.Tensor) and arg.device.type == "neuron" for arg in args):
            with mode:
                return composition(*args, **(kwargs or {}))
        return mode.__torch_dispatch__(op, types, args, kwargs)

    lib = torch.library.Library("simtest", "FRAGMENT")
    lib.define("toy(Tensor x, Tensor y) -> Tensor")
    lib.impl("toy", cpu, "CPU")
    lib.impl("toy", composition, "PrivateUse1")
    torch.library.register_fake("simtest::toy", lambda x, y: torch.empty_like(x), lib=lib)
    torch.library.register_torch_dispatch("simtest::toy", FunctionalTensorMode, rule, lib=lib)
    yield calls
    lib._destroy()


def around(x, y):
    return torch.ops.simtest.toy(x * 2, y) - 1


def problem(device):
    x = torch.arange(6.0).reshape(2, 3)
    y = torch.ones(6)
    return (x.to(device), y.to(device)), ((3 * (x * 2 + 1) + y.view(2, 3)) * 2 - 1)


def calls_of(graph):
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("mode", MODES)
def test_an_eager_call_reaches_the_composition_in_every_mode(toy, mode):
    with MODES[mode]():
        args, want = problem("neuron")
        before = toy.neuron, toy.cpu
        result = around(*args)
        assert (toy.neuron, toy.cpu) == (before[0] + 1, before[1])
        assert result.device.type == "neuron"
        torch.testing.assert_close(result.cpu(), want)


def test_a_normal_tensor_works_inside_inference_mode_and_an_inference_tensor_outside(toy):
    args, want = problem("neuron")
    with torch.inference_mode():
        torch.testing.assert_close(around(*args).cpu(), want)
        inference_args, _ = problem("neuron")
    torch.testing.assert_close(around(*inference_args).cpu(), want)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_graph_sees_through_it_on_neuron(toy, mode, dynamic):
    with MODES[mode]():
        args, want = problem("neuron")
        compiled = neuron_sim.compile_fullgraph(around, dynamic=dynamic)
        torch.testing.assert_close(compiled(*args).cpu(), want)
        assert compiled.targets() == SEEN_THROUGH
        compiled(*args)
        assert len(compiled.graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_graph_keeps_it_opaque_on_cpu(toy, mode, dynamic):
    with MODES[mode]():
        args, want = problem("cpu")
        compiled = neuron_sim.compile_fullgraph(around, dynamic=dynamic)
        torch.testing.assert_close(compiled(*args), want)
        assert compiled.targets() == OPAQUE


@pytest.mark.parametrize("device", ["neuron", "cpu"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_aot_eager_runs_it(toy, device, dynamic):
    torch._dynamo.reset()
    args, want = problem(device)
    compiled = torch.compile(around, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(compiled(*args).cpu(), want)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize(("device", "decomposed"), [("neuron", SEEN_THROUGH), ("cpu", OPAQUE)])
def test_export_keeps_it_until_decomposed_then_sees_through_it_on_neuron(toy, device, decomposed, strict):
    class Module(torch.nn.Module):
        def forward(self, x, y):
            return around(x, y)

    args, want = problem(device)
    program = torch.export.export(Module(), args, strict=strict)
    assert calls_of(program.graph_module) == OPAQUE
    lowered = program.run_decompositions({})
    assert calls_of(lowered.graph_module) == decomposed
    torch.testing.assert_close(lowered.module()(*args).cpu(), want)


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_without_functionalization_keeps_it(toy, tracing_mode):
    """The rule belongs to FunctionalTensorMode: a trace without that mode is no AOT trace."""
    args, _ = problem("neuron")
    assert calls_of(make_fx(around, tracing_mode=tracing_mode)(*args)) == OPAQUE


def test_traced_tensors_are_fake_tensors_on_the_neuron_device(toy):
    args, _ = problem("neuron")
    compiled = neuron_sim.compile_fullgraph(around)
    compiled(*args)
    for node in compiled.graph.graph.nodes:
        if node.op != "output":
            assert isinstance(node.meta["val"], torch._subclasses.FakeTensor)
            assert node.meta["val"].device.type == "neuron"


def test_the_graph_obeys_the_rules_and_the_opaque_one_does_not(toy, monkeypatch):
    monkeypatch.setitem(neuron_sim.graph_rules.KERNELS, "scale_add", neuron_sim.graph_rules.KernelSizes(None, None))
    for device, broken in (("neuron", []), ("cpu", ["opaque-op"])):
        args, _ = problem(device)
        compiled = neuron_sim.compile_fullgraph(around)
        compiled(*args)
        assert [b.rule for b in neuron_sim.graph_rules.check(compiled.graph)] == broken


def prepare(x, cache):
    """What a composition does besides arithmetic: creates tensors on the device, writes to an argument, gathers."""
    order = torch.arange(x.shape[0], device=x.device)
    used = torch.zeros(8, dtype=torch.int32, device=x.device).scatter(0, order, 1)
    empty = torch.where(x > 2, x, torch.tensor(-1e30, device=x.device))
    cache[1:3] += 1
    rows = cache[torch.tensor([2, 0], device=x.device)]
    padded = torch.nn.functional.pad(empty, (0, 3), value=-1.0)
    return used.cumsum(0).to(torch.int32), padded, rows.view(-1)[::2], torch.full((3,), 0.5, device=x.device)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_creating_tensors_and_writing_to_arguments_works_eager_and_compiled(dynamic):
    x, cache = torch.arange(16.0).reshape(4, 4), torch.zeros(4, 4, dtype=torch.uint8)
    eager, traced = cache.to("neuron"), cache.to("neuron")
    compiled = neuron_sim.compile_fullgraph(prepare, dynamic=dynamic)
    results = prepare(x.to("neuron"), eager), compiled(x.to("neuron"), traced)
    want = prepare(x, cache)
    for result in results:
        assert [t.device.type for t in result] == ["neuron"] * 4
        for mine, wanted in zip(result, want, strict=True):
            torch.testing.assert_close(mine.cpu(), wanted, rtol=0, atol=0)
            assert mine.stride() == wanted.stride()
    assert torch.equal(eager.cpu(), cache)
    assert torch.equal(traced.cpu(), cache)


def test_an_operator_registered_before_the_device_exists_is_reached_too():
    """PrivateUse1 is the key's name before and after the rename, so import order does not matter."""
    script = """
import torch
lib = torch.library.Library("early", "FRAGMENT")
lib.define("op(Tensor x) -> Tensor")
lib.impl("op", lambda x: x * 2, "PrivateUse1")
import neuron_sim
assert neuron_sim.install() == "simulated"
result = torch.ops.early.op(torch.ones(2, device="neuron"))
print(result.device.type, result.tolist())
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[0] == "neuron [2.0, 2.0]"
