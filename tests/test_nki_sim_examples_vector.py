"""AWS's published ISA test cases for the Vector engine's elementwise, selecting and cumulative instructions."""

import nki_sim
import numpy as np
import pytest
from nki_sim.examples import Examples, check, drawn
from test_nki_sim_examples_compute import FP32_MIN, stored

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

EXAMPLES = Examples()
case = EXAMPLES.case


@nki.jit
def scalar_operand(a, operand, op0, reverse0):
    tile = nl.load(a)
    nisa.tensor_scalar(dst=tile, data=tile, op0=op0, operand0=operand, reverse0=reverse0)
    return stored(tile)


@case("test_nki_isa_tensor_scalar.py", "a - 1")
def _():
    a = drawn(128, 512)
    return [(nki.simulate(scalar_operand)(a, 1.0, nl.subtract, False), a - 1, 0.0)]


@case("test_nki_isa_tensor_scalar.py", "1 - c")
def _():
    c = drawn(128, 512)
    return [(nki.simulate(scalar_operand)(c, 1.0, nl.subtract, True), 1 - c, 0.0)]


@nki.jit
def multiply_add(e, f):
    tile = nl.load(e)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=nl.load(f), op1=nl.add, operand1=2.5)
    return stored(tile)


@case("test_nki_isa_tensor_scalar.py", "e f + 2.5 with f per partition")
def _():
    e, f = drawn(64, 1024), drawn(64, 1)
    return [(nki.simulate(multiply_add)(e, f), e * f + np.float32(2.5), 1e-6)]


@nki.jit
def add(a, b):
    x, y = nl.load(a), nl.load(b)
    nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
    return stored(x)


@case("test_nki_isa_tensor_tensor.py", "add")
def _():
    a, b = drawn(128, 512), drawn(128, 512, seed=1)
    return [(nki.simulate(add)(a, b), a + b, 0.0)]


@nki.jit
def row_sum(a):
    total = nl.ndarray((a.shape[0], 1), dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=nl.load(a), axis=1)
    return stored(total)


@case("test_nki_isa_reduce.py", "sum of 512")
def _():
    a = drawn(128, 512)
    return [(nki.simulate(row_sum)(a), a.sum(axis=1, keepdims=True, dtype=np.float64), 1e-6)]


@nki.jit
def invert(a):
    tile = nl.load(a)
    nisa.reciprocal(dst=tile, data=tile)
    return stored(tile)


@case("test_nki_isa_reciprocal.py", "1 / x")
def _():
    a = drawn(128, 512) + np.float32(0.01)
    return [(nki.simulate(invert)(a), 1 / a, 0.0)]


@nki.jit
def copy_on_vector(a):
    tile = nl.load(a)
    copy = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=copy, src=tile, engine=nisa.engine.vector)
    return stored(copy)


@case("test_nki_isa_tensor_copy.py", "on the Vector engine")
def _():
    a = drawn(8, 8)
    return [(nki.simulate(copy_on_vector)(a), a, 0.0)]


@nki.jit
def fill():
    tile = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=tile, value=0.2)
    return stored(tile)


@case("test_nki_isa_memset.py", "0.2")
def _():
    return [(nki.simulate(fill)(), np.full((128, 128), np.float32(0.2)), 0.0)]


@nki.jit
def chained_scan(a, b):
    x, y = nl.load(a), nl.load(b)
    result = nl.ndarray(a.shape, dtype=nl.float32, buffer=nl.sbuf)
    for half in range(2):
        part = nl.ds(half * 512, 512)
        initial = 0.0 if half == 0 else result[:, 511:512]
        nisa.tensor_tensor_scan(
            dst=result[:, part], data0=x[:, part], data1=y[:, part], initial=initial, op0=nl.multiply, op1=nl.add
        )
    return stored(result)


@case("test_nki_isa_tensor_tensor_scan.py", "a state + b in two chained halves")
def _():
    a, b = drawn(128, 1024, scale=1.0), drawn(128, 1024, scale=1.0, seed=1)
    expected, state = np.empty(a.shape), np.zeros(128)
    for i in range(1024):
        state = expected[:, i] = a[:, i] * state + b[:, i]
    return [(nki.simulate(chained_scan)(a, b), expected, 1e-5)]


def operand(value):
    return nl.load(value) if isinstance(value, nl.NkiTensor) else value


@nki.jit
def cumulative(src, op1, imm0, imm1, command, calls):
    tile, offset, initial = nl.load(src), operand(imm0), operand(imm1)
    result = nl.ndarray(src.shape, dtype=src.dtype, buffer=nl.sbuf)
    nisa.tensor_scalar_cumulative(
        dst=result, src=tile, op0=nl.add, op1=op1, imm0=offset, imm1=initial, reduce_cmd=command
    )
    for _i in range(calls - 1):
        nisa.tensor_scalar_cumulative(
            dst=result, src=tile, op0=nl.add, op1=op1, imm0=offset, reduce_cmd=nisa.reduce_cmd.reduce
        )
    return stored(result)


def _cumulative(op1, imm0, expected, imm1=None, calls=1):
    command = nisa.reduce_cmd.reset_reduce if imm1 is None else nisa.reduce_cmd.load_reduce
    result = nki.simulate(cumulative)(np.ones((128, 64), np.float32), op1, imm0, imm1, command, calls)
    return [(result, np.broadcast_to(expected, (128, 64)), 0.0)]


ONE = np.ones((128, 1), np.float32)
ZERO = np.zeros((128, 1), np.float32)
STEPS = np.arange(1.0, 65.0)
CUMULATIVE = {
    "running sum": lambda: _cumulative(nl.add, 0.0, STEPS),
    "running product": lambda: _cumulative(nl.multiply, 0.0, 1.0),
    "running sum, vector imm0": lambda: _cumulative(nl.add, ONE, 2 * STEPS),
    "running product, vector imm0": lambda: _cumulative(nl.multiply, ONE, 2.0**STEPS),
    "running maximum, vector imm0": lambda: _cumulative(nl.maximum, ONE, 2.0),
    "load_reduce of a sum": lambda: _cumulative(nl.add, ONE, 2 * STEPS + 1, ONE),
    "load_reduce of a product": lambda: _cumulative(nl.multiply, ONE, 0.0, ZERO),
    "load_reduce of a minimum": lambda: _cumulative(nl.minimum, ONE, 0.0, ZERO),
    "reset_reduce then reduce": lambda: _cumulative(nl.add, 0.0, STEPS + 64, calls=2),
    "load_reduce then reduce": lambda: _cumulative(nl.add, 0.0, STEPS + 65, 1.0, calls=2),
}
for _name, _function in CUMULATIVE.items():
    case("test_nki_isa_tensor_scalar_cumulative.py", _name)(_function)


@nki.jit
def select(predicate, on_true, reverse):
    result = nl.ndarray(on_true.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=result, predicate=nl.load(predicate), on_true=nl.load(on_true), on_false=FP32_MIN, reverse_pred=reverse
    )
    return stored(result)


def _select(reverse):
    chosen, ones = np.zeros((128, 64), np.uint8), np.ones((128, 64), np.float32)
    chosen[:64] = 1
    expected = np.where(chosen != reverse, ones, np.float32(FP32_MIN))
    return [(nki.simulate(select)(chosen, ones, reverse), expected, 0.0)]


@case("test_nki_isa_select_reduce.py", "scalar on_false")
def _():
    return _select(False)


@case("test_nki_isa_select_reduce.py", "reversed predicate")
def _():
    return _select(True)


@nki.jit
def select_maximum(predicate, on_true, on_false):
    result = nl.ndarray(on_true.shape, dtype=nl.float32, buffer=nl.sbuf)
    largest = nl.ndarray((on_true.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.select_reduce(
        dst=result,
        predicate=nl.load(predicate),
        on_true=nl.load(on_true),
        on_false=nl.load(on_false),
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_res=largest,
    )
    return stored(result), stored(largest)


@case("test_nki_isa_select_reduce.py", "vector on_false and maximum")
def _():
    on_true, on_false = drawn(128, 512), drawn(128, 1)
    chosen = np.random.default_rng(1).integers(0, 2, (128, 512)).astype(np.uint8)
    expected = np.where(chosen, on_true, on_false)
    result, largest = nki.simulate(select_maximum)(chosen, on_true, on_false)
    return [(result, expected, 0.0), (largest, expected.max(axis=1, keepdims=True), 0.0)]


@nki.jit
def in_range(on_true, low, high, start, calls, step):
    tile = nl.load(on_true)
    result = nl.ndarray(on_true.shape, dtype=on_true.dtype, buffer=nl.sbuf)
    largest = nl.ndarray((on_true.shape[0], 1), dtype=on_true.dtype, buffer=nl.sbuf)
    for i in range(calls):
        nisa.range_select(
            dst=result,
            on_true_tile=tile,
            comp_op0=nl.greater_equal,
            comp_op1=nl.less,
            bound0=nl.load(low),
            bound1=nl.load(high),
            reduce_cmd=nisa.reduce_cmd.reset_reduce if i == 0 else nisa.reduce_cmd.reduce,
            reduce_res=largest if i == calls - 1 else None,
            range_start=start + i * step,
        )
        if i < calls - 1:
            nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    return stored(result), stored(largest)


def _in_range(dtype, upper, calls):
    values = drawn(128, 512, scale=1.0).astype(dtype)
    low, high = np.zeros((128, 1), np.float32), np.full((128, 1), upper, np.float32)
    result, largest = nki.simulate(in_range)(values, low, high, 32, calls, 128)
    best = np.full((128, 1), FP32_MIN)
    with np.errstate(over="ignore"):
        for i in range(calls):
            index = 32 + i * 128 + np.arange(512)
            kept = np.where((index >= 0) & (index < upper), values.astype(np.float32) + i, np.float32(FP32_MIN))
            best = np.maximum(best, kept.max(axis=1, keepdims=True))
        return [(result, kept.astype(dtype), 1e-6), (largest, best.astype(np.float32).astype(dtype), 1e-6)]


for _dtype in ("float8_e4m3", "float8_e5m2", "bfloat16", "float16", "float32"):
    case("test_nki_isa_range_select.py", f"bounds 0..64, {_dtype}")(
        lambda d=_dtype: _in_range(nki_sim.dtypes.NUMPY[d], 64, 1)
    )


@case("test_nki_isa_range_select.py", "three chained calls, read out by the last")
def _():
    return _in_range(np.float32, 350, 3)


@pytest.mark.parametrize("example", EXAMPLES.cases)
def test_published_example_gives_the_published_values(example):
    check(example)
