"""Every element code under every scale code, read through the operators.

Attention over one key with q = 0 returns the decoded key; a score with one-hot queries or keys returns one element.
Results are compared with the definition, exactly; only products below 2^-126 may be 0 instead.
"""

from __future__ import annotations

import cases
import numpy as np
import pack
import pytest
import torch
from compare import report
from oracle import KV, SMALLEST_NORMAL, TABLES, Format, decode_keys, decode_products
from pack import INDEX_FORMAT, KV_FORMAT
from strategies_logits import LogitsInputs

CODES = np.arange(256, dtype=np.uint8)
ONE = {"e4m3": 0x38, "e2m1": 0x2}
ONE_BYTE = {"e4m3": 0x38, "e2m1": 0x22}


def assert_decoded(got: torch.Tensor, want: np.ndarray) -> None:
    actual = got.double().numpy().reshape(want.shape)
    with np.errstate(invalid="ignore"):
        right = (actual == want) | ((actual == 0) & (np.abs(want) < SMALLEST_NORMAL))
        right |= np.isnan(actual) & np.isnan(want)
    report("decoded", right, np.where(right, 0.0, 1.0), actual, want, lambda at: "")


def all_pairs(fmt: Format) -> tuple[np.ndarray, np.ndarray]:
    """Tokens whose groups run through all elements under all scales: element bytes and scale bytes."""
    elements = len(TABLES[fmt.element])
    per_scale = max(1, elements // fmt.group)  # groups it takes to show every element once
    codes = np.tile(np.arange(elements), 256).reshape(256 * per_scale, -1) if elements >= fmt.group else None
    if codes is None:  # a group is longer than the code table: show every code more than once
        codes = np.tile(np.arange(elements), (256, fmt.group // elements))
    scales = np.repeat(CODES, per_scale)
    return (
        pack.element_bytes(codes.astype(np.uint8).reshape(-1, fmt.dim), fmt),
        scales.reshape(-1, fmt.scales),
    )


@pytest.mark.parametrize("h_q", [1, 3, 64])
@pytest.mark.parametrize("scope", ["main", "extra"])
@pytest.mark.parametrize("fmt", KV.values(), ids=lambda f: f.name)
def test_main_cache_decodes_every_code_under_every_scale(fmt, scope, h_q):
    data, scales = all_pairs(fmt)
    cache = pack.cache_of(np.concatenate([data, scales], axis=1), page=4)
    slots = torch.arange(len(data), dtype=torch.int32).reshape(-1, 1, 1)
    if scope == "main":
        inputs = cases.decode(cache, slots, h_q=h_q)
    else:
        inputs = cases.decode(cache, torch.full_like(slots, -1), h_q=h_q, extra_k_cache=cache, extra_indices=slots)
    want = decode_keys(data, scales, fmt)[:, None, None, :]
    assert_decoded(inputs.run(), np.broadcast_to(want, (len(data), 1, h_q, 512)))


def test_all_pairs_are_all_pairs():
    for fmt in [*KV.values(), *INDEX_FORMAT.values()]:
        data, scales = all_pairs(fmt)
        codes = data if fmt.element == "e4m3" else np.stack([data & 15, data >> 4], axis=2).reshape(len(data), -1)
        seen = {
            (int(a), int(b)) for a, b in zip(codes.ravel(), np.repeat(scales, fmt.group, axis=1).ravel(), strict=True)
        }
        assert len(seen) == len(TABLES[fmt.element]) * 256


def one_hot_queries(heads: int, fmt: Format) -> torch.Tensor:
    """Query t is 1.0 in place t, in every second head -1.0, so that relu hides no sign."""
    one, sign = ONE[fmt.element], len(TABLES[fmt.element]) // 2
    codes = np.zeros((128, 1, heads, 128), dtype=np.uint8)
    for head in range(heads):
        codes[np.arange(128), 0, head, np.arange(128)] = one | (sign if head % 2 else 0)
    return queries(codes, fmt)


def queries(codes: np.ndarray, fmt: Format) -> torch.Tensor:
    data = torch.from_numpy(pack.element_bytes(codes, fmt))
    return data.view(torch.float8_e4m3fn) if fmt.element == "e4m3" else data


FORMATS = pytest.mark.parametrize("fmt", INDEX_FORMAT.values(), ids=lambda f: f"{f.name}")
OTHER_FORMATS = pytest.mark.parametrize("other", INDEX_FORMAT.values(), ids=lambda f: f"other-{f.name}")


@pytest.mark.parametrize("heads", [2, 16, 64])
@pytest.mark.parametrize("page_kv", [1, 64])
@OTHER_FORMATS
@FORMATS
def test_index_cache_decodes_every_code_under_every_scale(fmt, other, page_kv, heads):
    data, scales = all_pairs(fmt)
    kv = pack.index_cache_of(data, scales, page_kv)
    pages = np.arange(len(kv), dtype=np.int32)
    weights = torch.zeros(128, heads)
    weights[:, 0], weights[:, 1] = 1.0, -1.0  # relu(k) - relu(-k) = k; the other heads weigh nothing
    inputs = LogitsInputs(
        q_data=one_hot_queries(heads, other),
        q_sf=torch.full((128, 1, heads, 4), 127, dtype=torch.uint8),
        kv_cache=kv,
        weights=weights,
        context_lens=torch.full((128, 1), len(data), dtype=torch.int32),
        block_table=torch.from_numpy(pages).expand(128, -1),
        max_context_len=len(data),
    )
    assert_decoded(inputs.run(), decode_keys(data, scales, fmt).T)


@pytest.mark.parametrize("packed", [False, True], ids=["uint8-scales", "int16-scales"])
@OTHER_FORMATS
@FORMATS
def test_queries_decode_every_code_under_every_scale_and_keep_nan(fmt, other, packed):
    """Each token's query holds one pair in one place; head 1 holds its negative. The only key is all ones."""
    elements = len(TABLES[fmt.element])
    code, scale = (a.ravel() for a in np.meshgrid(np.arange(elements), CODES, indexing="ij"))
    tokens, token = len(code), np.arange(elements * 256)
    place = token * 37 % 128  # all places, all four scale groups, both nibbles
    sign = elements // 2
    codes = np.zeros((tokens, 2, 128), dtype=np.uint8)
    codes[token, 0, place], codes[token, 1, place] = code, code ^ sign
    scales = np.full((tokens, 1, 2, 4), 127, dtype=np.uint8)
    scales[token, 0, :, place // 32] = scale[:, None]
    q_sf = torch.from_numpy(scales)
    inputs = LogitsInputs(
        q_data=queries(codes[:, None], fmt),
        q_sf=q_sf.view(torch.int16) if packed else q_sf,
        kv_cache=cases.index_cache([ONE_BYTE[other.element]], 1, other.name),
        weights=torch.tensor([[1.0, -1.0]]).expand(tokens, 2),
        context_lens=torch.ones(tokens, 1, dtype=torch.int32),
        block_table=torch.zeros(tokens, 1, dtype=torch.int32),
        max_context_len=1,
    )
    # relu(x) - relu(-x) = x; infinite products stay infinite, NaN stays NaN.
    products = decode_products(pack.element_bytes(codes, fmt)[:, 0], scales[:, 0, 0], fmt)
    assert_decoded(inputs.run(), products.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("fmt", KV.values(), ids=lambda f: f.name)
def test_scores_and_values_see_the_same_decoded_key(fmt):
    """Keys that differ in one pair: the larger logit must win by exactly the decoded difference.

    Key 0 is c in element 0 and 1 in element 1, key 1 is 0 there; q picks element 0; the output's element 1 is the
    softmax weight of key 0, 1 / (1 + exp(-c)).
    """
    element_bits = len(TABLES[fmt.element]) - 1
    rng = np.random.default_rng(3)
    codes = rng.integers(0, element_bits + 1, 256).astype(np.uint8)
    scale_code = CODES if fmt.scale == "e4m3" else (111 + CODES % 14).astype(np.uint8)
    one = ONE[fmt.element]
    elements = np.zeros((257, 512), dtype=np.uint8)
    elements[:256, 0], elements[:256, 256] = codes, one
    scales = np.full((257, fmt.scales), 127 if fmt.scale == "ue8m0" else ONE["e4m3"], dtype=np.uint8)
    scales[:256, 0] = scale_code
    data = pack.element_bytes(elements, fmt)
    cache = pack.cache_of(np.concatenate([data, scales], axis=1), page=1)
    slots = torch.stack([torch.arange(256), torch.full((256,), 256)], dim=1)[:, None].int()
    inputs = cases.decode(cache, slots, h_q=1, softmax_scale=1.0)
    c = decode_keys(data, scales, fmt)[:256, 0]
    q = np.where(c == 0, 1.0, np.minimum(1.0, np.exp2(2 - np.ceil(np.log2(np.abs(c) + 1e-30)))))
    inputs.q[:, 0, 0, 0] = torch.from_numpy(q).bfloat16()
    weight = 1 / (1 + np.exp(-c * q))
    got = inputs.run()[:, 0, 0, 256].double().numpy()
    right = np.abs(got - weight) <= 2.0**-8 * weight
    report("weight", right, np.abs(got - weight), got, weight, lambda at: f"key {c[at]}, query {q[at]}")


def test_formats_in_the_tests_are_those_of_the_specification():
    sizes = {(f.name, f.bytes, f.data_bytes, f.scales) for f in [*KV_FORMAT.values(), *INDEX_FORMAT.values()]}
    assert sizes == {("fp8", 528, 512, 16), ("fp4", 288, 256, 32), ("fp8", 132, 128, 4), ("fp4", 68, 64, 4)}
