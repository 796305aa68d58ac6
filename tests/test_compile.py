"""``torch.compile`` on CPU: one graph, one opaque node per operator, few compilations, eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import sample_calls
import strategies_decode
import strategies_logits
import torch
from compare import assert_same_bits
from neuron_sim import compile_fullgraph
from sample_calls import CALLS
from strategies_decode import DecodeProblem, Scope
from strategies_logits import LogitsProblem

OPS = torch.ops.deepinfer
OPAQUE = ["deepinfer.flash_mla_decode.default", "deepinfer.paged_mqa_logits.default", "deepinfer.softmax_pool.default"]
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(decode: Arguments, logits: Arguments, pool: Arguments) -> list[torch.Tensor]:
    """All three operators among torch's own, results used with arithmetic and by their strides."""
    attended = OPS.flash_mla_decode(**decode)
    scores = OPS.paged_mqa_logits(**logits)
    pooled = OPS.softmax_pool(**pool)
    top = scores.float().topk(1).indices
    flat = attended.view(attended.shape[0], -1) + 1
    return [attended, scores, pooled, top, flat, pooled * scores.stride(0), scores.as_strided((1,), (1,))]


def step_arguments() -> list[Arguments]:
    return [call.arguments for call in sample_calls.one_of_each()]


def assert_all_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for i, (mine, wanted) in enumerate(zip(got, want, strict=True)):
        assert mine.stride() == wanted.stride()
        if wanted.is_floating_point():
            assert_same_bits(mine, wanted, f"result {i}")
        else:
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_function_with_all_three_gives_eagers_bits(backend, dynamic):
    arguments = step_arguments()
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    assert_all_same_bits(compiled(*arguments), step(*arguments))


def test_inductor_with_the_cpp_wrapper_gives_eagers_bits():  # vllm 9234
    arguments = step_arguments()
    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(step, fullgraph=True, dynamic=True)
        assert_all_same_bits(compiled(*arguments), step(*arguments))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_function_with_all_three_is_one_graph_with_one_opaque_node_each(dynamic):
    compiled = compile_fullgraph(step, dynamic=dynamic)
    compiled(*step_arguments())
    assert [target for target in compiled.targets() if target.startswith("deepinfer")] == OPAQUE
    explained = torch._dynamo.explain(step)(*step_arguments())
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_compiles_to_one_opaque_node_and_gives_eagers_bits(name):
    call = CALLS[name]()
    compiled = compile_fullgraph(lambda arguments: call.overload(**arguments))
    assert_all_same_bits([compiled(call.arguments)], [call.run()])
    assert compiled.targets() == [f"deepinfer.{call.op}.default"]


@pytest.mark.parametrize("op", ["flash_mla_decode", "paged_mqa_logits", "softmax_pool"])
def test_the_public_function_compiles_to_the_same_node(op):
    import deepinfer_ops

    call = next(call for call in sample_calls.one_of_each() if call.op == op)
    compiled = compile_fullgraph(lambda arguments: getattr(deepinfer_ops, op)(**arguments))
    assert_all_same_bits([compiled(call.arguments)], [call.run()])
    assert compiled.targets() == [f"deepinfer.{op}.default"]


def compilations(function: Callable[..., torch.Tensor], calls: list[tuple[Any, ...]]) -> int:
    """How often ``dynamic=True`` compiles while it goes through the calls; every result is eager's."""
    compiled = compile_fullgraph(function, dynamic=True)
    for arguments in calls:
        assert_all_same_bits([compiled(*arguments)], [function(*arguments)])
    return len(compiled.graphs)


def decode_of_batch(b: int) -> tuple[Any, ...]:
    scope = Scope("fp8", page=4, blocks=9, topk=6, lengths=(6,) * b)
    extra = Scope("fp4", page=3, blocks=7, topk=9)
    inputs = strategies_decode.build(DecodeProblem(b=b, s_q=2, h_q=4, main=scope, extra=extra, sink="finite", seed=b))
    return tuple(inputs)


def logits_of(tokens: int, columns: int) -> tuple[Any, ...]:
    problem = LogitsProblem((9,) * tokens, heads=4, pages=5, width=3, max_context_len=columns, seed=tokens)
    return tuple(strategies_logits.build(problem)[:7])


@pytest.mark.parametrize(("sizes", "limit"), [((2, 3, 4, 8, 16), 2), ((1, 2, 3, 8, 16), 3)])
def test_five_batch_sizes_of_decode_compile_at_most_twice_and_once_more_for_one(sizes, limit):
    assert compilations(OPS.flash_mla_decode, [decode_of_batch(b) for b in sizes]) <= limit


@pytest.mark.parametrize(("sizes", "limit"), [((2, 3, 4, 8, 9), 2), ((1, 2, 3, 8, 9), 3)])
def test_five_token_counts_of_logits_compile_at_most_twice_and_once_more_for_one(sizes, limit):
    assert compilations(OPS.paged_mqa_logits, [logits_of(tokens, 12) for tokens in sizes]) <= limit


@pytest.mark.parametrize(("sizes", "limit"), [((2, 3, 4, 8, 16), 2), ((1, 2, 3, 8, 16), 3)])
def test_five_pool_sizes_compile_at_most_twice_and_once_more_for_one(sizes, limit):
    calls = [(torch.randn(n, 4, 32), torch.randn(n, 4, 32)) for n in sizes]
    assert compilations(OPS.softmax_pool, calls) <= limit


@pytest.mark.parametrize(
    ("columns", "limit"),
    [((64, 65, 255, 257, 1000), 1), ((64, 256, 65, 512, 1000, 1024), 2)],
    ids=["any", "also multiples of 256"],
)
def test_a_growing_context_does_not_recompile(columns, limit):  # vllm 9234
    """PyTorch guards on contiguity: a result whose rows need no padding is a second kind."""
    assert compilations(OPS.paged_mqa_logits, [logits_of(4, n) for n in columns]) <= limit


def test_growing_hints_do_not_recompile():
    k_cache, indices = cases.kv_cache({0: 1.0}, 16), [[[0, -1]], [[0, 0]]]

    def attend(max_requests, max_context, chunk_blocks, table):
        inputs = cases.decode(k_cache, indices)
        offsets = torch.zeros(2, 2, dtype=torch.int32)
        return OPS.flash_mla_decode(
            *inputs,
            max_requests=max_requests,
            max_context=max_context,
            chunk_block_table=table,
            chunk_blocks=chunk_blocks,
            chunk_offset_len=offsets,
        )

    calls = [(n + 1, 64 * n, n, torch.zeros(n + 2, dtype=torch.int32)) for n in range(2, 7)]
    assert compilations(attend, calls) <= 2


def test_topk_blocks_and_page_size_of_the_cache_may_change_without_recompiling():
    def build(topk: int, blocks: int, page: int) -> tuple[Any, ...]:
        return tuple(strategies_decode.build(DecodeProblem(b=2, h_q=4, main=Scope("fp8", page, blocks, topk)))[:3])

    def attend(q, k_cache, indices):
        return OPS.flash_mla_decode(q, k_cache, indices, None, None, None, None, None, 0.5)

    calls = [build(topk, topk + 3, topk + 7) for topk in (5, 6, 17, 64, 100)]
    assert compilations(attend, calls) <= 2


def test_a_bad_call_is_refused_at_compile_time_in_the_contracts_words():
    call = sample_calls.DECODE["every argument"]()
    long = call.arguments["indices"].long()
    with pytest.raises(RuntimeError, match="deepinfer::flash_mla_decode: indices: expected dtype int32, got int64"):
        torch.compile(lambda: OPS.flash_mla_decode(**call.arguments | {"indices": long}), fullgraph=True)()


def test_bad_data_is_refused_when_the_compiled_code_runs():
    call = sample_calls.DECODE["every argument"]()
    compiled = torch.compile(lambda lists: OPS.flash_mla_decode(**call.arguments | {"indices": lists}), fullgraph=True)
    bad = call.arguments["indices"].clone()
    bad[0, 1, 2] = 20
    with pytest.raises(RuntimeError, match=r"indices: expected -1 or a slot below 20, got 20 at \[0, 1, 2\]"):
        compiled(bad)
    assert_same_bits(compiled(call.arguments["indices"]), call.run())
