"""Illegal uses are refused with a message that names the limit. AWS's own simulator accepts several of them."""

import nki_sim
import numpy as np
import pytest
from nki_sim.examples import Refusals

BACKEND = nki_sim.install()
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

import nki  # noqa: E402

pytestmark = pytest.mark.skipif(BACKEND == "nki", reason="the messages are this simulator's, not the real package's")

A = np.ones((128, 64), np.float32)
INDEX = np.full((128, 1), 5, np.int32)
REFUSALS = Refusals()
refused = REFUSALS.refused


def tile(shape, dtype=nl.float32, buffer=nl.sbuf):
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def ones(shape, dtype=nl.float32):
    return nl.ones(shape, dtype=dtype)


# ---- memory: partitions, capacity, definedness ---------------------------------------------------------------------


@refused(r"129 partitions exceed 128 \(tile_size.pmax\)")
def more_than_128_partitions():
    tile((129, 4))


@refused(r"at least two dimensions|2 to 5 dimensions")
def one_dimensional_tile():
    tile((128,))


@refused(r"sbuf capacity per partition: .* exceed 212464 bytes")
def sbuf_overflow():
    held = (tile((128, 40000)), tile((128, 14000)))
    return held


@refused(r"psum capacity per partition: .* exceed 16384 bytes .8 banks of 2048")
def psum_overflow():
    # Nine tiles of one element each: every tile takes a whole bank.
    first = tile((128, 3584), buffer=nl.psum)
    second = tile((128, 1), buffer=nl.psum)
    third = tile((128, 1), buffer=nl.psum)
    return first, second, third


@refused("a: reads 8192 undefined elements")
def read_of_a_fresh_tile():
    nisa.reciprocal(dst=tile((128, 64)), data=nl.ndarray((128, 64), dtype=nl.float32, name="a"))


@refused(r"reads 128 undefined elements \(never written\), the first at \[0, 63\]")
def read_of_one_unwritten_column():
    a = tile((128, 64))
    nisa.memset(dst=a[:, 0:63], value=0.0)
    nisa.tensor_copy(dst=tile((128, 64)), src=a)


@refused("40 partitions may start at partition .0, 64., not at 32")
def start_partition_of_a_tall_tile():
    a = ones((128, 4))
    nisa.tensor_copy(dst=tile((40, 4)), src=a[32:72, :])


@refused("5 partitions may start at partition .0, 32, 64, 96., not at 3")
def start_partition_off_the_quadrant():
    nisa.memset(dst=tile((128, 4))[3:8, :], value=0.0)


@refused("partition step must be 1")
def every_second_partition():
    tile((128, 4))[0:128:2, :]


@refused("5000 elements per partition exceed 4096 in psum|capacity")
def psum_instruction_too_wide():
    nisa.memset(dst=tile((128, 5000), nl.bfloat16, nl.psum), value=0.0)


@refused("the partition dimension stays 128")
def reshape_over_partitions():
    tile((128, 4)).reshape((64, 8))


@refused("cannot become .* without a copy")
def reshape_of_a_strided_view():
    tile((128, 4, 8)).permute((0, 2, 1)).reshape((128, 32))


@refused("out of bounds 0..64")
def slice_beyond_the_end():
    tile((128, 64))[:, 0:65]


@refused("an on-chip view has at most 5 dimensions")
def view_of_six_dimensions():
    tile((128, 2, 2, 2, 2)).expand_dim(1)


@refused("the first stride must be 32")
def pattern_with_partition_step():
    tile((16, 32)).ap(pattern=[[64, 8], [1, 32]])


@refused("runs past the end of a partition")
def pattern_past_the_partition():
    tile((16, 32)).ap(pattern=[[32, 15], [1, 32]], offset=8)


@refused("the documents disagree")
def pattern_offset_on_an_offset_view():
    tile((16, 32))[:, 8:16].ap(pattern=[[32, 16], [1, 4]], offset=0)


@refused("the last dimension must be contiguous")
def reinterpret_across_a_step():
    tile((128, 64))[:, 0:64:2].view(nl.bfloat16)


@refused("assignment to a tensor")
def assignment():
    a = tile((128, 4))
    a[...] = 0.0


@refused("expected nl.sbuf")
def buffer_by_name():
    nl.ndarray((128, 4), dtype=nl.float32, buffer="sbuf")


@refused("is no dtype of Trn2")
def unknown_dtype():
    tile((128, 4), "float64")


# ---- run-time addresses and device loops ---------------------------------------------------------------------------


@refused(r"vector_offset\[0\] = 200 is out of bounds \(rows 0..127\)", A, np.full((128, 1), 200, np.int32))
def gather_out_of_bounds(table, index):
    nisa.dma_copy(dst=tile((128, 64)), src=table.vector_select(0, nl.load(index)))


@refused("must be one column", A, np.zeros((128, 2), np.int32))
def gather_by_two_columns(table, index):
    rows = table.ap(pattern=[[64, 128], [1, 64]], vector_offset=nl.load(index))
    nisa.dma_copy(dst=tile((128, 64)), src=rows)


@refused("must be in HBM", A, INDEX)
def gather_from_sbuf(table, index):
    nl.load(table).vector_select(0, nl.load(index))


@refused("only dimension 0", A, INDEX)
def gather_of_columns(table, index):
    table.vector_select(1, nl.load(index))


@refused("expected an int32 or uint32 tile in sbuf", A, INDEX)
def gather_by_hbm_index(table, index):
    table.vector_select(0, index)


@refused("need swdge", A, INDEX)
def gather_by_hwdge(table, index):
    rows = table.vector_select(0, nl.load(index))
    nisa.dma_copy(dst=tile((128, 64)), src=rows, dge_mode=nisa.dge_mode.hwdge)


@refused("scalar_offset 120 is out of bounds", A)
def scalar_offset_out_of_bounds(a):
    start = nisa.register_alloc(120)
    nisa.dma_copy(dst=tile((16, 64)), src=a.ap(pattern=[[64, 16], [1, 64]], scalar_offset=start))


@refused("exclude each other", A, INDEX)
def two_run_time_offsets(a, index):
    one = nl.load(index[0:1, :])
    a.ap(pattern=[[64, 128], [1, 64]], scalar_offset=one, vector_offset=nl.load(index))


@refused("documented for dma_copy, dma_transpose and tensor_copy only")
def scalar_offset_in_a_computation():
    a = ones((128, 64))
    start = nisa.register_alloc(1)
    nisa.reciprocal(dst=tile((128, 1)), data=a.ap(pattern=[[64, 128], [1, 1]], scalar_offset=start, indirect_dim=1))


@refused("read before any value")
def register_without_a_value():
    nisa.register_move(nisa.register_alloc(), nisa.register_alloc())


@refused("only be used as a scalar_offset")
def arithmetic_on_a_loop_counter():
    def body(i):
        ones((128, i * 2))

    nl.fori_loop(0, 2, body)


@refused("only be used as a scalar_offset")
def branch_on_a_loop_counter():
    def body(i):
        if i == 0:
            ones((128, 4))

    nl.fori_loop(0, 2, body)


@refused("a device loop's counter cannot be written")
def written_loop_counter():
    def body(i):
        nisa.register_move(i, 0)

    nl.fori_loop(0, 2, body)


@refused("trip 1 issues other instructions than trip 0")
def loop_body_that_changes():
    widths = {"next": 4}

    def body(i):
        widths["next"] = widths["next"] * 2
        ones((128, widths["next"]))

    nl.fori_loop(0, 2, body)


@refused("used after that trip ended")
def tile_that_outlives_its_trip():
    kept = {}

    def body(i):
        kept["tile"] = ones((128, 4))

    nl.fori_loop(0, 1, body)
    nisa.tensor_copy(dst=tile((128, 4)), src=kept["tile"])


@refused("made outside this device loop: pass accumulate explicitly")
def inferred_accumulation_over_trips():
    total = tile((64, 64), buffer=nl.psum)
    a = ones((128, 64))

    def body(i):
        nisa.nc_matmul(dst=total, stationary=a, moving=a)

    nl.fori_loop(0, 2, body)


@refused("the body must return None")
def loop_body_with_a_result():
    def body(i):
        return 1

    nl.fori_loop(0, 1, body)


@refused("cannot sit inside nl.no_reorder")
def ordered_device_loop():
    def body(i):
        ones((128, 4))

    with nl.no_reorder():
        nl.fori_loop(0, 1, body)


# ---- outputs, arguments, Python subset -----------------------------------------------------------------------------


@refused("outputs must be nl.shared_hbm")
def output_in_private_hbm():
    result = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.hbm)
    nisa.dma_copy(dst=result, src=nl.zeros((4, 4), dtype=nl.float32))
    return result


@refused("a kernel returns tensors")
def output_that_is_a_number():
    return 3


@refused("list arguments are refused", [A, A])
def list_argument(arrays):
    tile((128, 4))


@refused("NKI does not accept `is`")
def identity_comparison(a=None):
    if a is None:
        tile((128, 4))


@refused("NKI does not accept keyword-only parameters")
def keyword_only(*, a=1):
    tile((128, a))


@refused("NKI does not accept a comprehension")
def comprehension():
    return [tile((128, 4)) for _ in range(2)]


@refused("NKI does not accept lambda")
def anonymous_function():
    nl.fori_loop(0, 1, lambda i: tile((128, 4)))


@refused("NKI does not accept try")
def handled_error():
    try:
        tile((128, 4))
    except ValueError:
        tile((128, 8))


@refused("NKI does not accept `with` other than nl.no_reorder")
def other_context():
    with np.errstate():
        tile((128, 4))


def helper_with_identity(a):
    return a is not None


@refused("of helper_with_identity: NKI does not accept `is`")
def identity_comparison_in_a_helper():
    helper_with_identity(1)


@nki.jit
def inner_kernel():
    tile((128, 4))


@refused("nested @nki.jit kernels are refused")
def kernel_that_calls_a_kernel():
    inner_kernel()


@refused("the computing helpers of nl are not modelled")
def language_level_arithmetic():
    nl.add(ones((128, 4)), 1.0)


@pytest.mark.parametrize(("kernel", "args", "match"), REFUSALS.cases)
def test_illegal_use_is_refused(kernel, args, match):
    with pytest.raises(nki_sim.NkiValidationError, match=match):
        nki.simulate(kernel)(*args)


def test_nothing_works_outside_a_kernel():
    with pytest.raises(nki_sim.NkiValidationError, match="only inside a kernel"):
        nl.ndarray((128, 4), dtype=nl.float32)


def test_a_grid_of_two_cores_is_refused():
    with pytest.raises(nki_sim.NkiValidationError, match="only one core"):
        inner_kernel[2]
