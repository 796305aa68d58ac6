"""``torch.export`` with dynamic sizes, and AOTInductor packages that another process loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import strategies_decode
import strategies_logits
import strategies_pool
import torch
from compare import assert_same_bits
from sample_calls import CALLS, Call
from strategies_decode import DecodeProblem, Scope
from strategies_logits import LogitsProblem
from strategies_pool import PoolProblem
from subprocesses import run_script
from torch.export import Dim

OPS = torch.ops.deepinfer


class Run(torch.nn.Module):
    """One operator as a module; tensors come as arguments, the rest is fixed."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.overload, self.names = call.overload, list(call.tensors())
        self.fixed = {name: a for name, a in call.arguments.items() if name not in self.names}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.overload(**dict(zip(self.names, tensors, strict=True)), **self.fixed)


def operators(program: torch.export.ExportedProgram) -> list[str]:
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [target for target in targets if target.startswith("deepinfer")]


STRICT = ("flash_mla_decode: every argument", "paged_mqa_logits: strided", "softmax_pool: contiguous")


@pytest.mark.parametrize(("name", "strict"), [*((name, False) for name in CALLS), *((name, True) for name in STRICT)])
def test_every_call_exports_to_one_node_and_runs_with_eagers_bits(name, strict):
    call = CALLS[name]()
    program = torch.export.export(Run(call), tuple(call.tensors().values()), strict=strict)
    assert operators(program) == operators(program.run_decompositions({})) == [f"deepinfer.{call.op}.default"]
    assert_same_bits(program.module()(*call.tensors().values()), call.run())


class Decode(torch.nn.Module):
    def forward(self, q, k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length):
        scopes = (indices, topk_length, attn_sink, extra_k_cache, extra_indices, extra_topk_length)
        # bounds that follow the inputs' sizes, as an engine computes them
        b = q.shape[0]
        return OPS.flash_mla_decode(q, k_cache, *scopes, 512**-0.5, max_requests=b, max_context=b * 64)


def decode_inputs(b: int, topk: int, blocks: int, extra_topk: int) -> tuple[torch.Tensor, ...]:
    main = Scope("fp8", page=4, blocks=blocks, topk=topk, lengths=(topk,) * b)
    extra = Scope("fp4", page=3, blocks=blocks + 1, topk=extra_topk, lengths=(extra_topk,) * b)
    problem = DecodeProblem(b=b, s_q=2, h_q=4, main=main, extra=extra, sink="finite")
    return tuple(strategies_decode.build(problem)[:8])


def test_decode_exports_with_dynamic_batch_topk_and_blocks():
    b, topk, blocks, extra_topk, extra_blocks = map(Dim, ("b", "topk", "blocks", "extra_topk", "extra_blocks"))
    sizes = (
        {0: b},
        {0: blocks},
        {0: b, 2: topk},
        {0: b},
        None,
        {0: extra_blocks},
        {0: b, 2: extra_topk},
        {0: b},
    )
    program = torch.export.export(Decode(), decode_inputs(3, 6, 5, 9), dynamic_shapes=sizes)
    assert operators(program) == ["deepinfer.flash_mla_decode.default"]
    for inputs in (decode_inputs(3, 6, 5, 9), decode_inputs(2, 40, 11, 2), decode_inputs(17, 129, 40, 64)):
        assert_same_bits(program.module()(*inputs), Decode()(*inputs))


class Scores(torch.nn.Module):
    def forward(self, q_data, q_sf, kv_cache, weights, context_lens, block_table):
        columns = block_table.shape[1] * kv_cache.shape[1]
        return OPS.paged_mqa_logits(q_data, q_sf, kv_cache, weights, context_lens, block_table, columns)


def score_inputs(tokens: int, width: int, page_kv: int = 64) -> tuple[torch.Tensor, ...]:
    columns = width * page_kv
    contexts = (columns - 1,) * tokens
    problem = LogitsProblem(contexts, 3, page_kv=page_kv, pages=width + 4, width=width, max_context_len=columns)
    return tuple(strategies_logits.build(problem)[:6])


def export_scores(width: Any) -> torch.export.ExportedProgram:
    """``max_context_len`` comes from a symbolic size."""
    tokens, pages = Dim("T"), Dim("pages")
    per_token = {0: tokens}
    sizes = (per_token, per_token, {0: pages}, per_token, per_token, {0: tokens, 1: width})
    program = torch.export.export(Scores(), score_inputs(3, 5 if width == Dim.AUTO else 8), dynamic_shapes=sizes)
    assert operators(program) == ["deepinfer.paged_mqa_logits.default"]
    return program


def assert_scores_alike(program: torch.export.ExportedProgram, inputs: tuple[torch.Tensor, ...]) -> None:
    result = program.module()(*inputs)
    assert_same_bits(result, Scores()(*inputs))
    assert result.stride(0) == -(-result.shape[1] // 256) * 256


def test_logits_export_with_dynamic_tokens_pages_and_columns_in_whole_rows():  # vllm 9234
    program = export_scores(4 * Dim("quarters"))
    for tokens, width in ((3, 8), (2, 12), (9, 40)):
        assert_scores_alike(program, score_inputs(tokens, width))


def test_columns_that_may_end_anywhere_export_with_a_guard_of_pytorchs():  # vllm 9234
    """A row's stride is its length rounded up to 256, so whether the result is contiguous depends on the length, and
    PyTorch guards on that. A program made for padded rows says so when it meets rows without padding.
    """
    program = export_scores(Dim.AUTO)
    for tokens, width in ((3, 5), (2, 7), (9, 41)):
        assert_scores_alike(program, score_inputs(tokens, width))
    with pytest.raises(AssertionError, match="Guard failed: 256"):
        program.module()(*score_inputs(3, 8))


class Pool(torch.nn.Module):
    def forward(self, score_rows, latent_rows):
        return OPS.softmax_pool(score_rows, latent_rows)


def test_pooling_exports_with_every_size_dynamic():
    sizes = {0: Dim("N"), 1: Dim("R"), 2: Dim("D")}

    def inputs(n: int, r: int, d: int) -> tuple[torch.Tensor, ...]:
        return tuple(strategies_pool.build(PoolProblem(n, r, d)))

    program = torch.export.export(Pool(), inputs(3, 4, 5), dynamic_shapes=(sizes, sizes))
    for shape in ((3, 4, 5), (2, 8, 512), (40, 3, 17)):
        assert_same_bits(program.module()(*inputs(*shape)), Pool()(*inputs(*shape)))


def test_a_saved_program_is_loaded_by_another_process(tmp_path: Path):
    inputs = decode_inputs(3, 6, 5, 9)
    torch.export.save(torch.export.export(Decode(), inputs), tmp_path / "decode.pt2")
    torch.save((inputs, Decode()(*inputs)), tmp_path / "example.pt")
    script = """
    import sys, torch, deepinfer_ops
    inputs, want = torch.load(sys.argv[2])
    assert torch.equal(torch.export.load(sys.argv[1]).module()(*inputs), want)
    """
    run_script(script, tmp_path / "decode.pt2", tmp_path / "example.pt")


PACKAGED = ("flash_mla_decode: all optionals None", "flash_mla_decode: sink alone", "flash_mla_decode: every argument")


class Packaged(torch.nn.Module):
    """Several calls in one module: one compilation serves them all."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = torch.nn.ModuleList(Run(call) for call in calls)

    def forward(self, *tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [call(*arguments) for call, arguments in zip(self.calls, tensors, strict=True)]


def test_an_aotinductor_package_passes_optional_arguments_in_a_new_process(tmp_path: Path):  # pytorch 141013
    names = (*PACKAGED, "paged_mqa_logits: fp8 query, fp8 keys", "softmax_pool: contiguous")
    calls = [CALLS[name]() for name in names]
    inputs: Any = tuple(tuple(call.tensors().values()) for call in calls)
    program = torch.export.export(Packaged(calls), inputs)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "operators.pt2"))
    torch.save((inputs, [call.run() for call in calls]), tmp_path / "example.pt")
    script = """
    import sys, torch, deepinfer_ops
    inputs, wanted = torch.load(sys.argv[2])
    results = torch._inductor.aoti_load_package(sys.argv[1])(*inputs)
    for result, want in zip(results, wanted, strict=True):
        assert result.stride() == want.stride() and torch.equal(result, want), (result, want)
    print(len(results))
    """
    assert int(run_script(script, package, tmp_path / "example.pt")) == len(calls)
