"""The oracle against other voices: torch's and ml_dtypes' number formats, and plain loops over Python floats."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import oracle
import pack
import pytest
import strategies_decode
import strategies_logits
import strategies_pool
import torch
from compare import assert_equal, assert_matches, assert_same_bits
from hypothesis import given
from oracle import INDEX, KV, TABLES
from strategies import examples

CODES = np.arange(256, dtype=np.uint8)


def test_e4m3_table_is_torch_float8_e4m3fn():
    assert_equal(torch.from_numpy(CODES).view(torch.float8_e4m3fn), TABLES["e4m3"])


def test_e2m1_table_is_ml_dtypes_float4():
    assert_equal(torch.from_numpy(CODES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float64)), TABLES["e2m1"])


def test_ue8m0_table_is_torch_float8_e8m0fnu_except_code_0():
    theirs = torch.from_numpy(CODES).view(torch.float8_e8m0fnu).double()
    assert_equal(theirs[1:], TABLES["ue8m0"][1:])
    assert TABLES["ue8m0"][0] == 0.0


def test_round_to_bf16_is_torch_rounding_of_floats():
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    edges = [0x7F7F8000, 0x7F7F7FFF, 0x80000001, 0x00008000, 0x00008001, 0x00018000, 0x3F808000, 0x3F818000]
    floats = np.concatenate([patterns, np.array(edges, dtype=np.uint32)]).view(np.float32)
    floats = floats[~np.isnan(floats)]
    ours = torch.from_numpy(oracle.round_to_bf16(floats.astype(np.float64)))
    assert_equal(torch.from_numpy(floats).to(torch.bfloat16), ours.numpy())


@pytest.mark.parametrize("fmt", [*KV.values(), *INDEX.values()], ids=lambda f: f"{f.bytes}-bytes")
def test_every_product_in_range_is_exact_in_bf16(fmt):
    elements, scales = TABLES[fmt.element], TABLES[fmt.scale]
    products = np.outer(elements, scales)
    normal = (np.abs(products) >= oracle.SMALLEST_NORMAL) & (np.abs(products) < 2.0**128)
    assert np.array_equal(oracle.round_to_bf16(products)[normal], products[normal])


@pytest.mark.parametrize("fmt", [*KV.values(), *INDEX.values()], ids=lambda f: f"{f.bytes}-bytes")
@pytest.mark.parametrize("cap", [448.0, 224.0])
def test_representable_values_survive_packing(fmt, cap):
    rng = np.random.default_rng(1)
    values = rng.standard_normal((7, fmt.dim)) * np.exp2(rng.integers(-9, 9, (7, 1)))
    data, scales = pack.quantize(values, fmt, cap)
    once = oracle.decode_keys(data, scales, fmt)
    again = oracle.decode_keys(*pack.quantize(once, fmt, cap), fmt)
    assert np.array_equal(once, again)
    widest_step = {"e4m3": 2.0**-4, "e2m1": 2.0**-2}[fmt.element]  # of a value in the top binade
    step = widest_step * np.repeat(np.abs(values.reshape(-1, fmt.group)).max(axis=1), fmt.group).reshape(values.shape)
    assert (np.abs(once - values) <= 1.1 * step).all()
    assert np.abs(TABLES[fmt.element][data if fmt.element == "e4m3" else data & 15]).max() <= cap


def _loop_element(data: bytes, scales: bytes, fmt: oracle.Format, i: int) -> float:
    """One decoded key element from bytes, with Python arithmetic and torch's own float8."""
    if fmt.element == "e2m1":
        code = data[i // 2] >> 4 if i % 2 else data[i // 2] & 15
        element = math.copysign([0, 0.5, 1, 1.5, 2, 3, 4, 6][code & 7], -1 if code > 7 else 1)
    else:
        element = torch.tensor([data[i]], dtype=torch.uint8).view(torch.float8_e4m3fn).item()
    byte = scales[i // fmt.group]
    if fmt.scale == "e4m3":
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).item()
    else:
        scale = 0.0 if byte == 0 else math.nan if byte == 255 else 2.0 ** (byte - 127)
    product = element * scale
    product = math.nan if abs(product) >= 2.0**128 else product
    return product if math.isfinite(product) else 0.0


def _loop_decode(i: strategies_decode.DecodeInputs, b: int, s: int, h: int) -> list[float]:
    scopes = [(i.k_cache, i.indices, i.topk_length), (i.extra_k_cache, i.extra_indices, i.extra_topk_length)]
    keys = []
    for cache, indices, lengths in scopes:
        if cache is None:
            continue
        fmt = KV[cache.shape[3]]
        for position in range(indices.shape[2] if lengths is None else int(lengths[b])):
            slot = int(indices[b, s, position])
            if slot != -1:
                record = bytes(cache[slot // cache.shape[1], slot % cache.shape[1], 0].tolist())
                data, scales = record[: fmt.data_bytes], record[fmt.data_bytes :]
                keys.append([_loop_element(data, scales, fmt, d) for d in range(512)])
    if not keys:
        return [0.0] * 512
    query = i.q[b, s, h].tolist()
    logits = [i.softmax_scale * math.fsum(a * c for a, c in zip(query, key, strict=True)) for key in keys]
    top = max(logits) if i.attn_sink is None else max(*logits, min(float(i.attn_sink[h]), 3.4e38))
    weights = [math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    if i.attn_sink is not None:
        total += math.exp(float(i.attn_sink[h]) - top) if i.attn_sink[h] < math.inf else math.inf
    return [math.fsum(w * key[d] for w, key in zip(weights, keys, strict=True)) / total for d in range(512)]


@examples(10, 30)
@given(strategies_decode.decode_problems(topk_limit=5))
def test_flash_mla_decode_oracle_is_the_plain_loop(problem):
    inputs = strategies_decode.build(problem)
    exact = inputs.exact()
    if problem.b == 0 or problem.poison != "none":
        return
    b, s, h = problem.b - 1, problem.s_q - 1, problem.h_q - 1
    loop = _loop_decode(inputs, b, s, h)
    assert np.allclose(loop, exact.value[b, s, h], rtol=1e-9, atol=1e-9 * exact.tolerance[b, s, h].max() + 1e-37)


@examples(10, 30)
@given(strategies_logits.logits_problems())
def test_paged_mqa_logits_oracle_is_the_plain_loop(problem):
    i = strategies_logits.build(problem)
    exact = i.exact().value
    if not problem.contexts or problem.max_context_len == 0 or problem.poison != "none":
        return
    t, page_kv = len(problem.contexts) - 1, problem.page_kv
    qfmt, kfmt = (pack.INDEX_FORMAT[name] for name in (problem.query, problem.keys))
    context = min(problem.contexts[t], problem.width * page_kv, problem.max_context_len)
    assert np.isneginf(exact[t, context:]).all()
    for j in {0, context - 1} if context else ():
        page = int(i.block_table[t, j // page_kv])
        run = i.kv_cache[page].contiguous().flatten().tolist()
        at, sf = j % page_kv * kfmt.data_bytes, page_kv * kfmt.data_bytes + j % page_kv * 4
        key = [_loop_element(run[at:], run[sf:], kfmt, d) for d in range(128)]
        total = 0.0
        for h in range(problem.heads):
            q_bytes = bytes(i.q_data[t, 0, h].contiguous().view(torch.uint8).tolist())
            q_scales = bytes(i.q_sf[t, 0, h].contiguous().view(torch.uint8).tolist())
            query = [_loop_element(q_bytes, q_scales, qfmt, d) for d in range(128)]
            total += max(0.0, math.fsum(a * c for a, c in zip(query, key, strict=True))) * float(i.weights[t, h])
        assert math.isclose(total, exact[t, j], rel_tol=1e-9, abs_tol=1e-12 * i.exact().tolerance[t, j] / 1e-7)


@examples(20, 60)
@given(strategies_pool.pool_problems())
def test_softmax_pool_oracle_is_the_torch_composition(problem):
    inputs = strategies_pool.build(problem)
    score, latent = (t.double() for t in inputs)
    masked = score == -math.inf
    weights = torch.nan_to_num(torch.softmax(score, dim=1), nan=0.0).where(~masked.all(1, keepdim=True), 0.0)
    weights = torch.where(
        torch.isnan(score).any(1, keepdim=True) | (score == math.inf).any(1, keepdim=True), math.nan, weights
    )
    want = (weights * latent).masked_fill(masked, 0.0).sum(dim=1).where(~masked.all(1), 0.0)
    assert np.allclose(inputs.exact().value, want.numpy(), rtol=1e-9, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("module", "problems"),
    [
        (strategies_decode, strategies_decode.decode_problems()),
        (strategies_logits, strategies_logits.logits_problems()),
        (strategies_pool, strategies_pool.pool_problems()),
    ],
    ids=["decode", "logits", "pool"],
)
def test_build_gives_the_same_bits_every_time(module, problems):
    @examples(5, 20)
    @given(problems)
    def check(problem):
        for first, second in zip(module.build(problem), module.build(problem), strict=True):
            if isinstance(first, torch.Tensor):
                assert first.stride() == second.stride()
                bits = [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (first, second)]
                assert torch.equal(*bits)

    check()


def test_comparators_reject_what_is_wrong_and_name_the_place():
    exact = oracle.Exact(np.array([[1.0, np.nan, np.inf, 0.0]]), np.full((1, 4), 1e-3))
    good = torch.tensor([[1.0, np.nan, np.inf, 0.0]])
    assert_matches(good, exact)
    for column, bad in enumerate([1.01, 0.0, 3e38, np.nan]):
        wrong = good.clone()
        wrong[0, column] = bad
        with pytest.raises(AssertionError, match=rf"1 of 4 elements.*\n.*\n.*first at \[0, {column}\]"):
            assert_matches(wrong, exact)
        with pytest.raises(AssertionError, match=rf"first at \[0, {column}\]"):
            assert_same_bits(wrong, good)
        with pytest.raises(AssertionError, match=rf"first at \[0, {column}\]"):
            assert_equal(wrong, exact.value)
