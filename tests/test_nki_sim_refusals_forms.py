"""Illegal forms of operands: run-time addresses, DMA shapes, constants and flags that no instruction takes."""

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
HALF = A.astype(np.float16)
ROWS = np.zeros((32, 1), np.uint32)


# ---- run-time addresses --------------------------------------------------------------------------------------------


@refused("expected a 1x1 tile, got shape .2, 1.", A)
def two_scalar_offsets(a):
    a.ap(pattern=[[64, 2], [1, 64]], scalar_offset=ones((2, 1), nl.int32))


@refused("expected a tensor or register, got 3", A)
def constant_as_scalar_offset(a):
    a.ap(pattern=[[64, 2], [1, 64]], scalar_offset=3)


@refused("cannot be made indirect again", A, ROWS)
def two_gathers_in_one_view(a, index):
    rows = a.vector_select(0, nl.load(index))
    rows.select(1, ones((1, 1), nl.int32))


@refused("takes part in the indirection and cannot be sliced", A, ROWS)
def sliced_gather(a, index):
    a.vector_select(0, nl.load(index))[0:16, :]


@refused("not after an indirect view", A, ROWS)
def reinterpreted_gather(a, index):
    a.vector_select(0, nl.load(index)).view(nl.int32)


@refused("a run-time offset needs a row-major base", A)
def scalar_offset_on_a_transposed_view(a):
    a.permute((1, 0)).ap(pattern=[[64, 2], [1, 64]], scalar_offset=nisa.register_alloc(0))


@refused("cannot move an on-chip access over partitions")
def scalar_offset_over_partitions():
    ones((128, 8)).ap(pattern=[[8, 32], [1, 8]], scalar_offset=nisa.register_alloc(0))


@refused("scalar_offset 6 is out of bounds")
def scalar_offset_past_the_partition():
    part = ones((4, 8)).ap(pattern=[[8, 4], [1, 4]], scalar_offset=nisa.register_alloc(6), indirect_dim=1)
    nisa.tensor_copy(dst=tile((4, 4)), src=part)


@refused("memset, copies or transposes initialised part")
def accumulation_on_a_half_overwritten_word():
    total, a = tile((64, 64), buffer=nl.psum), ones((64, 64))
    nisa.nc_matmul(dst=total, stationary=a, moving=a)
    nisa.memset(dst=total.view(nl.uint16)[:, 1:2], value=0)  # the upper half of the first fp32
    nisa.nc_matmul(dst=total, stationary=a, moving=a, accumulate=True)


@refused("cannot select the partition dimension")
def run_time_partition():
    ones((128, 8)).select(0, nisa.register_alloc(0))


@refused("vector_offset supports only indirect_dim=0", A, ROWS)
def gather_over_the_second_dimension(a, index):
    a.ap(pattern=[[64, 32], [1, 64]], vector_offset=nl.load(index), indirect_dim=1)


@refused("vector_offset has 32 indices, the pattern 64 rows", A, ROWS)
def gather_of_more_rows_than_indices(a, index):
    a.ap(pattern=[[64, 64], [1, 64]], vector_offset=nl.load(index))


@refused("16 rows, but vector_offset has 32 indices", A, ROWS)
def gather_of_fewer_rows_than_indices(a, index):
    nisa.dma_copy(dst=tile((16, 64)), src=a.ap(pattern=[[64, 16], [1, 64]], vector_offset=nl.load(index)))


@refused("only one side may use vector_offset", A, ROWS)
def gather_and_scatter_at_once(a, index):
    one = nl.load(index)
    result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result.vector_select(0, one), src=a.vector_select(0, one))


@refused("reads 2048 undefined elements", ROWS)
def gather_from_memory_never_written(index):
    table = nl.ndarray((64, 64), dtype=nl.float32, buffer=nl.hbm)
    nisa.dma_copy(dst=tile((32, 64)), src=table.vector_select(0, nl.load(index)))


@refused("pattern ends at element 8192, beyond", A)
def pattern_beyond_the_tensor(a):
    a.ap(pattern=[[64, 128], [1, 64]], offset=1)


@refused("strides are >= 0 and counts >= 1", A)
def pattern_that_walks_backwards(a):
    a.ap(pattern=[[64, 128], [-1, 64]], offset=63)


@refused("tensor indirection is available on trn3")
def tensor_indirection():
    ones((128, 8)).indirect(ones((128, 1), nl.uint32))


@refused("dims.0. must be 0")
def permuted_partition():
    tile((128, 8)).permute((1, 0))


@refused("has size 8, expected 1")
def broadcast_of_eight():
    tile((128, 8)).broadcast(1, 16)


@refused("cannot be changed by this view")
def partition_broadcast():
    tile((1, 8)).broadcast(0, 128)


@refused("keeps at least two dimensions")
def squeezed_to_one_dimension():
    tile((128, 1)).squeeze_dim(1)


# ---- DMA -----------------------------------------------------------------------------------------------------------


@refused("only scalar or sync, and only with dge_mode.hwdge", A)
def dma_engine_without_hwdge(a):
    nisa.dma_copy(dst=tile((128, 64)), src=a, engine=nisa.engine.scalar)


@refused("axes: .0, 1. of a rank-2 source", HALF)
def transpose_that_changes_nothing(a):
    nisa.dma_transpose(dst=tile((64, 128), nl.float16), src=a, axes=(0, 1))


@refused("dst: shape .128, 64., expected .64, 128.", HALF)
def transpose_of_the_wrong_shape(a):
    nisa.dma_transpose(dst=tile((128, 64), nl.float16), src=a)


@refused("skip: only with an indirect source", HALF)
def transpose_that_skips(a):
    nisa.dma_transpose(dst=tile((64, 128), nl.float16), src=a, oob_mode=nisa.oob_mode.skip)


@refused("takes 2-byte types, got float32", A[:16])
def hwdge_transpose_of_fp32(a):
    nisa.dma_transpose(dst=tile((64, 16)), src=a, dge_mode=nisa.dge_mode.hwdge)


@refused("dimension 1 or 2 of a 4-D source must be 1", np.zeros((64, 2, 2, 16), np.float16), ROWS)
def gathering_transpose_of_four_full_dimensions(a, index):
    nisa.dma_transpose(dst=tile((16, 2, 2, 32), nl.float16), src=a.vector_select(0, nl.load(index)))


@refused("needs a 2-byte HBM tensor", A, ROWS)
def gathering_transpose_of_fp32(a, index):
    nisa.dma_transpose(dst=tile((64, 32)), src=a.vector_select(0, nl.load(index)))


@refused("20 gathered rows are no multiple of 16", HALF, ROWS)
def gathering_transpose_of_20_rows(a, index):
    rows = a.ap(pattern=[[64, 20], [1, 64]], vector_offset=nl.load(index))
    nisa.dma_transpose(dst=tile((64, 20), nl.float16), src=rows)


@refused("with 128 rows if N > 1", HALF, np.zeros((32, 2), np.uint32))
def gathering_transpose_by_two_short_columns(a, index):
    rows = a.ap(pattern=[[64, 64], [1, 64]], vector_offset=nl.load(index))
    nisa.dma_transpose(dst=tile((64, 64), nl.float16), src=rows)


@refused("repeated indices, but unique_indices is True", A, ROWS)
def scatter_add_to_one_row(a, index):
    result = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=a)
    target = result.vector_select(0, nl.load(index))
    nisa.dma_compute(dst=target, srcs=(target, ones((32, 64))), reduce_op=nl.add)


# ---- constants, flags, engines -------------------------------------------------------------------------------------


@refused("bitvec operators take integer constants, got 1.0")
def float_mask():
    a = ones((128, 8), nl.int32)
    nisa.tensor_scalar(dst=a, data=a, op0=nl.bitwise_and, operand0=1.0)


@refused("bitvec inputs have one width, got int32 and uint8")
def bits_of_two_widths():
    a = ones((128, 8), nl.int32)
    nisa.tensor_tensor(dst=a, data1=a, data2=ones((128, 8), nl.uint8), op=nl.bitwise_or)


@refused("write integers of the input's width, got uint16")
def bits_that_widen():
    nisa.tensor_scalar(dst=tile((128, 8), nl.uint16), data=ones((128, 8), nl.uint8), op0=nl.left_shift, operand0=4)


@refused("bitvec operators run on the Vector engine")
def bits_on_gpsimd():
    a = ones((128, 8), nl.int32)
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.bitwise_or, engine=nisa.engine.gpsimd)


@refused("nl.power runs on GpSimd")
def power_on_the_vector_engine():
    a = ones((128, 8))
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=nl.power, engine=nisa.engine.vector)


@refused("engine: tensor cannot run this instruction, only vector, scalar, gpsimd")
def copy_on_the_tensor_engine():
    nisa.tensor_copy(dst=tile((128, 8)), src=ones((128, 8)), engine=nisa.engine.tensor)


@refused("nl.equal is no legal reduction operator")
def reduction_by_equal():
    nisa.tensor_reduce(dst=tile((128, 1)), op=nl.equal, data=ones((128, 8)), axis=1)


@refused("300 does not fit uint8")
def constant_that_does_not_fit():
    nisa.memset(dst=tile((128, 8), nl.uint8), value=300)


@refused("1 is an int, but float32 takes a float")
def integer_constant_for_floats():
    nisa.memset(dst=tile((128, 8)), value=1)


@refused("expected an operator of nki.language")
def numpy_operator():
    a = ones((128, 8))
    nisa.tensor_tensor(dst=a, data1=a, data2=a, op=np.add)


@refused("pattern: 7 elements, but dst has 8 per partition")
def iota_of_another_size():
    nisa.iota(dst=tile((128, 8), nl.int32), pattern=[[1, 7]])


@refused("reads partition 7, but src has 1")
def shuffle_from_a_missing_partition():
    nisa.nc_stream_shuffle(dst=tile((32, 8)), src=ones((1, 8)), shuffle_mask=(7,) * 32)


@refused("an initial value must be given with reduce_cmd.load_reduce")
def load_reduce_without_a_value():
    a = ones((128, 8))
    nisa.tensor_scalar_cumulative(
        dst=a, src=a, op0=nl.add, op1=nl.add, imm0=0.0, reduce_cmd=nisa.reduce_cmd.load_reduce
    )


@refused("dtype int32 is not accepted")
def cumulative_integers():
    a = ones((128, 8), nl.int32)
    nisa.tensor_scalar_cumulative(dst=a, src=a, op0=nl.add, op1=nl.add, imm0=0.0)


@refused("tile_position and tile_size must both be given")
def half_given_tiling():
    a = ones((64, 64))
    nisa.nc_matmul(dst=tile((64, 64), buffer=nl.psum), stationary=a, moving=a, tile_position=(0, 0))


@refused("is_transpose: moving must be the identity")
def transposing_matmul_of_two_matrices():
    a = ones((64, 64))
    nisa.nc_matmul(dst=tile((64, 64), buffer=nl.psum), stationary=a, moving=a, is_transpose=True)


@refused("manual addresses are not modelled")
def manual_address():
    nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.psum, address=(0, 0))


@refused("write nl.fori_loop")
def dynamic_range():
    nl.dynamic_range(4)


@refused("no `if` or `while` on it")
def branch_on_a_tensor():
    if ones((1, 1)):
        tile((128, 8))


@pytest.mark.parametrize(("kernel", "args", "match"), REFUSALS.cases)
def test_illegal_form_is_refused(kernel, args, match):
    with pytest.raises(nki_sim.NkiValidationError, match=match):
        nki.simulate(kernel)(*args)


def test_names_outside_the_simulated_subset_say_so():
    with pytest.raises(AttributeError, match=r"nisa\.topk: not part of this simulator"):
        _ = nisa.topk
    with pytest.raises(AttributeError, match=r"nl\.softmax: not part of this simulator"):
        _ = nl.softmax


def test_jit_refuses_removed_arguments():
    with pytest.raises(nki_sim.NkiValidationError, match="platform_target was removed"):
        nki.jit(platform_target="trn2")
