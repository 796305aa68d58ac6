"""The record formats are written three times: for Python, for C++, and in the tests from the SPEC. All agree."""

from __future__ import annotations

import oracle
import pytest
import torch

from deepinfer_ops import _C
from deepinfer_ops.record_format import INDEX_FORMATS, KV_FORMATS, by_name

TABLES = {"kv": KV_FORMATS, "index": INDEX_FORMATS}
NAMES = [f"{table}_{fmt.name}" for table, formats in TABLES.items() for fmt in formats.values()]


def python(name: str):
    table, fmt = name.split("_")
    return by_name(TABLES[table], fmt)


def test_both_languages_know_the_same_formats():
    assert sorted(NAMES) == sorted(_C.record_formats())


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_the_compiled_format_equals_pythons(name):
    compiled = _C.record_formats()[name]
    assert {"dim", "group", "data_bytes", "scale_bytes", "bytes"} <= set(compiled)
    assert compiled == {field: getattr(python(name), field) for field in compiled}


@pytest.mark.parametrize(
    ("name", "dim", "group", "data_bytes", "scale_bytes", "bytes_", "element", "scale"),
    [
        ("kv_fp8", 512, 32, 512, 16, 528, "e4m3", "ue8m0"),
        ("kv_fp4", 512, 16, 256, 32, 288, "e2m1", "e4m3"),
        ("index_fp8", 128, 32, 128, 4, 132, "e4m3", "ue8m0"),
        ("index_fp4", 128, 32, 64, 4, 68, "e2m1", "ue8m0"),
    ],
)
def test_the_formats_are_those_of_the_spec(name, dim, group, data_bytes, scale_bytes, bytes_, element, scale):
    fmt = python(name)
    sizes = (fmt.dim, fmt.group, fmt.data_bytes, fmt.scale_bytes, fmt.bytes)
    assert sizes == (dim, group, data_bytes, scale_bytes, bytes_)
    assert (fmt.element, fmt.scale) == (element, scale)
    assert fmt.page_scale_offset(64) == 64 * data_bytes


@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_holds_the_same_table(name):
    table, fmt = name.split("_")
    mine = {"kv": oracle.KV, "index": oracle.INDEX}[table][python(name).bytes]
    assert mine.name == fmt
    assert (mine.dim, mine.group, mine.data_bytes, mine.scales) == tuple(
        getattr(python(name), field) for field in ("dim", "group", "data_bytes", "scale_bytes")
    )


@pytest.mark.parametrize("formats", TABLES.values(), ids=TABLES)
def test_a_table_is_keyed_by_the_bytes_of_its_entries_and_lists_them_in_messages(formats):
    assert all(fmt.bytes == size for size, fmt in formats.items())
    assert len({fmt.name for fmt in formats.values()}) == len(formats)
    with pytest.raises(ValueError, match="unknown record format 'fp3': expected one of fp4, fp8"):
        by_name(formats, "fp3")


def places_of_a_token(fmt, page: int, token: int) -> dict[int, int]:
    """Byte of a page that holds each element code and each scale of an index token, by element number."""
    data, scales = token * fmt.data_bytes, fmt.page_scale_offset(page) + token * fmt.scale_bytes
    return {d: data + d // fmt.elements_per_byte for d in range(fmt.dim)} | {
        fmt.dim + group: scales + group for group in range(fmt.scale_bytes)
    }


@pytest.mark.parametrize("name", ["index_fp8", "index_fp4"])
def test_the_compiled_kernel_reads_every_element_and_scale_of_a_page_where_python_says(name):
    """One element 1.0 in a page of zeros, one scale at a time: the logit of its token alone is the scale."""
    fmt, page = python(name), 3
    for token in range(page):
        places = places_of_a_token(fmt, page, token)
        for d in (0, 1, 31, 32, 63, 64, 95, 96, 127):
            cache = torch.zeros(1, page, 1, fmt.bytes, dtype=torch.uint8)
            run = cache.view(-1)
            run[places[d]] = 0x38 if fmt.element == "e4m3" else (0x02 if d % 2 == 0 else 0x20)
            run[places[fmt.dim + d // fmt.group]] = 130  # 2^3
            query = torch.full((1, 1, 1, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
            scales, one = torch.full((1, 1, 1, 4), 127, dtype=torch.uint8), torch.ones(1, 1, dtype=torch.bfloat16)
            contexts, table = torch.tensor([[page]], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
            logits = torch.ops.deepinfer.paged_mqa_logits(query, scales, cache, one, contexts, table, page)
            assert logits.tolist() == [[8.0 if j == token else 0.0 for j in range(page)]]


@pytest.mark.parametrize("name", ["kv_fp8", "kv_fp4"])
def test_the_compiled_kernel_reads_every_element_and_scale_of_a_record_where_python_says(name):
    """Elements count up through the codes of 1.0 and 2.0, every scale is another power of two."""
    fmt = python(name)
    exponents = [group % 7 - 3 for group in range(fmt.scale_bytes)]
    record = torch.zeros(1, 1, 1, fmt.bytes, dtype=torch.uint8)
    run = record.view(-1)
    for group, exponent in enumerate(exponents):
        run[fmt.data_bytes + group] = 127 + exponent if fmt.scale == "ue8m0" else (7 + exponent) << 3
    for d in range(fmt.dim):
        two = d % 3 == 0
        if fmt.element == "e4m3":
            run[d] = 0x40 if two else 0x38
        else:
            run[d // 2] |= (4 if two else 2) << 4 * (d % 2)
    query, slots = torch.zeros(1, 1, 1, 512, dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.int32)
    out = torch.ops.deepinfer.flash_mla_decode(query, record, slots, None, None, None, None, None, 1.0)
    want = [(2.0 if d % 3 == 0 else 1.0) * 2.0 ** exponents[d // fmt.group] for d in range(fmt.dim)]
    assert out.flatten().tolist() == want
