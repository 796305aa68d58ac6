"""Illegal instructions, by engine: sizes, memories and dtypes an engine does not take."""

import nki_sim
import numpy as np
import pytest
from nki_sim.examples import Refusals
from test_nki_sim_refusals import A, ones, tile

BACKEND = nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "nki", reason="the messages are this simulator's, not the real package's")

REFUSALS = Refusals()
refused = REFUSALS.refused


def bank(m=64, n=64):
    return tile((m, n), buffer=nl.psum)


def half_tile(n):
    return ones((128, n), nl.bfloat16)


@refused(r"moving: free size 513 exceeds 512 \(gemm_moving_fmax\)")
def moving_too_wide():
    nisa.nc_matmul(dst=bank(64, 513), stationary=half_tile(64), moving=half_tile(513))


@refused(r"stationary: free size 129 exceeds 128 \(gemm_stationary_fmax\)")
def stationary_too_wide():
    nisa.nc_matmul(dst=bank(128, 64), stationary=half_tile(129), moving=half_tile(64))


@refused("cross a psum bank of 2048 bytes")
def matmul_over_two_banks():
    nisa.nc_matmul(dst=bank(64, 1024)[:, 256:768], stationary=half_tile(64), moving=half_tile(512))


@refused("contraction: stationary has 128 partitions, moving 64")
def unequal_contraction():
    nisa.nc_matmul(dst=bank(), stationary=half_tile(64), moving=ones((64, 64), nl.bfloat16))


@refused("float32 pairs only with float32")
def mixed_with_fp32():
    nisa.nc_matmul(dst=bank(), stationary=ones((128, 64)), moving=half_tile(64))


@refused("dtype float8_e4m3fn is not accepted")
def ocp_fp8_operand():
    nisa.nc_matmul(dst=bank(), stationary=ones((128, 64), nl.float8_e4m3fn), moving=half_tile(64))


@refused("moving: expected a tensor in sbuf")
def matmul_reads_psum():
    nisa.nc_matmul(dst=bank(), stationary=half_tile(64), moving=bank(128, 64))


@refused("dst: expected a tensor in psum")
def matmul_writes_sbuf():
    nisa.nc_matmul(dst=tile((64, 64)), stationary=half_tile(64), moving=half_tile(64))


@refused("dst: dtype bfloat16 is not accepted, only float32")
def matmul_writes_bf16():
    result = tile((64, 64), nl.bfloat16, nl.psum)
    nisa.nc_matmul(dst=result, stationary=half_tile(64), moving=half_tile(64))


@refused("nothing has written part of this psum location")
def accumulation_on_a_fresh_bank():
    nisa.nc_matmul(dst=bank(), stationary=half_tile(64), moving=half_tile(64), accumulate=True)


@refused("memset, copies or transposes initialised part of this psum")
def accumulation_on_a_memset():
    result = bank()
    nisa.memset(dst=result, value=0.0)
    nisa.nc_matmul(dst=result, stationary=half_tile(64), moving=half_tile(64), accumulate=True)


@refused("was written by another instruction than a matmul")
def inferred_accumulation_on_a_memset():
    result = bank()
    nisa.memset(dst=result, value=0.0)
    nisa.nc_matmul(dst=result, stationary=half_tile(64), moving=half_tile(64))


@refused("row tile of 64: the stationary operand uses 128")
def tile_position_too_small():
    nisa.nc_matmul(dst=bank(), stationary=half_tile(64), moving=half_tile(64), tile_position=(0, 0), tile_size=(64, 64))


@refused("double_row takes fp8 tiles")
def double_row_of_bf16():
    two = ones((128, 2, 64), nl.bfloat16)
    nisa.nc_matmul(dst=bank(), stationary=two, moving=two, perf_mode=nisa.matmul_perf_mode.double_row)


@refused("dst: dtype float32 differs from data's bfloat16")
def transpose_that_casts():
    nisa.nc_transpose(dst=bank(64, 128), data=half_tile(64))


@refused("exceeds the Vector engine's 32 x 32 transpose")
def large_vector_transpose():
    nisa.nc_transpose(dst=tile((64, 128)), data=ones((128, 64)), engine=nisa.engine.vector)


@refused("data1 and data2: the two inputs cannot both be in psum")
def both_inputs_in_psum():
    a = bank(128, 64)
    nisa.memset(dst=a, value=1.0)
    nisa.tensor_tensor(dst=tile((128, 64)), data1=a, data2=a, op=nl.add)


@refused("GpSimd cannot access psum")
def gpsimd_reads_psum():
    a = bank(128, 64)
    nisa.memset(dst=a, value=1.0)
    nisa.tensor_copy(dst=tile((128, 64)), src=a, engine=nisa.engine.gpsimd)


@refused("dst: expected a tensor in sbuf")
def iota_in_psum():
    nisa.iota(dst=tile((128, 4), nl.int32, nl.psum), pattern=[[1, 4]])


@refused("src: expected a tensor in sbuf or hbm")
def dma_reads_psum():
    a = bank(128, 64)
    nisa.memset(dst=a, value=1.0)
    nisa.dma_copy(dst=tile((128, 64)), src=a)


@refused("no cast, but src is float32 and dst bfloat16", A)
def hwdge_that_casts(a):
    nisa.dma_copy(dst=tile((128, 64), nl.bfloat16), src=a, dge_mode=nisa.dge_mode.hwdge)


@refused("8192 and 4096 elements", A)
def dma_of_unequal_sizes(a):
    nisa.dma_copy(dst=tile((128, 32)), src=a)


@refused("expected a member of nisa.dge_mode, got 1", A)
def enumeration_by_number(a):
    nisa.dma_copy(dst=tile((128, 64)), src=a, dge_mode=1)


@refused("priority: available on trn3", A)
def dma_priority(a):
    nisa.dma_copy(dst=tile((128, 64)), src=a, priority=0)


@refused("needs 16 rows, got 128", A.astype(np.float16))
def hwdge_transpose_of_128_rows(a):
    nisa.dma_transpose(dst=tile((64, 128), nl.float16), src=a, dge_mode=nisa.dge_mode.hwdge)


@refused("takes uint32 indices, got int32", A.astype(np.float16), np.zeros((16, 1), np.int32))
def gathering_transpose_by_int32(a, index):
    nisa.dma_transpose(dst=tile((64, 16), nl.float16), src=a.vector_select(0, nl.load(index)))


@refused(r"bias: expected shape \(128, 1\), got \(128, 64\)")
def bias_per_column():
    a = ones((128, 64))
    nisa.activation(dst=a, op=nl.exp, data=a, bias=a)


@refused("scale: dtype bfloat16 is not accepted, only float32")
def scale_in_bf16():
    nisa.activation(dst=tile((128, 64)), op=nl.copy, data=half_tile(64), scale=half_tile(1))


@refused("nl.maximum is no activation function")
def maximum_on_scalar_engine():
    a = ones((128, 64))
    nisa.activation(dst=a, op=nl.maximum, data=a)


@refused("outside the valid range")
def reciprocal_of_zero_on_scalar_engine():
    a = nl.zeros((128, 64), dtype=nl.float32)
    nisa.activation(dst=a, op=nl.reciprocal, data=a)


@refused("reduce_op: only nl.add")
def maximum_reduction_on_scalar_engine():
    a = ones((128, 64))
    nisa.activation(dst=a, op=nl.copy, data=a, reduce_op=nl.maximum, reduce_cmd=nisa.reduce_cmd.reset_reduce)


@refused("the reduce registers were never reset")
def sum_without_reset():
    a = ones((128, 64))
    nisa.activation(dst=a, op=nl.copy, data=a, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reduce)


@refused("operand0: dtype bfloat16 is not accepted, only float32")
def scalar_operand_in_bf16():
    nisa.tensor_scalar(dst=tile((128, 64)), data=ones((128, 64)), op0=nl.add, operand0=half_tile(1))


@refused("mix bitvec and arithmetic")
def mixed_operators():
    a = ones((128, 64), nl.int32)
    nisa.tensor_scalar(dst=a, data=a, op0=nl.bitwise_and, operand0=1, op1=nl.add, operand1=1.0)


@refused("bitvec operators take integer tiles, got float32")
def bits_of_floats():
    a = ones((128, 64))
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.bitwise_and)


@refused("scalar on trn2 supports only multiply.add, multiply or add, got maximum")
def maximum_with_a_constant_on_scalar_engine():
    a = ones((128, 64))
    nisa.tensor_scalar(dst=a, data=a, op0=nl.maximum, operand0=0.0, engine=nisa.engine.scalar)


@refused("nl.square is no arithmetic")
def square_on_vector_engine():
    a = ones((128, 64))
    nisa.tensor_scalar(dst=a, data=a, op0=nl.square, operand0=0.0)


@refused("nl.divide is no arithmetic")
def division():
    a = ones((128, 64))
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.divide)


@refused("must be the last free dimensions")
def reduction_of_a_middle_dimension():
    nisa.tensor_reduce(dst=tile((128, 8)), op=nl.add, data=ones((128, 4, 8)), axis=1)


@refused("never the partition")
def reduction_of_partitions():
    nisa.tensor_reduce(dst=tile((1, 8)), op=nl.add, data=ones((128, 8)), axis=0)


@refused("must be an int for int32")
def float_memset_of_integers():
    nisa.memset(dst=tile((128, 4), nl.int32), value=2.0)


@refused("8 to 16384")
def eight_of_seven():
    nisa.max8(dst=tile((128, 8)), src=ones((128, 7)))


@refused("only FP32_MIN")
def range_select_with_zero():
    a, bound = ones((128, 64)), ones((128, 1))
    nisa.range_select(
        dst=a, on_true_tile=a, comp_op0=nl.less, comp_op1=nl.less, bound0=bound, bound1=bound, on_false_value=0.0
    )


@refused("predicate: dtype float32 is not accepted")
def float_predicate():
    a = ones((128, 64))
    nisa.select_reduce(dst=a, predicate=a, on_true=a, on_false=0.0)


@refused("accumulator is undefined")
def reduction_after_idle():
    a, chosen = ones((128, 64)), ones((128, 64), nl.uint8)
    nisa.select_reduce(dst=a, predicate=chosen, on_true=a, on_false=0.0)
    nisa.select_reduce(dst=a, predicate=chosen, on_true=a, on_false=0.0, reduce_cmd=nisa.reduce_cmd.reduce)


@refused("128 partitions x 32 elements, but data1 has 128 x 64")
def unequal_operands():
    a = ones((128, 64))
    nisa.tensor_tensor(dst=a, data1=a, data2=ones((128, 32)), op=nl.add)


@refused("unknown argument .*dtype.*; it takes dst, data, name")
def unknown_keyword():
    a = ones((128, 64))
    nisa.reciprocal(dst=a, data=a, dtype=nl.float32)


@refused("missing argument data")
def missing_argument():
    nisa.reciprocal(dst=tile((128, 64)))


@refused(r"nisa.exponential: available on trn3 \(NeuronCore-v4\) only")
def exponential_of_trn3():
    a = ones((128, 64))
    nisa.exponential(dst=a, src=a)


@refused(r"nisa.nc_matmul_mx: available on trn3")
def matmul_mx_of_trn3():
    nisa.nc_matmul_mx(dst=bank())


@pytest.mark.parametrize(("kernel", "args", "match"), REFUSALS.cases)
def test_illegal_instruction_is_refused(kernel, args, match):
    with pytest.raises(nki_sim.NkiValidationError, match=match):
        nki.simulate(kernel)(*args)
