"""Views, run-time addresses and device loops: what a kernel reads and writes where."""

import ml_dtypes
import nki_sim
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nki_sim.examples import drawn
from test_nki_sim_examples_compute import stored

nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

# ---- views: every chain of view methods reads what numpy's equivalent chain reads ----------------------------------


@st.composite
def view_steps(draw):
    """(shape, steps): a [P, ...] shape, and view methods whose arguments fit the shape they meet."""
    shape = [draw(st.integers(1, 5)), *draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))]
    array, steps = np.empty(shape), []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(_step(array.shape))
        try:
            after = apply_to_numpy(array, step)
        except ValueError:  # a reshape that needs a copy; tensors refuse it too (test_nki_sim_refusals.py)
            continue
        if 2 <= after.ndim <= 5:
            array = after
            steps.append(step)
    return tuple(shape), tuple(steps)


def _step(shape):
    free = st.integers(1, len(shape) - 1)
    options = [
        st.permutations(range(1, len(shape))).map(lambda p: ("permute", (0, *p))),
        free.flatmap(lambda d: st.integers(0, shape[d] - 1).map(lambda i: ("index", d, i))),
        st.integers(0, len(shape) - 1).flatmap(lambda d: _slices(d, shape)),
        free.map(lambda d: ("expand_dim", d)),
        st.just(("flatten",)),
    ]
    ones = [d for d in range(1, len(shape)) if shape[d] == 1]
    if ones:
        options.append(st.tuples(st.just("broadcast"), st.sampled_from(ones), st.integers(1, 4)))
    even = [d for d in range(1, len(shape)) if shape[d] % 2 == 0]
    if even:
        options.append(st.sampled_from(even).map(lambda d: ("split", d)))
    return st.one_of(options)


def _slices(dim, shape):
    size = shape[dim]
    bounds = st.integers(0, size - 1).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, size)))
    steps = st.just(1) if dim == 0 else st.integers(1, 3)
    return st.tuples(bounds, steps).map(lambda t: ("slice", dim, *t[0], t[1]))


def apply_to_numpy(array, step):
    name, *args = step
    if name == "permute":
        return array.transpose(args[0])
    if name == "index":
        # An on-chip view keeps at least two dimensions.
        keys = [slice(None)] * array.ndim
        keys[args[0]] = args[1] if array.ndim > 2 else slice(args[1], args[1] + 1)
        return array[tuple(keys)]
    if name == "slice":
        index = [slice(None)] * array.ndim
        index[args[0]] = slice(*args[1:])
        return array[tuple(index)]
    if name == "expand_dim":
        return np.expand_dims(array, args[0])
    if name == "broadcast":
        return np.broadcast_to(array, (*array.shape[: args[0]], args[1], *array.shape[args[0] + 1 :]))
    if name == "split":
        d = args[0]
        return array.reshape((*array.shape[:d], 2, array.shape[d] // 2, *array.shape[d + 1 :]), copy=False)
    return array.reshape((array.shape[0], -1), copy=False)


def apply_to_tensor(tensor, step):
    name = step[0]
    if name == "permute":
        return tensor.permute(step[1])
    if name == "index":
        return tensor.select(step[1], step[2])
    if name == "slice":
        return tensor.slice(step[1], step[2], step[3], step[4])
    if name == "expand_dim":
        return tensor.expand_dim(step[1])
    if name == "broadcast":
        return tensor.broadcast(step[1], step[2])
    if name == "split":
        return tensor.reshape_dim(step[1], (2, -1))
    return tensor.flatten_dims(1, tensor.ndim - 1)


@nki.jit
def viewed(a, steps):
    view = nl.load(a)
    for step in steps:
        view = apply_to_tensor(view, step)
    result = nl.ndarray(view.shape, dtype=view.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=result, src=view)  # not tensor_copy: a DMA may start at any partition
    return stored(result)


@given(view_steps())
def test_a_chain_of_views_reads_the_elements_numpy_reads(drawn_steps):
    shape, steps = drawn_steps
    a = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    expected = a
    for step in steps:
        expected = apply_to_numpy(expected, step)
    np.testing.assert_array_equal(nki.simulate(viewed)(a, steps), expected)


@nki.jit
def rearranged(a):
    tile = nl.load(a)
    view = tile.rearrange(("p", ("h", "w")), ("p", "w", "h"), {"h": 4})
    result = nl.ndarray(view.shape, dtype=view.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=view)
    return stored(result)


def test_rearrange_splits_and_permutes_by_name():
    a = drawn(128, 24)
    np.testing.assert_array_equal(nki.simulate(rearranged)(a), a.reshape(128, 4, 6).transpose(0, 2, 1))


@nki.jit
def bytes_of(a):
    tile = nl.load(a)
    part = tile.view(nl.uint8)[:, 4:8]
    pattern = tile.ap(pattern=[[2 * a.shape[1], 128], [2, a.shape[1]]], dtype=nl.bfloat16, offset=1)
    return stored(part), stored(pattern)


def test_views_reinterpret_the_bits():
    a = drawn(128, 4)
    second, high_halves = nki.simulate(bytes_of)(a)
    np.testing.assert_array_equal(second, a.view(np.uint8)[:, 4:8])
    np.testing.assert_array_equal(high_halves, a.view(ml_dtypes.bfloat16)[:, 1::2])


@nki.jit
def written_through_views(a):
    tile = nl.zeros((128, 4, 6), dtype=nl.float32)
    nisa.dma_copy(dst=tile.permute((0, 2, 1)), src=a)
    nisa.tensor_scalar(dst=tile[:, 1, 0:6:2], data=tile[:, 1, 0:6:2], op0=nl.multiply, operand0=2.0)
    return stored(tile)


def test_writes_through_a_view_reach_the_storage():
    a = drawn(128, 6, 4)
    expected = a.transpose(0, 2, 1).copy()
    expected[:, 1, ::2] *= 2
    np.testing.assert_array_equal(nki.simulate(written_through_views)(a), expected)


# ---- gathers -------------------------------------------------------------------------------------------------------


@nki.jit
def keys_transposed(table, index):
    """[128, 1, 4, k]: the transposed keys of 512-element rows, gathered by a [128, n] index tile."""
    count = index.shape[0] * index.shape[1]
    result = nl.ndarray((128, 1, 4, count), dtype=table.dtype, buffer=nl.sbuf)
    rows = table.reshape((table.shape[0], 1, 4, 128)).ap(
        pattern=[[512, count], [512, 1], [128, 4], [1, 128]], vector_offset=nl.load(index), indirect_dim=0
    )
    nisa.dma_transpose(dst=result, src=rows, axes=(3, 1, 2, 0))
    return stored(result)


def test_a_gathering_transpose_takes_indices_column_by_column():
    table = drawn(300, 512).astype(ml_dtypes.bfloat16)
    index = np.random.default_rng(0).integers(0, 300, (128, 3)).astype(np.uint32)
    expected = table[index.T.reshape(-1)].reshape(384, 1, 4, 128).transpose(3, 1, 2, 0)
    np.testing.assert_array_equal(nki.simulate(keys_transposed)(table, index), expected)


@nki.jit
def gathered_columns(table, index):
    tile = nl.load(index)
    rows = nl.ndarray((128, index.shape[1], table.shape[1]), dtype=table.dtype, buffer=nl.sbuf)
    for column in range(index.shape[1]):
        one = tile.ap(pattern=[[index.shape[1], 128], [1, 1]], offset=column)
        source = table.ap(pattern=[[table.shape[1], 128], [1, table.shape[1]]], vector_offset=one, indirect_dim=0)
        nisa.dma_copy(dst=rows[:, column, :], src=source)
    return stored(rows)


def test_one_column_at_a_time_gathers_repeated_and_unordered_rows():
    table = drawn(50, 16)
    index = np.random.default_rng(1).integers(0, 50, (128, 5)).astype(np.int32)
    np.testing.assert_array_equal(nki.simulate(gathered_columns)(table, index), table[index])


@nki.jit
def skipped_without_memset(table, index):
    rows = nl.ndarray((128, 16), dtype=table.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, nl.load(index)), oob_mode=nisa.oob_mode.skip)
    return stored(rows)


def test_rows_a_gather_skipped_stay_undefined():
    index = np.zeros((128, 1), np.int32)
    nki.simulate(skipped_without_memset)(drawn(50, 16), index)
    index[7] = -1
    with pytest.raises(nki_sim.NkiValidationError, match=r"16 undefined elements .* first at \[7, 0\]"):
        nki.simulate(skipped_without_memset)(drawn(50, 16), index)


# ---- device loops and registers ------------------------------------------------------------------------------------


@nki.jit
def doubled_rows(a, limit):
    """Row blocks of 4, doubled in a device loop with a run-time bound."""
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    width = a.shape[1]
    bound = nisa.register_alloc()
    nisa.register_load(bound, limit)

    def body(i):
        tile = nl.ndarray((4, width), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=a.ap(pattern=[[width, 4], [1, width]], scalar_offset=i))
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.dma_copy(dst=result.ap(pattern=[[width, 4], [1, width]], scalar_offset=i), src=tile)

    nl.fori_loop(0, bound, body, step=4)
    return result


@pytest.mark.parametrize("rows", [4, 32])
def test_a_device_loop_counts_once_as_program_and_each_trip_as_work(rows):
    a = drawn(rows, 8)
    with nki_sim.trace() as t:
        result = nki.simulate(doubled_rows)(a, np.full((1, 1), rows, np.int32))
    np.testing.assert_array_equal(result, 2 * a)
    assert t.engines["vector"].program == 1
    assert t.engines["vector"].issued == rows // 4


@nki.jit
def nested_loops(a):
    """Each element doubled, by a loop over rows around a loop over columns."""
    rows, columns = a.shape
    result = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)

    def row(i):
        line = nl.ndarray((1, columns), dtype=a.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=line, src=a.ap(pattern=[[columns, 1], [1, columns]], scalar_offset=i))

        def column(j):
            element = line.ap(pattern=[[columns, 1], [1, 1]], scalar_offset=j, indirect_dim=1)
            one = nl.ndarray((1, 1), dtype=a.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=one, src=element)
            nisa.tensor_scalar(dst=one, data=one, op0=nl.multiply, operand0=2.0)
            nisa.tensor_copy(dst=element, src=one)

        nl.fori_loop(0, columns, column)
        nisa.dma_copy(dst=result.ap(pattern=[[columns, 1], [1, columns]], scalar_offset=i), src=line)

    nl.fori_loop(0, rows, row)
    return result


def test_device_loops_nest_and_their_bodies_count_once():
    a = drawn(3, 5)
    with nki_sim.trace() as t:
        np.testing.assert_array_equal(nki.simulate(nested_loops)(a), 2 * a)
    assert t.program_size == 5
    assert t.by_instruction["vector", "tensor_scalar"].issued == 15


@nki.jit
def triangle(limits):
    """Row i counts to limits[i] in an inner loop with a run-time bound, which may be 0."""
    rows = limits.shape[0]
    total = nl.zeros((1, 1), dtype=nl.int32)
    one = nl.ones((1, 1), dtype=nl.int32)
    bound = nisa.register_alloc()

    def row(i):
        limit = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=limit, src=limits.ap(pattern=[[1, 1], [1, 1]], scalar_offset=i))
        nisa.register_load(bound, limit)

        def step(j):
            nisa.tensor_tensor(dst=total, data1=total, data2=one, op=nl.add)

        nl.fori_loop(0, bound, step)

    nl.fori_loop(0, rows, row)
    return stored(total)


@pytest.mark.parametrize("limits", [(0, 3, 2), (2, 0, 1)])
def test_an_inner_loop_may_have_another_number_of_trips_each_time(limits):
    assert nki.simulate(triangle)(np.int32(limits)[:, None]) == sum(limits)


@nki.jit
def countdown(start):
    """The sum of start, start - 1, ..., 1 by a while loop on a register."""
    count = nl.load(start)
    total = nl.zeros((1, 1), dtype=nl.int32)
    one = nl.ones((1, 1), dtype=nl.int32)
    condition = nisa.register_alloc()
    nisa.register_load(condition, count)

    def body(r):
        nisa.tensor_tensor(dst=total, data1=total, data2=count, op=nl.add)
        nisa.tensor_tensor(dst=count, data1=count, data2=one, op=nl.subtract)
        nisa.register_load(r, count)
        return r

    nl.while_loop(condition, body)
    return stored(total)


@pytest.mark.parametrize("start", [0, 1, 10])
def test_a_while_loop_runs_until_its_register_is_zero(start):
    assert nki.simulate(countdown)(np.full((1, 1), start, np.int32)) == start * (start + 1) // 2


@nki.jit
def reused_memory():
    for _i in range(40):
        big = nl.ndarray((128, 25000), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=big, value=0.0)
        big = None
    return stored(nl.zeros((1, 1), dtype=nl.float32))


def test_a_tile_without_references_frees_its_memory():
    with nki_sim.trace() as t:
        nki.simulate(reused_memory)()
    assert t.peak_bytes[nl.sbuf] == 100_000


# ---- the two ends of a kernel --------------------------------------------------------------------------------------


@nki.jit
def incremented(a, into):
    tile = nl.load(a)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    nisa.dma_copy(dst=into, src=tile)
    return stored(tile), into


def test_torch_tensors_come_back_as_torch_tensors_and_changed_inputs_are_written_back():
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        a, into = torch.arange(8).reshape(2, 4).to(dtype), torch.zeros(2, 4, dtype=dtype)
        result, alias = nki.simulate(incremented)(a, into)
        torch.testing.assert_close(result, a + 1)
        torch.testing.assert_close(alias, a + 1)
        torch.testing.assert_close(into, a + 1)
        torch.testing.assert_close(a, torch.arange(8).reshape(2, 4).to(dtype))


def test_keyword_arguments_and_the_grid_of_one_reach_the_kernel():
    a = np.zeros((2, 4), np.float32)
    result, _ = incremented[1](into=a.copy(), a=a)
    np.testing.assert_array_equal(result, 1)
