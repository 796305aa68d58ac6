"""Instructions and forms that no published case covers, each against its numpy formula."""

import math

import ml_dtypes
import nki_sim
import numpy as np
import pytest
from nki_sim.examples import drawn
from test_nki_sim_examples_compute import stored

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

BF16 = ml_dtypes.bfloat16


def like(tile, dtype=None):
    return nl.ndarray(tile.shape, dtype=tile.dtype if dtype == None else dtype, buffer=nl.sbuf)  # noqa: E711


# ---- ScalarE -------------------------------------------------------------------------------------------------------


@nki.jit
def activated(a, op, dtype):
    tile = nl.load(a)
    result = like(tile, dtype)
    nisa.activation(dst=result, op=op, data=tile, scale=0.5, bias=0.25)
    return stored(result)


FUNCTIONS = {
    "copy": lambda x: x,
    "square": np.square,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "erf": np.vectorize(math.erf),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_apprx_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_apprx_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "exp": np.exp,
    "abs": np.abs,
    "sign": np.sign,
}
POSITIVE = {"log": np.log, "sqrt": np.sqrt, "rsqrt": lambda x: x**-0.5, "reciprocal": lambda x: 1 / x}


@pytest.mark.parametrize("name", [*FUNCTIONS, *POSITIVE])
def test_an_activation_is_applied_after_scale_and_bias(name):
    a = drawn(16, 32, scale=8.0) - (4 if name in FUNCTIONS else 0)
    expected = {**FUNCTIONS, **POSITIVE}[name](a.astype(np.float64) * 0.5 + 0.25)
    np.testing.assert_allclose(
        nki.simulate(activated)(a, getattr(nl, name), nl.float32), expected, rtol=2e-5, atol=1e-6
    )


@nki.jit
def summed(a, older_form):
    tile = nl.load(a)
    total = nl.ndarray((a.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    rounded = like(tile, nl.bfloat16)
    if older_form:
        nisa.activation_reduce(dst=rounded, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total)
    else:
        nisa.activation(
            dst=rounded,
            op=nl.square,
            data=tile,
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    return stored(rounded), stored(total)


@pytest.mark.parametrize("older_form", [False, True])
def test_an_activation_sums_the_fp32_values_not_the_rounded_ones(older_form):
    a = drawn(16, 64, scale=1.0)
    rounded, total = nki.simulate(summed)(a, older_form)
    np.testing.assert_array_equal(rounded, np.square(a).astype(BF16))
    np.testing.assert_allclose(total, np.square(a).sum(axis=1, keepdims=True), rtol=1e-6)


# ---- VectorE -------------------------------------------------------------------------------------------------------


@nki.jit
def scaled_with_maximum(a, b):
    """Two tiles scaled; their common row maximum, negated, leaves the accumulator with the second."""
    total = nl.ndarray((a.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    x, y = nl.load(a), nl.load(b)
    nisa.tensor_scalar_reduce(dst=x, data=x, op0=nl.multiply, operand0=2.0, reduce_op=nl.maximum)
    nisa.tensor_scalar_reduce(
        dst=y,
        data=y,
        op0=nl.multiply,
        operand0=2.0,
        reduce_op=nl.maximum,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reduce,
        reduce_res_negate=True,
    )
    return stored(x), stored(y), stored(total)


def test_tensor_scalar_reduce_continues_over_tiles():
    a, b = drawn(16, 32), drawn(16, 48, seed=1)
    x, y, total = nki.simulate(scaled_with_maximum)(a, b)
    np.testing.assert_array_equal(x, 2 * a)
    np.testing.assert_array_equal(y, 2 * b)
    np.testing.assert_array_equal(total[:, 0], -2 * np.concatenate([a, b], axis=1).max(axis=1))


@nki.jit
def selected_maximum(tiles, chosen):
    largest = nl.ndarray((tiles.shape[1], 1), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(tiles.shape[0]):
        tile = nl.load(tiles[i])
        nisa.select_reduce(
            dst=tile,
            predicate=nl.load(chosen[i]),
            on_true=tile,
            on_false=-1.0,
            reduce_cmd=nisa.reduce_cmd.reset_reduce if i == 0 else nisa.reduce_cmd.reduce,
            reduce_res=largest,
        )
    return stored(largest)


def test_select_reduce_keeps_the_maximum_of_earlier_tiles():
    tiles = drawn(3, 8, 32)
    tiles[0] += 100  # the largest come first: a reduction that forgot them would show
    chosen = np.random.default_rng(0).integers(0, 2, tiles.shape).astype(np.int8)
    expected = np.where(chosen, tiles, -1).max(axis=(0, 2))
    np.testing.assert_array_equal(nki.simulate(selected_maximum)(tiles, chosen)[:, 0], expected)


@nki.jit
def moved_within_a_tile(a):
    tile = nl.load(a)
    nisa.tensor_copy(dst=tile[:, 1:8], src=tile[:, 0:7])
    nisa.dma_copy(dst=tile[1:4, :], src=tile[0:3, :])
    return stored(tile)


def test_a_copy_onto_itself_reads_everything_before_it_writes():
    a = drawn(4, 8)
    expected = np.concatenate([a[:, :1], a[:, :7]], axis=1)
    expected = np.concatenate([expected[:1], expected[:3]])
    np.testing.assert_array_equal(nki.simulate(moved_within_a_tile)(a), expected)


@nki.jit
def running_difference(a):
    tile = nl.load(a)
    nisa.tensor_scalar_cumulative(dst=tile, src=tile, op0=nl.multiply, op1=nl.subtract, imm0=3.0)
    return stored(tile)


def test_a_cumulative_difference_alternates():
    a = drawn(4, 10)
    expected, reg = np.empty((4, 10)), np.zeros(4)
    for i in range(10):
        reg = expected[:, i] = 3 * a[:, i] - reg
    np.testing.assert_allclose(nki.simulate(running_difference)(a), expected, rtol=1e-5, atol=1e-4)


@nki.jit
def reductions(a, bits):
    tile, words = nl.load(a), nl.load(bits)
    middle = nl.ndarray((a.shape[0], a.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    any_of = nl.ndarray((a.shape[0], a.shape[1], 1), dtype=nl.float32, buffer=nl.sbuf)
    common = nl.ndarray((bits.shape[0], 1), dtype=bits.dtype, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=middle, op=nl.multiply, data=tile, axis=(2, 3), negate=True)
    nisa.tensor_reduce(dst=any_of, op=nl.logical_or, data=tile, axis=(2, 3), keepdims=True)
    nisa.tensor_reduce(dst=common, op=nl.bitwise_and, data=words, axis=1)
    return stored(middle), stored(any_of), stored(common)


def test_reductions_take_the_last_dimensions_and_every_legal_operator():
    a = np.round(drawn(8, 4, 3, 2, scale=3.0))
    a[:, 0] = 0
    bits = np.random.default_rng(0).integers(0, 256, (8, 3)).astype(np.uint8)
    middle, any_of, common = nki.simulate(reductions)(a, bits)
    np.testing.assert_array_equal(middle, -a.prod(axis=(2, 3)))
    np.testing.assert_array_equal(any_of[..., 0], (a != 0).any(axis=(2, 3)))
    np.testing.assert_array_equal(common[:, 0], np.bitwise_and.reduce(bits, axis=1))


@nki.jit
def compared(a, b, op):
    x = nl.load(a)
    result = like(x, nl.uint8)
    nisa.tensor_tensor(dst=result, data1=x, data2=nl.load(b), op=op)
    return stored(result)


@pytest.mark.parametrize(
    "name", ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_xor"]
)
def test_comparisons_give_zero_or_one(name):
    a, b = (np.round(drawn(8, 32, scale=3.0, seed=s)) for s in (0, 1))
    np.testing.assert_array_equal(nki.simulate(compared)(a, b, getattr(nl, name)), getattr(np, name)(a, b))


@nki.jit
def powers(a):
    x = nl.load(a)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.abs, operand0=0.0)
    nisa.tensor_tensor(dst=x, data1=x, data2=x, op=nl.power)
    nisa.tensor_scalar(dst=x, data=x, op0=nl.rsqrt, operand0=0.0)
    return stored(x)


def test_unary_operators_and_power():
    a = -drawn(8, 16, scale=2.0) - np.float32(0.1)
    expected = np.power(-a.astype(np.float64), -a) ** -0.5
    np.testing.assert_allclose(nki.simulate(powers)(a), expected, rtol=1e-5)


@nki.jit
def shifted(a, counts):
    tile = nl.load(a)
    left, right = like(tile), like(tile)
    per_partition = nl.load(counts)
    nisa.tensor_scalar(dst=left, data=tile, op0=nl.left_shift, operand0=per_partition, op1=nl.invert, operand1=None)
    nisa.tensor_scalar(dst=right, data=tile, op0=nl.right_shift, operand0=40)
    return stored(left), stored(right)


def test_shifts_are_logical_and_wide_counts_give_zero():
    a = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 8)).astype(np.int32)
    counts = np.int32([[0], [1], [31], [32]])
    left, right = nki.simulate(shifted)(a, counts)
    words = a.view(np.uint32).astype(np.uint64)
    np.testing.assert_array_equal(left.view(np.uint32), ~(words << counts.astype(np.uint64)).astype(np.uint32))
    assert (right == 0).all()


@nki.jit
def predicated_constant(a, predicate):
    tile = nl.load(a)
    nisa.tensor_copy_predicated(dst=tile, src=-1.0, predicate=nl.load(predicate), reverse_pred=True)
    return stored(tile)


def test_a_predicated_copy_takes_a_constant():
    a, chosen = drawn(8, 16), np.random.default_rng(0).integers(0, 2, (8, 16)).astype(np.uint32)
    np.testing.assert_array_equal(nki.simulate(predicated_constant)(a, chosen), np.where(chosen == 0, -1, a))


@nki.jit
def partly_shuffled(a):
    tile = nl.load(a)
    nisa.nc_stream_shuffle(dst=tile, src=tile, shuffle_mask=(7,) + (255,) * 31)
    return stored(tile)


def test_shuffle_mask_255_keeps_the_partition():
    a = drawn(64, 8)
    expected = a.copy()
    expected[[0, 32]] = a[[7, 39]]
    np.testing.assert_array_equal(nki.simulate(partly_shuffled)(a), expected)


# ---- TensorE, GpSimd -----------------------------------------------------------------------------------------------


@nki.jit
def transposed_by_matmul(a):
    result = nl.ndarray((a.shape[1], a.shape[0]), dtype=a.dtype, buffer=nl.psum)
    identity = nl.shared_identity_matrix(a.shape[0], dtype=a.dtype)
    nisa.nc_matmul(dst=result, stationary=nl.load(a), moving=identity, is_transpose=True)
    evicted = nl.ndarray(result.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=result, engine=nisa.engine.scalar)
    return stored(evicted)


def test_a_transposing_matmul_is_bit_exact():
    bits = np.random.default_rng(0).integers(0, 2**16, (64, 32)).astype(np.uint16)  # NaN and infinity included
    got = nki.simulate(transposed_by_matmul)(bits.view(BF16))
    np.testing.assert_array_equal(got.view(np.uint16), bits.T)


@nki.jit
def gathered_in_partitions(a, index):
    tile = nl.load(index)
    result = nl.ndarray(index.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=result, data=nl.load(a), indices=tile)
    return stored(result)


def test_nc_n_gather_indexes_the_flattened_partition():
    a = drawn(8, 4, 6)
    index = np.random.default_rng(0).integers(0, 24, (8, 10)).astype(np.uint32)
    expected = np.take_along_axis(a.reshape(8, 24), index.astype(np.int64), axis=1)
    np.testing.assert_array_equal(nki.simulate(gathered_in_partitions)(a, index), expected)


@nki.jit
def partition_bits(a):
    total = nl.ndarray((1, a.shape[1]), dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_partition_reduce(dst=total, op=nl.bitwise_or, data=nl.load(a))
    return stored(total)


def test_partitions_combine_bitwise():
    a = np.random.default_rng(0).integers(0, 16, (5, 8)).astype(np.int32)
    np.testing.assert_array_equal(nki.simulate(partition_bits)(a)[0], np.bitwise_or.reduce(a, axis=0))


@nki.jit
def four_dimensional(a):
    result = nl.ndarray((a.shape[3], a.shape[1], a.shape[2], a.shape[0]), dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=result, src=a, axes=(3, 1, 2, 0), dge_mode=nisa.dge_mode.hwdge)
    return stored(result)


def test_a_direct_dma_transpose_of_four_dimensions():
    a = drawn(8, 3, 2, 64).astype(BF16)
    np.testing.assert_array_equal(nki.simulate(four_dimensional)(a), a.transpose(3, 1, 2, 0))


# ---- run-time selection, constants, casts in a DMA -----------------------------------------------------------------


@nki.jit
def selected(a, index):
    one = nl.load(index)
    batch = nl.ndarray((a.shape[1], a.shape[2]), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=batch, src=a.select(0, one))  # cast by the DMA
    column = nl.ndarray((a.shape[1], 1), dtype=nl.bfloat16, buffer=nl.sbuf)
    start = nisa.register_alloc()
    nisa.register_load(start, one)
    pattern = batch.ap(pattern=[[a.shape[2], a.shape[1]], [1, 1]], scalar_offset=start, indirect_dim=1)
    nisa.tensor_copy(dst=column, src=pattern)
    copied = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(copied, start)
    return stored(batch), stored(column), stored(copied)


@pytest.mark.parametrize("index", [0, 3])
def test_a_run_time_index_selects_a_batch_and_a_column(index):
    a = drawn(4, 16, 8)
    batch, column, copied = nki.simulate(selected)(a, np.full((1, 1), index, np.int32))
    np.testing.assert_array_equal(batch, a[index].astype(BF16))
    np.testing.assert_array_equal(column, batch[:, index : index + 1])
    assert copied == index


@nki.jit
def constant_rows():
    table = nl.shared_constant(TABLE)
    zeros = nl.zeros_like(nl.load(table))
    nisa.tensor_tensor(dst=zeros, data1=zeros, data2=nl.load(table), op=nl.add)
    return stored(zeros)


TABLE = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_a_shared_constant_is_part_of_the_program():
    np.testing.assert_array_equal(nki.simulate(constant_rows)(), TABLE)
