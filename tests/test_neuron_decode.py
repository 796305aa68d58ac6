"""Byte decode: both paths, code by code, against the definitions, and what their graphs are made of."""

from __future__ import annotations

import neuron_sim
import numpy as np
import oracle
import pytest
import torch
from compare import assert_equal
from neuron_problems import PLATFORM  # noqa: F401  (installs the device)
from oracle import TABLES

from deepinfer_ops.neuron.decode import decode_keys, decode_queries
from deepinfer_ops.record_format import INDEX_FORMATS, KV_FORMATS

FORMATS = {f"main {fmt.name}": fmt for fmt in KV_FORMATS.values()} | {
    f"index {fmt.name}": fmt for fmt in INDEX_FORMATS.values()
}
PATHS = pytest.mark.parametrize("fast", [True, False], ids=["fast", "exact"])
CAPPED = [code for code in range(256) if code & 0x78 != 0x78 or code & 0x7F == 0x7F]
"""e4m3 codes that Trn2 reads as we do: exponent field below 15, and the NaN codes."""


def oracle_format(fmt):
    return (oracle.KV if fmt.dim == 512 else oracle.INDEX)[fmt.bytes]


def every_code_pair(fmt):
    """Records in which every element code meets every scale code: one scale code a record, element codes in turn."""
    elements = CAPPED if fmt.element == "e4m3" else range(256)
    scales = CAPPED if fmt.scale == "e4m3" else range(256)
    width = fmt.data_bytes
    rounds = -(-len(elements) // width)
    data = np.resize(np.array(elements, dtype=np.uint8), (rounds, width))
    data = np.concatenate([np.roll(data, shift, axis=1) for shift in (0, 1)])  # every code in both halves of a pair
    records = np.array([[*row] for _ in scales for row in data], dtype=np.uint8)
    codes = np.repeat(np.array(scales, dtype=np.uint8), len(data))[:, None].repeat(fmt.scale_bytes, axis=1)
    return records, codes


def assert_decoded(got, data, scales, fmt):
    want = oracle.decode_keys(data, scales, oracle_format(fmt))
    tiny = np.abs(want) < oracle.SMALLEST_NORMAL  # may be flushed
    actual = got.cpu().double().numpy()
    assert_equal(torch.from_numpy(np.where(tiny, 0.0, actual)), np.where(tiny, 0.0, want))
    assert np.all(np.abs(actual[tiny]) <= np.abs(want[tiny]))


@PATHS
@pytest.mark.parametrize("name", FORMATS)
def test_every_element_code_under_every_scale_code_decodes_to_the_definition(name, fast):
    fmt = FORMATS[name]
    data, scales = every_code_pair(fmt)
    device = [torch.from_numpy(a).to("neuron") for a in (data, scales)]
    assert_decoded(decode_keys(*device, fmt, fast=fast), data, scales, fmt)


def test_the_exact_path_reads_codes_above_the_cap_too():
    fmt = KV_FORMATS[528]
    data = np.resize(np.arange(256, dtype=np.uint8), (1, 512))
    scales = np.full((1, 16), 127, dtype=np.uint8)
    got = decode_keys(*(torch.from_numpy(a).to("neuron") for a in (data, scales)), fmt, fast=False)
    assert_decoded(got, data, scales, fmt)
    assert got.cpu().max() == 448


def test_codes_above_the_cap_are_zero_on_the_fast_path():
    """Trn2 reads exponent field 15 as infinity or NaN, which count as 0: wrong, documented, and no poison."""
    fmt = KV_FORMATS[528]
    data = np.full((1, 512), 0x78, dtype=np.uint8)
    data[0, 1] = 0x77
    scales = np.full((1, 16), 127, dtype=np.uint8)
    got = decode_keys(*(torch.from_numpy(a).to("neuron") for a in (data, scales)), fmt, fast=True).cpu()
    assert got[0, 1] == 240
    assert got.count_nonzero() == 1


@PATHS
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x7E, 0x77])
def test_dead_records_are_zero_whatever_they_hold(name, fast, byte):
    fmt = FORMATS[name]
    data = torch.full((3, fmt.data_bytes), byte, dtype=torch.uint8, device="neuron")
    scales = torch.full((3, fmt.scale_bytes), 0x7E if fmt.scale == "e4m3" else 254, dtype=torch.uint8, device="neuron")
    live = torch.zeros(3, dtype=torch.bool, device="neuron")
    assert_equal(decode_keys(data, scales, fmt, fast=fast, live=live), 0.0)


def query_bytes(fmt):
    data = np.resize(
        np.array(CAPPED if fmt.element == "e4m3" else range(256), dtype=np.uint8), (8, 1, 32, fmt.data_bytes)
    )
    scales = np.arange(8 * 32 * 4, dtype=np.uint8).reshape(8, 1, 32, 4)
    return torch.from_numpy(data), torch.from_numpy(scales)


@PATHS
@pytest.mark.parametrize("packed", [False, True], ids=["uint8", "int16"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("index fp8", torch.float8_e4m3fn), ("index fp4", torch.uint8), ("index fp4", torch.int8)],
    ids=["fp8", "fp4", "fp4-int8"],
)
def test_queries_decode_to_the_definition_and_keep_their_nan(name, dtype, packed, fast):
    fmt = FORMATS[name]
    data, scales = query_bytes(fmt)
    q_data, q_sf = data.view(dtype), scales.view(torch.int16) if packed else scales
    want = oracle.decode_queries(q_data, q_sf).reshape(-1, 128)
    got = decode_queries(q_data.to("neuron"), q_sf.to("neuron"), fmt, fast=fast).cpu().double().numpy()
    assert np.isnan(want).any()
    tiny = np.abs(want) < oracle.SMALLEST_NORMAL
    finite = np.isfinite(want) & ~tiny
    assert np.array_equal(got[finite], want[finite])
    assert np.array_equal(np.isnan(got), np.isnan(want))


@PATHS
@pytest.mark.parametrize("name", FORMATS)
def test_the_graph_has_no_bitcast_but_that_of_contiguous_gathered_bytes(name, fast):
    fmt = FORMATS[name]

    def decode(table, rows):
        records = table[rows]
        return decode_keys(records[:, : fmt.data_bytes], records[:, fmt.data_bytes :], fmt, fast=fast)

    table = torch.zeros(8, fmt.bytes, dtype=torch.uint8, device="neuron")
    compiled = neuron_sim.compile_fullgraph(decode)
    compiled(table, torch.tensor([3, 1], device="neuron"))
    assert neuron_sim.graph_rules.check(compiled.graph) == []
    views = [target for target in compiled.targets() if target == "aten.view.dtype"]
    assert len(views) == (fast and "e4m3" in (fmt.element, fmt.scale))
    integers = {torch.int32, torch.int64} & {
        node.meta["val"].dtype for node in compiled.graph.graph.nodes if node.op == "call_function"
    }
    assert bool(integers) == (not fast)  # the fast path computes with floats only


def test_powers_of_two_are_exact():
    scales = torch.arange(256, dtype=torch.uint8).view(64, 4).to("neuron")
    ones = torch.full((64, 128), 0x38, dtype=torch.uint8, device="neuron")
    got = decode_keys(ones, scales, INDEX_FORMATS[132], fast=True).cpu().double().numpy()[:, ::32].reshape(-1)
    assert np.array_equal(got[1:255], TABLES["ue8m0"][1:255])
    assert got[0] == got[255] == 0.0
