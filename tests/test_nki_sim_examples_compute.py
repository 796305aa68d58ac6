"""AWS's published ISA test cases for compute instructions, run on the simulator (or on the real nki if present).

The cases of aws-neuron-sdk's nki/test are written in an API that was removed: their inputs and expected values are
taken, the kernels are our own, in today's API. Every case names its source file.
"""

import ml_dtypes
import nki_sim
import numpy as np
import pytest
from nki_sim.examples import Examples, check, drawn

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

FP32_MIN = -3.4028235e38
EXAMPLES = Examples()
case = EXAMPLES.case


def stored(tile):
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=tile)
    return result


@nki.jit
def activation_exp(a):
    tile = nl.load(a)
    nisa.activation(dst=tile, op=nl.exp, data=tile)
    return stored(tile)


@case("test_nki_isa_activation.py", "exp of values up to 100")
def _():
    a = drawn(128, 1024)
    with np.errstate(over="ignore"):
        return [(nki.simulate(activation_exp)(a), np.exp(a), 1e-5)]


@nki.jit
def activation_square(b, c):
    tile, bias = nl.load(b), nl.load(c)
    result = nl.ndarray(b.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.square, data=tile, bias=bias, scale=2.0)
    return stored(result)


@case("test_nki_isa_activation.py", "square(2 b + c) to bfloat16")
def _():
    b, c = drawn(128, 512), drawn(128, 1)
    return [(nki.simulate(activation_square)(b, c), np.square(b * 2 + c).astype(ml_dtypes.bfloat16), 0.0)]


@nki.jit
def strict_lower(a):
    tile = nl.load(a)
    # Row minus column: positive strictly below the diagonal.
    nisa.affine_select(
        dst=tile,
        pattern=[[-1, 128]],
        channel_multiplier=1,
        on_true_tile=tile,
        on_false_value=FP32_MIN,
        cmp_op=nl.greater,
    )
    return stored(tile)


@case("test_nki_isa_affine_select.py", "upper triangle replaced")
def _():
    a = drawn(128, 128)
    expected = np.where(np.tri(128, k=-1, dtype=bool), a, np.float32(FP32_MIN))
    return [(nki.simulate(strict_lower)(a), expected, 0.0)]


@nki.jit
def copy_predicated(predicate, on_true, on_false):
    chosen, source, result = nl.load(predicate), nl.load(on_true), nl.load(on_false)
    nisa.tensor_copy_predicated(dst=result, src=source, predicate=chosen)
    return stored(result)


@case("test_nki_isa_copypredicated.py", "where(a <= 0.8, a, b)")
def _():
    a, b = drawn(128, 512), drawn(128, 512, seed=1)
    chosen = (a <= 0.8).astype(np.uint8)
    return [(nki.simulate(copy_predicated)(chosen, a, b), np.where(chosen, a, b), 0.0)]


@nki.jit
def affine_patterns():
    row = nl.ndarray((1, 512), dtype=nl.int32, buffer=nl.sbuf)
    column = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    falling = nl.ndarray((1, 512), dtype=nl.int32, buffer=nl.sbuf)
    offset = nl.ndarray((128, 1), dtype=nl.int32, buffer=nl.sbuf)
    both = nl.ndarray((128, 512), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=row, pattern=[[1, 512]])
    nisa.iota(dst=column, pattern=[[1, 1]], channel_multiplier=1)
    nisa.iota(dst=falling, pattern=[[-1, 512]])
    nisa.iota(dst=offset, pattern=[[1, 1]], offset=5, channel_multiplier=2)
    nisa.iota(dst=both, pattern=[[1, 512]], channel_multiplier=1)
    return stored(row), stored(column), stored(falling), stored(offset), stored(both)


@case("test_nki_isa_iota.py", "five affine patterns")
def _():
    row, column = np.arange(512)[None], np.arange(128)[:, None]
    expected = (row, column, -row, 5 + 2 * column, row + column)
    return [(got, want, 0.0) for got, want in zip(nki.simulate(affine_patterns)(), expected, strict=True)]


@nki.jit
def eight_largest(a):
    tile = nl.load(a)
    largest = nl.ndarray((a.shape[0], 8), dtype=nl.float32, buffer=nl.sbuf)
    index = nl.ndarray((a.shape[0], 8), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=largest, src=tile)
    nisa.nc_find_index8(dst=index, data=tile, vals=largest)
    return stored(largest), stored(index)


@case("test_nki_isa_max8.py", "descending")
def _():
    a = drawn(32, 128, scale=1.0)
    return [(nki.simulate(eight_largest)(a)[0], np.sort(a, axis=1)[:, :-9:-1], 0.0)]


@case("test_nki_isa_nc_find_index8.py", "positions of the 8 largest")
def _():
    a = drawn(32, 128, scale=1.0)
    return [(nki.simulate(eight_largest)(a)[1], np.argsort(-a, axis=1)[:, :8], 0.0)]


@nki.jit
def replace_eight(a, imm):
    tile = nl.load(a)
    largest = nl.ndarray((a.shape[0], 8), dtype=nl.float32, buffer=nl.sbuf)
    index = nl.ndarray((a.shape[0], 8), dtype=nl.uint32, buffer=nl.sbuf)
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.max8(dst=largest, src=tile)
    nisa.nc_match_replace8(dst=result, data=tile, vals=largest, imm=imm, dst_idx=index)
    return stored(result), stored(index)


def _replaced(shape, imm):
    a = drawn(*shape, scale=1.0)
    flat = a.reshape(shape[0], -1).copy()
    index = np.argsort(-flat, axis=1)[:, :8]
    np.put_along_axis(flat, index, imm, axis=1)
    result, positions = nki.simulate(replace_eight)(a, imm)
    return [(result, flat.reshape(shape), 0.0), (positions, index, 0.0)]


@case("test_nki_isa_nc_match_replace8.py", "-inf in (4, 16)")
def _():
    return _replaced((4, 16), float("-inf"))


@case("test_nki_isa_nc_match_replace8.py", "-inf with indices in (128, 512)")
def _():
    return _replaced((128, 512), float("-inf"))


@case("test_nki_isa_nc_match_replace8.py", "0 in a 3-D tile (128, 4, 4)")
def _():
    return _replaced((128, 4, 4), 0.0)


ROTATION = tuple((i - 1) % 32 for i in range(32))


@nki.jit
def shuffle(a, mask, rows):
    source = nl.load(a)
    result = nl.ndarray((rows, a.shape[1]), dtype=a.dtype, buffer=nl.sbuf)
    nisa.nc_stream_shuffle(dst=result, src=source, shuffle_mask=mask)
    return stored(result)


@case("test_nki_isa_nc_stream_shuffle.py", "rotate 32 partitions")
def _():
    a = drawn(32, 128)
    return [(nki.simulate(shuffle)(a, ROTATION, 32), np.roll(a, 1, axis=0), 0.0)]


@case("test_nki_isa_nc_stream_shuffle.py", "one partition to 32")
def _():
    a = drawn(1, 128)
    return [(nki.simulate(shuffle)(a, (0,) * 32, 32), np.repeat(a, 32, axis=0), 0.0)]


@case("test_nki_isa_nc_stream_shuffle.py", "one mask over four quadrants")
def _():
    a = drawn(128, 128)
    expected = np.roll(a.reshape(4, 32, 128), 1, axis=1).reshape(128, 128)
    return [(nki.simulate(shuffle)(a, ROTATION, 128), expected, 0.0)]


@nki.jit
def partition_sum(a):
    tile = nl.load(a)
    total = nl.ndarray((1, a.shape[1], a.shape[2]), dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_partition_reduce(dst=total, op=nl.add, data=tile)
    return stored(total)


@case("test_nki_isa_partition_reduce.py", "sum of (128, 32, 4) over partitions")
def _():
    a = drawn(128, 32, 4)
    return [(nki.simulate(partition_sum)(a), a.sum(axis=0, keepdims=True), 1e-5)]


@case("test_nki_isa_partition_reduce.py", "four batches of (128, 32, 8)")
def _():
    a = drawn(4, 128, 32, 8)
    return [(nki.simulate(partition_sum)(x), x.sum(axis=0, keepdims=True), 1e-5) for x in a]


@nki.jit
def transposes(a, b):
    tile = nl.load(a)
    at = nl.ndarray((a.shape[1], a.shape[0]), dtype=a.dtype, buffer=nl.psum)
    nisa.nc_transpose(dst=at, data=tile)
    evicted = nl.ndarray(at.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=at)
    small = nl.load(b)
    bt = nl.ndarray((b.shape[1], b.shape[0]), dtype=b.dtype, buffer=nl.sbuf)
    nisa.nc_transpose(dst=bt, data=small, engine=nisa.engine.vector)
    return stored(evicted), stored(bt)


@case("test_nki_isa_nc_transpose.py", "(128, 64) by default, (32, 2) on the Vector engine")
def _():
    a, b = drawn(128, 64), drawn(32, 2)
    at, bt = nki.simulate(transposes)(a, b)
    return [(at, a.T, 0.0), (bt, b.T, 0.0)]


@nki.jit
def matmul(a, b):
    result = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    for i in range(a.shape[0] // 128):
        rows = nl.ds(i * 128, 128)
        nisa.nc_matmul(dst=result, stationary=nl.load(a[rows, :]), moving=nl.load(b[rows, :]), accumulate=(i > 0))
    evicted = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=result)
    return stored(evicted)


@case("test_nki_isa_nc_matmul.py", "128 x 128 x 512")
def _():
    a, b = drawn(128, 128), drawn(128, 512)
    return [(nki.simulate(matmul)(a, b), a.T @ b, 1e-5)]


@case("test_nki_isa_nc_matmul.py", "contraction 256 in two accumulations")
def _():
    a, b = drawn(256, 128), drawn(256, 512)
    return [(nki.simulate(matmul)(a, b), a.T @ b, 1e-5)]


@nki.jit
def tiled_matmul(g, h, row, column):
    result = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(
        dst=result, stationary=nl.load(g), moving=nl.load(h), tile_position=(row, column), tile_size=(64, 64)
    )
    evicted = nl.ndarray((64, 512), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=result)
    return stored(evicted)


@case("test_nki_isa_nc_matmul.py", "batches of 64 x 64 at four tile positions")
def _():
    g, h = drawn(4, 64, 64), drawn(4, 64, 512)
    places = [(0, 0), (0, 64), (64, 0), (64, 64)]
    return [(nki.simulate(tiled_matmul)(x, y, *p), x.T @ y, 1e-5) for x, y, p in zip(g, h, places, strict=True)]


@nki.jit
def double_row(a, b):
    result = nl.ndarray((a.shape[2], b.shape[2]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=result, stationary=nl.load(a), moving=nl.load(b), perf_mode=nisa.matmul_perf_mode.double_row)
    evicted = nl.ndarray(result.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=evicted, src=result)
    return stored(evicted)


@case("test_nki_isa_nc_matmul.py", "double row, contraction 256 of float8_e5m2 ones")
def _():
    a, b = (np.ones(shape, ml_dtypes.float8_e5m2) for shape in ((128, 2, 1), (128, 2, 512)))
    return [(nki.simulate(double_row)(a, b), np.full((1, 512), 256.0), 0.0)]


@pytest.mark.parametrize("example", EXAMPLES.cases)
def test_published_example_gives_the_published_values(example):
    check(example)
