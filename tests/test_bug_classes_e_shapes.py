"""Class E: head counts, list lengths and page sizes that fit no tile, and nothing at all."""

from __future__ import annotations

import cases
import numpy as np
import pack
import pytest
import torch
from compare import assert_equal, assert_matches, assert_same_bits
from oracle import Exact
from pack import INDEX_FORMAT, KV_FORMAT
from strategies import token_bytes
from strategies_decode import DecodeProblem, Scope, build


@pytest.mark.parametrize("h_q", [1, 3, 5, 15, 17, 63, 65, 127, 129])
def test_every_head_equals_its_own_call(h_q):  # tilelang-mlir-ascend 96
    problem = DecodeProblem(b=2, s_q=3, h_q=160, main=Scope("fp8", 4, 8, 5, content="codes"), sink="finite", logit=8.0)
    inputs = build(problem)
    heads = slice(7, 7 + h_q)
    several = inputs._replace(q=inputs.q[:, :, heads], attn_sink=inputs.attn_sink[heads])
    out = several.run()
    assert out.is_contiguous()
    assert_same_bits(several._replace(q=several.q.contiguous()).run(), out)
    for h in range(h_q):
        single = several._replace(q=several.q[:, :, h : h + 1], attn_sink=several.attn_sink[h : h + 1])
        assert_same_bits(single.run(), out[:, :, h : h + 1], f"head {h}")


@pytest.mark.parametrize("page", [1, 3, 32, 48, 100, 256])
@pytest.mark.parametrize("extra_topk", [None, 0, 1, 7])
@pytest.mark.parametrize("topk", [0, 1, 2, 63, 65, 127, 129, 192, 640, 1152])
def test_any_topk_and_page_size(topk, extra_topk, page):  # flashinfer 4541
    scope = Scope("fp8", page, 300 // page + 1, topk)
    extra = None if extra_topk is None else Scope("fp4", page + 1, 7, extra_topk)
    inputs = build(DecodeProblem(h_q=2, main=scope, extra=extra, logit=8.0, seed=topk))
    out = inputs.run()
    assert_matches(out, inputs.exact())
    if topk == 0 and not extra_topk:
        assert_equal(out, 0.0)


def test_index_keys_score_the_same_on_pages_of_any_size():  # sglang-jax 1074
    rng = np.random.default_rng(0)
    data, scales = token_bytes(rng, INDEX_FORMAT["fp8"], 130, "codes", 448.0)
    reference = None
    for page_kv in (64, 1, 2, 3, 256):
        pages = -(-130 // page_kv)
        order = rng.permutation(pages + 2)[:pages]
        padded = [np.pad(a, ((0, pages * page_kv - 130), (0, 0)), constant_values=0xFF) for a in (data, scales)]
        blocks = np.full((pages + 2, page_kv, 132), 0xFF, dtype=np.uint8)
        blocks[order] = pack.planar_pages(*(a.reshape(pages, page_kv, -1) for a in padded))
        inputs = cases.logits(pack.paged(blocks), [130, 77], [order.tolist()] * 2, 140, heads=3)
        if reference is None:
            assert_matches(inputs.run(), inputs.exact(), "page_kv 64")
        reference = inputs.run() if reference is None else reference
        assert_same_bits(inputs.run(), reference, f"page_kv {page_kv}")


def test_scopes_with_pages_of_1_and_7_equal_pages_of_64():
    rng = np.random.default_rng(1)
    rows = np.concatenate(token_bytes(rng, KV_FORMAT["fp8"], 128, "model", 448.0), axis=1)
    slots = cases.int32(rng.integers(0, 126, (2, 3, 33)))

    def with_pages(main: int, extra: int) -> torch.Tensor:
        caches = [pack.cache_of(rows, page) for page in (main, extra)]
        inputs = cases.decode(caches[0], slots, h_q=3, extra_k_cache=caches[1], extra_indices=slots.flip(2))
        q = torch.from_numpy(np.random.default_rng(2).standard_normal(inputs.q.shape)).bfloat16()
        return inputs._replace(q=q).run()

    assert_same_bits(with_pages(1, 7), with_pages(64, 64))


def test_an_empty_batch_decodes_to_nothing():  # flash-attention 1159
    inputs = cases.decode(cases.kv_cache({}, 4), torch.empty(0, 1, 8, dtype=torch.int32), h_q=4)
    for lengths in (None, torch.empty(0, dtype=torch.int32)):
        out = inputs._replace(topk_length=lengths).run()
        assert out.shape == (0, 1, 4, 512)
        assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(("tokens", "columns", "width"), [(0, 0, 1), (0, 7, 1), (3, 0, 1), (3, 0, 0), (3, 5, 0)])
def test_no_tokens_no_columns_or_no_table(tokens, columns, width):
    inputs = cases.logits(cases.index_cache([0x38] * 4, 4), [4] * tokens, [[0]] * tokens, columns)
    out = inputs._replace(block_table=torch.zeros(tokens, width, dtype=torch.int32)).run()
    assert_matches(out, Exact(np.full((tokens, columns), -np.inf), np.zeros((tokens, columns))))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(("n", "r", "d"), [(0, 4, 512), (3, 1, 0), (0, 1, 0)])
def test_pooling_nothing_gives_nothing(n, r, d):
    out = torch.ops.deepinfer.softmax_pool(torch.zeros(n, r, d), torch.zeros(n, r, d))
    assert out.shape == (n, d)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("heads", [1, 2, 3, 15, 17, 63, 65, 127, 129])
def test_any_number_of_index_heads(heads):
    inputs = cases.logits(cases.index_cache([0x38, 0xB8, 0x40], 1), [3], [[0, 1, 2]], 4, heads=heads)
    inputs.weights.copy_(torch.arange(heads) % 4)
    total = float((torch.arange(heads) % 4).sum())
    want = torch.tensor([[128 * total, 0.0, 256 * total, -np.inf]], dtype=torch.float64).bfloat16()
    assert_equal(inputs.run(), want.double())


@pytest.mark.parametrize("d", [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 511, 513])
@pytest.mark.parametrize("r", [1, 2, 3, 9, 33])
def test_any_width_and_number_of_pooled_rows(r, d):
    latent = torch.arange(d).float().expand(5, r, d) % 128
    assert_equal(torch.ops.deepinfer.softmax_pool(torch.zeros(5, r, d), latent), np.arange(d) % 128)
