"""The cost model's figures: every documented rate, and what is counted. Model time only; nothing is measured."""

import ml_dtypes
import nki_sim
import numpy as np
import pytest

BACKEND = nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "nki", reason="only this package's simulator has a cost model")


def traced(kernel, *args):
    with nki_sim.trace() as t:
        nki.simulate(kernel)(*args)
    return t


def tile(shape, dtype=nl.float32, buffer=nl.sbuf):
    result = nl.ndarray(shape, dtype=dtype, buffer=buffer)
    nisa.memset(dst=result, value=0.0)
    return result


def one_matmul(dtype, k, m, n):
    stationary, moving = tile((k, m), dtype), tile((k, n), dtype)
    product = nl.ndarray((m, n), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)


@pytest.mark.parametrize(
    ("dtype", "n", "cycles"),
    [("bfloat16", 512, 512), ("bfloat16", 8, 64), ("float8_e5m2", 512, 512), ("float32", 512, 2048)],
)
def test_a_matmul_takes_its_moving_columns(dtype, n, cycles):
    t = traced(one_matmul, dtype, 128, 64, n)
    assert t.engines["tensor"].ns == pytest.approx(cycles / 2.4)
    assert t.matmul_flops == 2 * 128 * 64 * n


def one_transpose(dtype):
    data = tile((128, 32), dtype)
    result = nl.ndarray((32, 128), dtype=dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=result, data=data)


@pytest.mark.parametrize(("dtype", "cycles"), [("bfloat16", 128), ("float32", 256)])
def test_a_transpose_takes_its_partitions_and_counts_no_flops(dtype, cycles):
    t = traced(one_transpose, dtype)
    assert t.engines["tensor"].ns == pytest.approx(cycles / 2.4)
    assert t.matmul_flops == 0


def one_copy(source, target, dtype, engine):
    src, dst = tile((128, 1024), dtype, source), nl.ndarray((128, 1024), dtype=dtype, buffer=target)
    nisa.tensor_copy(dst=dst, src=src, engine=engine)


@pytest.mark.parametrize(
    ("source", "dtype", "engine", "ns"),
    [
        (nl.sbuf, "bfloat16", "vector", 1024 / 4 / 0.96),  # both in SBUF, contiguous: four times
        (nl.psum, "bfloat16", "vector", 1024 / 2 / 0.96),  # one side in PSUM: twice
        (nl.sbuf, "float32", "vector", 1024 / 0.96),
        (nl.psum, "bfloat16", "scalar", 1024 / 1.2),
        (nl.sbuf, "float32", "gpsimd", 1024 / 1.2),
    ],
)
def test_copies_cost_what_the_engine_and_the_dtype_give(source, dtype, engine, ns):
    t = traced(one_copy, source, nl.sbuf, dtype, nisa.engine[engine])
    assert t.by_instruction[engine, "tensor_copy"].ns == pytest.approx(ns)


def vector_instructions():
    a, b, half = tile((128, 512)), tile((128, 512)), tile((128, 512), nl.bfloat16)
    nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.add)
    nisa.tensor_reduce(dst=b[:, 0:1], op=nl.maximum, data=a, axis=1)
    nisa.reciprocal(dst=b, data=a)
    nisa.scalar_tensor_tensor(dst=half, data=half, op0=nl.multiply, operand0=2.0, op1=nl.add, operand1=half)
    strided = a.reshape((128, 64, 8)).permute((0, 2, 1))
    nisa.tensor_scalar(dst=b, data=strided, op0=nl.add, operand0=1.0)


def test_vector_instructions_cost_cycles_per_element():
    t = traced(vector_instructions)
    cycles = {"tensor_tensor": 1024, "tensor_reduce": 512, "reciprocal": 4096, "scalar_tensor_tensor": 512}
    cycles["tensor_scalar"] = 1024  # an innermost step of 32 bytes halves the access rate
    for name, count in cycles.items():
        assert t.by_instruction["vector", name].ns == pytest.approx(count / 0.96), name


def activation_with_sum(read_out):
    a, total = tile((128, 512)), nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=a,
        op=nl.exp,
        data=a,
        reduce_op=nl.add,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
        reduce_res=total if read_out else None,
    )


def test_reading_the_reduce_registers_costs_one_more_instruction():
    assert traced(activation_with_sum, False).engines["scalar"].ns == pytest.approx(512 / 1.2)
    assert traced(activation_with_sum, True).engines["scalar"].ns == pytest.approx((512 + 64) / 1.2)


def gather(table, index):
    rows = nl.ndarray((128, table.shape[1]), dtype=table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, nl.load(index)))


@pytest.mark.parametrize(("width", "row_ns"), [(128, 107.0), (512, 107.0), (4096, 8192 / 22.5)])
def test_a_gathered_row_costs_a_descriptor_or_its_bytes(width, row_ns):
    table, index = np.ones((200, width), ml_dtypes.bfloat16), np.zeros((128, 1), np.int32)
    t = traced(gather, table, index)
    load_ns = 8 * 107.0  # the index tile: 128 rows of 4 bytes
    assert t.engines["dma"].ns == pytest.approx(128 / 16 * row_ns + load_ns)
    assert t.gathered_rows == 128
    assert t.hbm_read_bytes == 128 * width * 2 + 128 * 4


def test_few_partitions_use_few_dma_engines():
    def load(a):
        nl.load(a)

    t = traced(load, np.ones((8, 4096), np.float32))
    assert t.engines["dma"].ns == pytest.approx(8 * 16384 / 22.5)  # one engine serves 8 partitions


def test_the_bound_is_the_largest_of_flops_bytes_and_gathered_rows():
    table, index = np.ones((200, 512), ml_dtypes.bfloat16), np.zeros((128, 1), np.int32)
    t = traced(gather, table, index)
    assert t.bound().name == "gathered rows"
    assert t.bound().ns == pytest.approx(128 * 107 / 16)
    assert t.bound(hbm_bytes=362e3).ns == pytest.approx(1e3)
    assert t.bound(flops=78.6432e9, hbm_bytes=0, gathered_rows=0).ns == pytest.approx(1e6)
    assert "gathered rows" in t.table()
    assert all(name in t.table() for name in t.NAMES)


def test_a_trace_sums_the_kernels_of_its_block_and_nothing_else():
    kernel = one_matmul
    nki.simulate(kernel)("bfloat16", 128, 64, 64)
    with nki_sim.trace() as outer:
        nki.simulate(kernel)("bfloat16", 128, 64, 64)
        with nki_sim.trace() as inner:
            nki.simulate(kernel)("bfloat16", 128, 64, 64)
    assert outer.engines["tensor"].issued == inner.engines["tensor"].issued == 1
    assert outer.program_size == inner.program_size
