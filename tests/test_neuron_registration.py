"""How the compositions are reached: by any import order, in any grad mode, and with clear words where they are not."""

from __future__ import annotations

import contextlib
import sys

import neuron_sim
import pytest
import strategies_decode
import strategies_logits
import strategies_pool
import torch
from compare import assert_same_bits
from neuron_problems import CAP
from strategies_decode import DecodeProblem
from strategies_logits import LogitsProblem
from strategies_pool import PoolProblem
from subprocesses import run_script

from deepinfer_ops import config
from deepinfer_ops.neuron import kernels

CALLS = {
    "flash_mla_decode": strategies_decode.build(DecodeProblem(b=2, cap=CAP), "neuron"),
    "paged_mqa_logits": strategies_logits.build(LogitsProblem(cap=CAP), "neuron"),
    "softmax_pool": strategies_pool.build(PoolProblem(r=2), "neuron"),
}
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


@pytest.mark.parametrize("op", CALLS)
def test_every_mode_reaches_the_composition_with_the_same_result(op):
    results = []
    for mode in MODES.values():
        with mode():
            results.append(CALLS[op].run())
    assert results[0].device.type == "neuron"
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.fixture
def casting_bmm():
    """Autocast as a backend may register it: products in bf16, nothing else changed."""
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")

    def bmm(a, b):
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return torch.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16))

    library.impl("bmm", bmm, "AutocastPrivateUse1")
    torch.set_autocast_enabled("neuron", True)
    yield
    torch.set_autocast_enabled("neuron", False)
    library._destroy()
    others._destroy()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_changes_nothing(casting_bmm, compiled):
    call = CALLS["flash_mla_decode"]
    ones = torch.ones(1, 2, 3, device="neuron")
    assert torch.bmm(ones, ones.transpose(1, 2)).dtype == torch.bfloat16
    with config.override(nki_attn=False):
        run = neuron_sim.compile_fullgraph(type(call).run) if compiled else type(call).run
        got = run(call)
        torch.set_autocast_enabled("neuron", False)
        assert_same_bits(got, call.run())


@pytest.mark.parametrize("op", CALLS)
def test_kernels_are_wrapped_once(op):
    from torch_neuronx.nki_hop import kernel_registry

    CALLS[op].run()
    before = len(kernel_registry.kernels)
    CALLS[op].run()
    assert len(kernel_registry.kernels) == before


@pytest.mark.parametrize(("op", "argument"), [("flash_mla_decode", "q"), ("softmax_pool", "latent_rows")])
def test_an_input_that_requires_grad_is_refused(op, argument):
    call = CALLS[op]
    learning = call._replace(**{argument: getattr(call, argument).clone().requires_grad_()})
    expected = rf"deepinfer::{op}: {argument}: expected a tensor that does not require grad"
    with pytest.raises(RuntimeError, match=expected):
        learning.run()
    with torch.no_grad():
        assert_same_bits(learning.run(), call.run())


def test_tensors_of_two_devices_are_refused_by_name():
    call = CALLS["flash_mla_decode"]
    expected = "deepinfer::flash_mla_decode: indices: expected a tensor on neuron:0, got cpu"
    with pytest.raises(RuntimeError, match=expected):
        call._replace(indices=call.indices.cpu()).run()


@pytest.mark.parametrize("first", ["deepinfer_ops", "neuron_sim"])
def test_the_order_of_imports_does_not_matter(first):
    lines = ["import deepinfer_ops.neuron", "import neuron_sim; neuron_sim.install()"]
    order = lines if first == "deepinfer_ops" else lines[::-1]
    script = "\n".join(
        [
            "import torch",
            *order,
            "s = torch.zeros(1, 2, 4, device='neuron')",
            "print(torch.ops.deepinfer.softmax_pool(s, s + 3).cpu().tolist())",
        ]
    )
    assert run_script(script).strip() == "[[3.0, 3.0, 3.0, 3.0]]"


def test_without_any_neuron_package_the_operators_exist_and_explain_works():
    script = """
import sys, torch
from deepinfer_ops import neuron
rows = torch.empty(4, 2, 8, device="meta")
print(neuron.explain("softmax_pool", rows, rows).route, torch.ops.deepinfer.softmax_pool(rows, rows).shape)
print([name for name in sys.modules if name.split(".")[0] in ("torch_neuronx", "nki", "numpy.random")])
print([name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))])
"""
    route, modules, heavy = run_script(script).strip().split("\n")
    assert route == "kernel torch.Size([4, 8])"
    assert modules == heavy == "[]"


def test_another_backend_on_the_key_is_named():
    script = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
_setup_privateuseone_for_python_backend("elsewhere")
import deepinfer_ops.neuron
rows = torch._C._acc.create_empty_tensor((0,), torch.float32)
try:
    torch.ops.deepinfer.softmax_pool(rows, rows)
except RuntimeError as error:
    print(error)
"""
    expected = "deepinfer::softmax_pool: device: expected the PrivateUse1 backend neuron, got elsewhere"
    assert run_script(script).strip() == expected


def test_without_the_kernel_bridge_a_call_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_neuronx.nki_hop", None)
    kernels._wrapped.cache_clear()
    try:
        with pytest.raises(RuntimeError, match=r"NKI kernel gathered_attn_idx: expected torch_neuronx\.nki_hop to be"):
            CALLS["flash_mla_decode"].run()
        with config.override(nki_attn=False):
            CALLS["flash_mla_decode"].run()
    finally:
        kernels._wrapped.cache_clear()


@pytest.mark.parametrize("op", CALLS)
def test_the_package_kernels_themselves_give_what_their_definitions_give(op):
    """The seam hands them what they are written for; the definitions stand in for them everywhere else."""
    call, device = CALLS[op], config.override(attn_table_slots=0 if op == "flash_mla_decode" else 32768)
    with device:
        want = call.run()
        with neuron_sim.use_runner(neuron_sim.SimulatorRunner()):
            got = call.run()
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2**-6, atol=2**-6 * float(want.cpu().abs().max()))
