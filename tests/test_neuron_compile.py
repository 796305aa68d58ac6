"""Compiled graphs see through the operators, stay one graph, and depend on the settings they were traced under."""

from __future__ import annotations

import contextlib

import neuron_sim
import pytest
import strategies_decode
import strategies_logits
import strategies_pool
import torch
import torch._inductor.utils
from compare import assert_same_bits
from neuron_problems import CAP, assert_decodes_like_cpu
from strategies_decode import DecodeProblem, Scope
from strategies_logits import LogitsProblem
from strategies_pool import PoolProblem

from deepinfer_ops import config

DECODE = DecodeProblem(
    b=3, h_q=4, main=Scope(page=8, blocks=4, topk=6, unique=True), extra=Scope("fp4", blocks=5, topk=7), cap=CAP
)
LOGITS = LogitsProblem(contexts=(9, 3), heads=4, pages=4, width=3, max_context_len=11, cap=CAP)
POOL = PoolProblem(n=3, r=4, d=16)

MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def layer(decode, logits, pool):
    """What a decoding step calls, with a computed tensor going in and a computed result coming out."""
    pooled = torch.ops.deepinfer.softmax_pool(pool.score_rows * 2, pool.latent_rows)
    scores = torch.ops.deepinfer.paged_mqa_logits(*logits[:-1])
    attended = torch.ops.deepinfer.flash_mla_decode(decode.q * 2, *decode[1:])
    return pooled + 1, scores, attended + 1


def problems(device):
    return (
        strategies_decode.build(DECODE, device),
        strategies_logits.build(LOGITS, device),
        strategies_pool.build(POOL, device),
    )


@pytest.mark.parametrize("mode", MODES)
def test_all_three_operators_make_one_graph_that_is_not_traced_again(mode):
    with MODES[mode]():
        inputs = problems("neuron")
        compiled = neuron_sim.compile_fullgraph(layer)
        results = [compiled(*inputs) for _ in range(2)]
        assert len(compiled.graphs) == 1
        assert neuron_sim.graph_rules.check(compiled.graph) == []
        kernels = [neuron_sim.graph_rules.kernel_name(n) for n in neuron_sim.graph_rules.kernel_nodes(compiled.graph)]
        assert kernels == ["softmax_pool", "weighted_scores", "weighted_scores", "gathered_attn_idx"]
        for result in results:
            for got, want in zip(result, layer(*inputs), strict=True):
                assert_same_bits(got, want)
                assert got.stride() == want.stride()


def test_on_cpu_the_operators_stay_opaque_nodes():
    compiled = neuron_sim.compile_fullgraph(layer)
    compiled(*problems("cpu"))
    assert [t for t in compiled.targets() if t.startswith("deepinfer")] == [
        "deepinfer.softmax_pool.default",
        "deepinfer.paged_mqa_logits.default",
        "deepinfer.flash_mla_decode.default",
    ]


def test_export_sees_through_the_operators_once_decomposed():
    class Layer(torch.nn.Module):
        def forward(self, q, k_cache, indices):
            return torch.ops.deepinfer.flash_mla_decode(q, k_cache, indices, None, None, None, None, None, 0.05)

    inputs = strategies_decode.build(DECODE, "neuron")
    program = torch.export.export(Layer(), inputs[:3])
    lowered = program.run_decompositions({})
    targets = [str(n.target) for n in lowered.graph_module.graph.nodes if n.op == "call_function"]
    assert "nki_kernel_wrapper" in targets
    assert not [t for t in targets if t.startswith("deepinfer")]
    assert_same_bits(lowered.module()(*inputs[:3]), Layer()(*inputs[:3]))


def test_dynamic_shapes_become_numbers_on_neuron():
    """Programs of the device have static shapes: a new size is a new graph, not a wrong one."""
    compiled = neuron_sim.compile_fullgraph(lambda inputs: inputs.run(), dynamic=True)
    for rows in (3, 5):
        problem = DecodeProblem(b=rows, h_q=2, main=Scope(page=8, blocks=4, topk=6), cap=CAP)
        got = compiled(strategies_decode.build(problem, "neuron"))
        assert_decodes_like_cpu(got, strategies_decode.build(problem))
    assert len(compiled.graphs) == 2
    for graph in compiled.graphs:
        # Inputs keep symbols that have become equal to numbers; the rule about static sizes takes them for symbols.
        assert neuron_sim.graph_rules.check(graph, ignore=("static",)) == []
        sizes = [
            size
            for node in graph.graph.nodes
            if isinstance(val := node.meta.get("val"), torch.Tensor)
            for size in val.shape
        ]
        assert not any(torch.fx.experimental.symbolic_shapes.free_symbols(size) for size in sizes)


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"nki_attn": False}, []),
        ({"attn_table_slots": 0}, ["gathered_attn"]),
        ({"dense_attn_min_rows": 2}, []),
        ({"fast_e4m3": False}, ["gathered_attn_idx"]),
    ],
    ids=str,
)
def test_a_graph_is_never_reused_under_other_settings(changes, kernels):
    """Under plain ``torch.ops`` calls, where Dynamo sees no setting being read."""
    inputs = strategies_decode.build(DECODE, "neuron")
    compiled = neuron_sim.compile_fullgraph(type(inputs).run)

    def kernels_of(graph):
        return [neuron_sim.graph_rules.kernel_name(node) for node in neuron_sim.graph_rules.kernel_nodes(graph)]

    compiled(inputs)
    assert kernels_of(compiled.graphs[0]) == ["gathered_attn_idx"]
    with config.override(**changes):
        with neuron_sim.record() as seen:
            got = compiled(inputs)
        assert [call.name for call in seen.kernels] == kernels
        assert_same_bits(got, inputs.run())
        assert len(compiled.graphs) == 2
        compiled(inputs)
        assert len(compiled.graphs) == 2
    assert str(compiled.graphs[0].graph) != str(compiled.graphs[1].graph)
    compiled(inputs)  # the first graph serves again
    assert len(compiled.graphs) == 2


@pytest.mark.parametrize("name", ["logits", "pool"])
def test_every_operator_puts_the_guard_on(name):
    problem = {"logits": problems("neuron")[1], "pool": problems("neuron")[2]}[name]
    compiled = neuron_sim.compile_fullgraph(lambda p: p.run())
    compiled(problem)
    with config.override(fast_e4m3=False):
        compiled(problem)
    assert len(compiled.graphs) == 2


def test_on_cpu_settings_are_no_reason_to_compile_again():
    compiled = neuron_sim.compile_fullgraph(layer)
    compiled(*problems("cpu"))
    with config.override(nki_attn=False):
        compiled(*problems("cpu"))
    assert len(compiled.graphs) == 1


def test_the_key_of_compiled_artifacts_on_disk_depends_on_the_settings(monkeypatch):
    """AOTAutograd looks its cache up before it traces, by a key made of the graph in which the operator is opaque."""
    from torch._functorch._aot_autograd import autograd_cache

    keys, real = [], autograd_cache.autograd_cache_key

    def spy(*args, **kwargs):
        result = real(*args, **kwargs)
        keys.append(result[0])
        return result

    monkeypatch.setattr(autograd_cache, "autograd_cache_key", spy)
    inputs = strategies_pool.build(POOL)  # the key is made of the graph, on every device
    for changes in ({}, {"nki_attn": False}, {"nki_attn": False, "prefill_bucket": 4}, {}):
        torch._dynamo.reset()
        with config.override(**changes), torch._inductor.utils.fresh_cache():
            torch.compile(torch.ops.deepinfer.softmax_pool, backend="inductor")(*inputs)
    assert len(keys) == 4
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


def test_an_override_inside_compiled_code_is_refused():
    """It would end before AOTAutograd traces the operator."""

    def overridden(inputs):
        with config.override(nki_attn=False):
            return inputs.run()

    inputs = strategies_decode.build(DECODE, "neuron")
    with pytest.raises(Exception, match="expected a call outside compiled code, got one inside"):
        neuron_sim.compile_fullgraph(overridden)(inputs)
