"""Grad modes, autocast, function transforms, and tensors that are not plain: the result or a clear error."""

from __future__ import annotations

import contextlib

import contract_cases
import pytest
import sample_calls
import torch
from compare import assert_same_bits
from contract_cases import CASES, OPERATORS, good
from sample_calls import CALLS, Call

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
TRAINABLE = [case for case in CASES if case.message == contract_cases.NO_GRAD]
NAMED = [next(name for name in CALLS if name.startswith(op)) for op in OPERATORS]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: Call, backend: str = "aot_eager") -> torch.Tensor:
    return torch.compile(lambda arguments: call.overload(**arguments), backend=backend, fullgraph=True)(call.arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMED)
def test_plain_tensors_work_in_every_grad_mode_eager_and_compiled(name, mode):
    call = CALLS[name]()
    want = call.run()
    with MODES[mode]():
        for result in (call.run(), compiled(call)):
            assert_same_bits(result, want)
            assert not result.requires_grad
            assert result.is_inference() == (mode == "inference")


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
@pytest.mark.parametrize("name", NAMED)
def test_inference_tensors_work_outside_inference_mode(name, mode):
    with torch.inference_mode():
        call = CALLS[name]().map_tensors(torch.clone)
        want = call.run()
    assert all(t.is_inference() for t in call.tensors().values())
    with MODES[mode]():
        assert_same_bits(call.run(), want)
        assert_same_bits(compiled(call), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_autocast_changes_no_dtype_and_no_bit(name, dtype):
    call = CALLS[name]()
    want = call.run()
    with torch.autocast("cpu", dtype=dtype):
        assert_same_bits(call.run(), want)
        assert_same_bits(compiled(call), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("case", TRAINABLE, ids=str)
def test_an_input_that_requires_grad_is_refused_when_compiling(case, backend):
    with pytest.raises(RuntimeError) as caught:
        compiled(case.apply(good(case.op)), backend)
    assert case.text in str(caught.value)


@pytest.mark.parametrize("case", TRAINABLE, ids=str)
def test_an_input_that_requires_grad_compiles_where_no_gradient_is_recorded(case):
    call, want = case.apply(good(case.op)), good(case.op).run()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same_bits(compiled(call), want)


@pytest.mark.parametrize("case", TRAINABLE, ids=str)
def test_what_was_computed_from_a_parameter_requires_grad_too(case):
    """A non-leaf, a view of it, a parameter; float8 has no arithmetic, so there only the leaf's view."""
    call = good(case.op)
    leaf = case.change(call.arguments[case.argument])
    products = [] if leaf.dtype == torch.float8_e4m3fn else [leaf * 2, (leaf * 2)[:], torch.nn.Parameter(leaf.detach())]
    for tensor in (leaf.view(leaf.shape), leaf[:], *products):
        with pytest.raises(RuntimeError) as caught:
            Call(call.op, call.arguments | {case.argument: tensor}).run()
        assert str(caught.value) == case.text
        detached = Call(call.op, call.arguments | {case.argument: tensor.detach()})
        assert not detached.run().requires_grad


def first_input(name: str) -> tuple[Call, str]:
    """A call and its first argument that can have a gradient."""
    call = CALLS[name]()
    return call, next(n for n, t in call.tensors().items() if t.is_floating_point() and t.dtype.itemsize > 1)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum().float())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", NAMED)
def test_a_function_transform_is_refused_instead_of_returning_a_gradient_of_zero(name, transform):
    call, argument = first_input(name)
    with pytest.raises(RuntimeError, match=f"^deepinfer::{call.op}: "):
        TRANSFORMS[transform](lambda x: Call(call.op, call.arguments | {argument: x}).run(), call.arguments[argument])


@pytest.mark.parametrize("name", NAMED)
def test_lazily_negated_inputs_are_negated_first(name):
    call, argument = first_input(name)
    lazy = Call(call.op, call.arguments | {argument: torch._neg_view(call.arguments[argument])})
    eager = Call(call.op, call.arguments | {argument: -call.arguments[argument]})
    assert lazy.arguments[argument].is_neg()
    assert_same_bits(lazy.run(), eager.run())


@pytest.mark.parametrize("name", NAMED)
def test_deterministic_mode_changes_nothing(name):
    """It fills fresh memory with NaN; every element of a result is written anyway."""
    want = CALLS[name]().run()
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(CALLS[name]().run(), want)
    finally:
        torch.use_deterministic_algorithms(False)


def test_one_of_each_covers_all_operators():
    assert [call.op for call in sample_calls.one_of_each()] == list(OPERATORS)
