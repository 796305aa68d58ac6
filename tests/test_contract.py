"""One contract: whatever is wrong with a call, CPU, fake, meta and Neuron give the same verdict in the same words."""

from __future__ import annotations

import importlib.util

import contract_cases
import neuron_sim
import pytest
import torch
from contract_cases import CASES, OPERATORS, Case, good
from sample_calls import CALLS, Call
from torch._subclasses.fake_tensor import FakeTensorMode
from unreadable_memory import extent

neuron_sim.install()
HAS_NEURON = all(torch._C._dispatch_has_kernel_for_dispatch_key(f"deepinfer::{op}", "PrivateUse1") for op in OPERATORS)
IMPLEMENTATIONS = ["cpu", "meta", "fake", *(["neuron", "fake neuron"] if HAS_NEURON else [])]


def moved(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor on another device, strides, offset and ``requires_grad`` kept."""
    device = where.removeprefix("fake ")
    if device == "fake":
        return tensor
    storage = tensor.detach().as_strided((extent(tensor),), (1,), 0)
    copy = storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return copy.requires_grad_(tensor.requires_grad)


def run(call: Call, where: str) -> torch.Tensor:
    call = call if where == "cpu" else call.map_tensors(lambda t: moved(t, where))
    if not where.startswith("fake"):
        return call.run()
    with FakeTensorMode() as mode:
        return call.map_tensors(mode.from_tensor).run()


def answer(call: Call, where: str) -> str:
    """The error's message; "accepted" if there is none."""
    try:
        run(call, where)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_the_neuron_operators_are_registered_once_the_package_has_them():
    composition = importlib.util.find_spec("deepinfer_ops.neuron")
    if composition is None or composition.origin is None:
        pytest.skip("deepinfer_ops.neuron is not there yet")
    assert HAS_NEURON


@pytest.mark.parametrize("where", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CALLS)
def test_every_good_call_is_accepted_and_its_result_described_alike(name, where):
    call = CALLS[name]()
    real, described = call.run(), run(call, where)
    for fact in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset):
        assert fact(described) == fact(real)
    assert (described.dtype, described.requires_grad) == (torch.bfloat16, False)
    assert described.device.type == {"fake": "cpu"}.get(where, where.removeprefix("fake "))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_broken_argument_is_named_in_the_same_words_everywhere(case: Case):
    broken = case.apply(good(case.op))
    assert {where: answer(broken, where) for where in IMPLEMENTATIONS} == dict.fromkeys(IMPLEMENTATIONS, case.text)


@pytest.mark.parametrize("op", OPERATORS)
def test_the_table_breaks_every_argument(op):
    arguments = {argument.name for argument in getattr(torch.ops.deepinfer, op).default._schema.arguments}
    broken = {case.argument for case in CASES if case.op == op}
    assert arguments - broken == ({"one_sequence"} if op == "paged_mqa_logits" else set())


@pytest.mark.parametrize("argument", [(op, name) for op in OPERATORS for name in good(op).tensors()], ids="-".join)
def test_every_dtype_of_torch_is_refused_in_the_same_words(argument):
    op, name = argument
    call = good(op)
    accepted = {"q_data": {torch.float8_e4m3fn, torch.int8, torch.uint8}, "weights": {torch.bfloat16, torch.float32}}
    allowed = accepted.get(name, {call.arguments[name].dtype}) | ({torch.int16} if name == "q_sf" else set())
    others = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - allowed, key=str)
    for dtype in others:
        if str(dtype).startswith(("torch.q", "torch.complex32")):  # quantized ones exist only with a quantizer
            continue
        broken = Case(op, name, contract_cases.retyped(dtype), "").apply(call)
        answers = {where: answer(broken, where) for where in ("cpu", "meta")}
        assert answers["cpu"] == answers["meta"]
        assert f"{name}: expected dtype " in answers["cpu"]
        assert answers["cpu"].endswith(f", got {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize("op", OPERATORS)
def test_two_broken_arguments_give_the_same_first_complaint(op):
    """Checks come in the same order: all pairs, CPU against the fake function on meta tensors."""
    cases = [case for case in CASES if case.op == op]
    call, seen = good(op), 0
    for first in cases:
        once = first.apply(call)
        for second in cases:
            if second.argument <= first.argument or once.arguments[second.argument] is None:
                continue
            twice = second.apply(once)
            compiled, described = answer(twice, "cpu"), answer(twice, "meta")
            assert compiled == described, f"{first} and {second}"
            assert compiled.startswith(f"deepinfer::{op}: ")
            seen += 1
    assert seen > 100


@pytest.mark.parametrize("other", ["meta", *(["neuron"] if HAS_NEURON else [])])
@pytest.mark.parametrize("argument", [(op, name) for op in OPERATORS for name in good(op).tensors()], ids="-".join)
def test_a_tensor_on_another_device_is_named(argument, other):
    op, name = argument
    arguments = good(op).arguments
    first = next(iter(arguments))
    mixed = Call(op, arguments | {name: moved(arguments[name], other)})
    device = mixed.arguments[name].device
    named, expected, got = (name, "cpu", device) if name != first else (list(arguments)[1], device, "cpu")
    assert answer(mixed, "cpu") == f"deepinfer::{op}: {named}: expected a tensor on {expected}, got {got}"


@pytest.mark.parametrize("case", [case for case in CASES if case.message == contract_cases.NO_GRAD], ids=str)
def test_an_input_that_requires_grad_is_accepted_where_no_gradient_is_recorded(case):
    call = case.apply(good(case.op))
    want = good(case.op).run()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for where in IMPLEMENTATIONS:
                result = run(call, where)
                assert not result.requires_grad
                assert where != "cpu" or torch.equal(result, want)
