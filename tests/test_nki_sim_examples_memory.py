"""AWS's published test cases for data movement: copies, gathers and scatters, transposes, registers and loops."""

import nki_sim
import numpy as np
import pytest
from nki_sim.examples import Examples, check, drawn
from test_nki_sim_examples_compute import stored

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

EXAMPLES = Examples()
case = EXAMPLES.case


@nki.jit
def copy_hbm(a, dge_mode):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=a, dge_mode=dge_mode)
    return result


@case("test_nki_isa_dma_copy.py", "plain copy of (256, 1)")
def _():
    a = drawn(256, 1)
    return [(nki.simulate(copy_hbm)(a, nisa.dge_mode.unknown), a, 0.0)]


@case("test_nki_isa_dma_copy.py", "copy by swdge")
def _():
    a = drawn(64, 512)
    return [(nki.simulate(copy_hbm)(a, nisa.dge_mode.swdge), a, 0.0)]


@nki.jit
def copy_sbuf_hwdge(a):
    tile = nl.load(a)
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=result, src=tile, dge_mode=nisa.dge_mode.hwdge)
    return stored(result)


@case("test_nki_isa_dma_copy.py", "SBUF copy by hwdge")
def _():
    a = drawn(128, 512)
    return [(nki.simulate(copy_sbuf_hwdge)(a), a, 0.0)]


def every(step, count):
    """An index tile 0, step, 2 step, ..."""
    index = nl.ndarray((count, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.iota(dst=index, pattern=[[1, 1]], channel_multiplier=step)
    return index


@nki.jit
def gather(table, step, oob_mode):
    index = every(step, 64)
    rows = nl.ndarray((64, 512), dtype=table.dtype, buffer=nl.sbuf)
    nisa.memset(dst=rows, value=-1.0)
    source = table.ap(pattern=[[512, 64], [1, 512]], vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=source, oob_mode=oob_mode)
    return stored(rows)


@nki.jit
def scatter(rows, step, oob_mode):
    index = every(step, 64)
    tile = nl.load(rows)
    result = nl.ndarray((128, 512), dtype=rows.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=nl.full((128, 512), -1.0, dtype=rows.dtype))
    target = result.ap(pattern=[[512, 64], [1, 512]], vector_offset=index, indirect_dim=0)
    nisa.dma_copy(dst=target, src=tile, oob_mode=oob_mode)
    return result


def _gathered(step, oob_mode):
    table = drawn(128, 512, scale=1.0)
    index = step * np.arange(64)
    expected = np.full((64, 512), -1, np.float32)
    expected[index < 128] = table[index[index < 128]]
    return [(nki.simulate(gather)(table, step, oob_mode), expected, 0.0)]


def _scattered(step, oob_mode):
    rows = drawn(64, 512, scale=1.0)
    index = step * np.arange(64)
    expected = np.full((128, 512), -1, np.float32)
    expected[index[index < 128]] = rows[index < 128]
    return [(nki.simulate(scatter)(rows, step, oob_mode), expected, 0.0)]


@case("test_nki_isa_dma_copy.py", "gather of every second row")
def _():
    return _gathered(2, nisa.oob_mode.error)


@case("test_nki_isa_dma_copy.py", "gather that skips rows out of bounds")
def _():
    return _gathered(3, nisa.oob_mode.skip)


@case("test_nki_isa_dma_copy.py", "scatter to every second row")
def _():
    return _scattered(2, nisa.oob_mode.error)


@case("test_nki_isa_dma_copy.py", "scatter that skips rows out of bounds")
def _():
    return _scattered(3, nisa.oob_mode.skip)


@case("test_nki_isa_dma_copy.py", "gather out of bounds is an IndexError")
def _():
    with pytest.raises(IndexError, match="out of bounds"):
        _gathered(3, nisa.oob_mode.error)
    return []


@case("test_nki_isa_dma_copy.py", "scatter out of bounds is an IndexError")
def _():
    with pytest.raises(IndexError, match="out of bounds"):
        _scattered(3, nisa.oob_mode.error)
    return []


@nki.jit
def scatter_add(rows):
    index = every(2, 64)
    tile = nl.load(rows)
    result = nl.ndarray((128, 512), dtype=rows.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result, src=nl.full((128, 512), 1.0, dtype=rows.dtype))
    target = result.ap(pattern=[[512, 64], [1, 512]], vector_offset=index, indirect_dim=0)
    nisa.dma_compute(dst=target, srcs=(target, tile), reduce_op=nl.add)
    return result


@case("test_nki_isa_dma_copy.py", "scatter that adds")
def _():
    rows = drawn(64, 512, scale=1.0)
    expected = np.ones((128, 512), np.float32)
    expected[::2] += rows
    return [(nki.simulate(scatter_add)(rows), expected, 0.0)]


@nki.jit
def gather_by_argument(table, index):
    return stored_rows(table.vector_select(0, nl.load(index)))


def stored_rows(view):
    rows = nl.ndarray(view.shape, dtype=view.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=view)
    return stored(rows)


@case("test_nki_nl_load_store_indirect.py", "gather by indices from HBM")
def _():
    table, index = drawn(128, 512), 2 * np.arange(64, dtype=np.int32)[:, None]
    return [(nki.simulate(gather_by_argument)(table, index), table[::2], 0.0)]


@case("test_nki_nl_load_store_indirect.py", "gather by indices from iota")
def _():
    return _gathered(2, nisa.oob_mode.error)


@nki.jit
def scatter_by_argument(rows, index):
    result = nl.ndarray((128, 512), dtype=rows.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=result.vector_select(0, nl.load(index)), src=nl.load(rows))
    return result


@case("test_nki_nl_load_store_indirect.py", "scatter by indices from HBM")
def _():
    rows, index = drawn(64, 512), 2 * np.arange(64, dtype=np.int32)[:, None]
    return [(nki.simulate(scatter_by_argument)(rows, index)[::2], rows, 0.0)]


@case("test_nki_nl_load_store_indirect.py", "scatter by indices from iota")
def _():
    return _scattered(2, nisa.oob_mode.error)


@nki.jit
def dma_transposes(a, from_hbm, dge_mode):
    result = nl.ndarray((a.shape[1], a.shape[0]), dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_transpose(dst=result, src=a if from_hbm else nl.load(a), dge_mode=dge_mode)
    return stored(result)


for _source in (True, False):
    for _mode in (nisa.dge_mode.unknown, nisa.dge_mode.hwdge):

        def _transposed(source=_source, mode=_mode):
            a = drawn(16, 128).astype(np.float16)
            return [(nki.simulate(dma_transposes)(a, source, mode), a.T, 0.0)]

        case("test_nki_isa_dma_transpose.py", f"{'HBM' if _source else 'SBUF'} to SBUF, {_mode.name}")(_transposed)


@nki.jit
def gather_transpose(table, index):
    count, inner, last = index.shape[0], table.shape[1], table.shape[2]
    result = nl.ndarray((last, inner, count), dtype=table.dtype, buffer=nl.sbuf)
    source = table.ap(
        pattern=[[inner * last, count], [last, inner], [1, last]], vector_offset=nl.load(index), indirect_dim=0
    )
    nisa.dma_transpose(dst=result, src=source, axes=(2, 1, 0))
    return stored(result)


@case("test_nki_isa_dma_transpose.py", "gathering transpose of uint16 (64, 4, 128)")
def _():
    table = np.arange(64 * 4 * 128).reshape(64, 4, 128).astype(np.uint16)
    index = np.arange(32, dtype=np.uint32)[:, None]
    return [(nki.simulate(gather_transpose)(table, index), table[:32].transpose(2, 1, 0), 0.0)]


@nki.jit
def sliced_copy(a):
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in range(a.shape[1] // 512):
        part = nl.ds(i * 512, 512)
        nisa.dma_copy(dst=result[:, part], src=nl.load(a[:, i * 512 : (i + 1) * 512]))
    return result


@case("test_nki_nl_dslice.py", "eight slices by nl.ds")
def _():
    a = drawn(128, 4096)
    return [(nki.simulate(sliced_copy)(a), a, 0.0)]


@nki.jit
def broadcast_rows(row):
    tile = nl.ndarray((128, row.shape[1]), dtype=row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=row.ap(pattern=[[0, 128], [1, row.shape[1]]]))
    return stored(tile)


@case("test_nki_nl_broadcast.py", "one row to 128 partitions")
def _():
    row = drawn(1, 64).astype(np.int32)
    return [(nki.simulate(broadcast_rows)(row), np.repeat(row, 128, axis=0), 0.0)]


@pytest.mark.parametrize("example", EXAMPLES.cases)
def test_published_example_gives_the_published_values(example):
    check(example)
