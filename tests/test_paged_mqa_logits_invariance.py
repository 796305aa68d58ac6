"""What must not change a bit of ``paged_mqa_logits``: threads, neighbours, order, strides, pages, other columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pack
import pytest
import torch
from compare import assert_same_bits
from hypothesis import HealthCheck, given, settings
from oracle import INDEX
from pack import COMPACT
from strategies_logits import LogitsInputs, LogitsProblem, build, logits_problems

PER_TOKEN = ("q_data", "q_sf", "weights", "context_lens", "block_table")
BIG = LogitsProblem(
    contexts=(3000, 1, 2047, 900), heads=64, page_kv=64, pages=60, width=48, max_context_len=3072, keys="fp4"
)


def take(inputs: LogitsInputs, tokens: object) -> LogitsInputs:
    # Indexing by a tensor is not implemented for float8: index its bytes.
    part = {name: getattr(inputs, name) for name in PER_TOKEN}
    part["q_data"] = part["q_data"].view(torch.uint8)
    part = {name: t[tokens] for name, t in part.items()}
    return inputs._replace(**part | {"q_data": part["q_data"].view(inputs.q_data.dtype)})


@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_bits_do_not_depend_on_threads_at_real_size(threads, count):
    inputs = build(BIG)
    threads(1)
    alone = inputs.run()
    threads(count)
    for _ in range(3):
        assert_same_bits(inputs.run(), alone)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logits_problems())
def test_bits_do_not_depend_on_threads(threads, problem):
    inputs = build(problem)
    threads(1)
    alone = inputs.run()
    threads(5)
    assert_same_bits(inputs.run(), alone)


@given(logits_problems())
def test_every_token_is_its_own_call(problem):
    inputs = build(problem)
    out = inputs.run()
    for t in range(len(out)):
        assert_same_bits(take(inputs, slice(t, t + 1)).run(), out[t : t + 1], f"token {t}")


@given(logits_problems())
def test_permuting_tokens_permutes_the_result(problem):
    inputs = build(replace(problem, one_sequence=False))
    order = torch.from_numpy(np.random.default_rng(problem.seed).permutation(len(problem.contexts)))
    assert_same_bits(take(inputs, order).run(), inputs.run()[order])


@given(logits_problems())
def test_one_sequence_changes_nothing(problem):
    inputs = build(replace(problem, one_sequence=True))
    assert_same_bits(inputs.run(), inputs._replace(one_sequence=False).run())


@given(logits_problems())
def test_strides_and_pools_change_nothing(problem):
    plain = replace(problem, q_place="contiguous", small_place="contiguous", layout=COMPACT)
    assert_same_bits(build(problem).run(), build(plain).run())


@given(logits_problems())
def test_bytes_outside_the_live_tokens_change_nothing(problem):
    clean = build(replace(problem, hostile="zero")).run()
    for hostile in ("ff", "nan"):
        assert_same_bits(build(replace(problem, hostile=hostile)).run(), clean)


@given(logits_problems())
def test_more_columns_leave_the_first_ones_alone(problem):
    inputs = build(problem)
    # The table's live part ends where the columns did: the context must end there too.
    contexts = inputs.context_lens.clamp(max=problem.max_context_len)
    wider = inputs._replace(context_lens=contexts, max_context_len=problem.max_context_len + 300)
    assert_same_bits(wider.run()[:, : problem.max_context_len], inputs.run())


@given(logits_problems())
def test_page_size_changes_nothing(problem):
    problem = replace(problem, one_sequence=False)
    inputs = build(problem)
    fmt, out = INDEX[inputs.kv_cache.shape[3]], inputs.run()
    runs = inputs.kv_cache.reshape(problem.pages, -1).numpy()
    data = runs[:, : problem.page_kv * fmt.data_bytes].reshape(-1, fmt.data_bytes)
    scales = runs[:, problem.page_kv * fmt.data_bytes :].reshape(-1, fmt.scales)
    # Every page of page_kv tokens becomes page_kv / page smaller ones, in order.
    for page in [p for p in (1, 2, 16) if problem.page_kv % p == 0]:
        parts = problem.page_kv // page
        table = inputs.block_table.long().clamp(-1, problem.pages)[:, :, None] * parts + torch.arange(parts)
        kv = pack.index_cache_of(data, scales, page)
        smaller = inputs._replace(kv_cache=kv, block_table=table.flatten(1).int())
        assert_same_bits(smaller.run(), out, f"page_kv {page}")
