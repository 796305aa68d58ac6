"""Each graph rule is broken by a graph made to break it, and by no other; what is allowed passes."""

from __future__ import annotations

import neuron_sim
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.skipif(neuron_sim.install() != "simulated", reason="the real torch_neuronx is in use")

E4M3 = torch.float8_e4m3fn


def traced(function, *args, dynamic=False):
    compiled = neuron_sim.compile_fullgraph(function, dynamic=dynamic)
    compiled(*args)
    return compiled.graph


def rules(graph, **options):
    return sorted({broken.rule for broken in neuron_sim.graph_rules.check(graph, **options)})


def cache(blocks=4, width=64):
    return torch.zeros(blocks, width, dtype=torch.uint8, device="neuron")


def index(*shape):
    return torch.zeros(*shape, dtype=torch.int32, device="neuron")


def test_arithmetic_moves_and_integer_gathers_break_nothing():
    def function(c, i):
        rows = c[i.clamp(0, 3)].float() * 2
        live = torch.zeros(8, device="neuron").scatter(0, i.long(), 1.0)
        return torch.softmax(rows, -1).bfloat16(), live.cumsum(0), torch.where(i > 0, i, 0)

    assert rules(traced(function, cache(), index(8))) == []


def test_as_strided_is_found():
    assert rules(traced(lambda c: c.as_strided((2, 2), (64, 1), 3) + 1, cache())) == ["as-strided"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.index_put((x > 0,), x.new_ones(())),
        lambda x: torch.masked_scatter(x, x > 0, x),
        lambda x: x.unique(),
    ],
)
def test_sizes_and_control_that_depend_on_data_are_found(function):
    graph = make_fx(function, tracing_mode="real")(torch.arange(4.0, device="neuron"))
    for node in graph.graph.nodes:  # make_fx on real tensors keeps their metadata elsewhere
        node.meta.setdefault("val", node.meta.get("tensor_meta"))
    assert rules(graph) == ["data-dependent"]


def test_reading_a_value_is_found():
    graph = make_fx(lambda x: x * x.sum().item(), tracing_mode="symbolic")(torch.arange(4.0, device="neuron"))
    assert "data-dependent" in rules(graph)


@pytest.mark.parametrize(
    "function",
    [
        lambda c, i: c[i].view(E4M3).bfloat16(),
        lambda c, i: c.index_select(0, i).view(E4M3).bfloat16(),
        lambda c, i: torch.nn.functional.embedding(i, c).view(E4M3).float(),
        lambda c, i: c.view(8, 32)[i][:, :16].contiguous().view(2, 4, 16).view(E4M3).bfloat16(),
        lambda c, i: c.view(4, 2, 32)[i, i % 2].reshape(-1, 16).view(E4M3).bfloat16(),
        lambda c, i: c[:, :32].contiguous().view(E4M3).bfloat16(),
        lambda c, i: c[1:3].view(E4M3).bfloat16(),
    ],
)
def test_bytes_as_they_lie_may_be_seen_as_e4m3(function):
    assert rules(traced(function, cache(), index(8))) == []


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda c, i: (c[i] & 127).view(E4M3).float(), "computed by aten.bitwise_and"),
        (lambda c, i: (c + 1)[i].view(E4M3).float(), "computed by aten.add"),
        (lambda c, i: torch.cat([c[i], c[i]]).view(E4M3).float(), "computed by aten.cat"),
        (lambda c, i: torch.where(i[:, None] > 0, c[i], 0).view(E4M3).float(), "computed by aten.where"),
        (lambda c, i: c[i][:, :32].view(E4M3).float(), "not contiguous"),
        (lambda c, i: c[i].view(torch.int32) + 1, "uint8 -> int32 of gathered bytes"),
        (lambda c, i: c.view(torch.int32) + 1, "uint8 -> int32 of input bytes"),
        (lambda c, i: c[i].view(torch.float8_e5m2).float(), "uint8 -> float8_e5m2 of gathered bytes"),
        (lambda c, i: (i << 23).view(torch.float32) + 1, "int32 -> float32 of a tensor computed by"),
    ],
)
def test_other_bitcasts_are_found_with_their_reason(function, why):
    broken = neuron_sim.graph_rules.check(traced(function, cache(), index(8)))
    assert [b.rule for b in broken] == ["bitcast"]
    assert why in broken[0].why


def test_a_one_byte_query_may_be_seen_as_bytes_and_converted_but_not_used_as_float8():
    q = torch.zeros(2, 128, device="neuron").to(E4M3)
    assert rules(traced(lambda q: q.view(torch.uint8) & 127, q)) == []
    assert rules(traced(lambda q: q.view(torch.int8).int(), q)) == []
    assert rules(traced(lambda q: q.bfloat16(), q)) == []
    assert rules(traced(lambda q: q.t().contiguous().float(), q)) == ["float8"]


def test_a_float8_tensor_that_is_stored_moved_or_returned_is_found():
    assert rules(traced(lambda c: c.float().to(E4M3), cache())) == ["float8"]
    assert rules(traced(lambda c, i: c[i].view(E4M3), cache(), index(8))) == ["float8"]
    assert rules(traced(lambda c, i: c[i].view(E4M3)[:, 0].float(), cache(), index(8))) == ["float8"]


def test_the_dtypes_of_a_graph_are_listed_inputs_included():
    graph = traced(lambda c, i: c[i].view(E4M3).bfloat16(), cache(), index(8))
    assert neuron_sim.graph_rules.dtypes(graph) == {torch.uint8, torch.int32, E4M3, torch.bfloat16}


def attention(rows, keys, table=None):
    from torch_neuronx.nki_hop import wrap_nki

    def operands(kv_rows):
        return (
            torch.zeros(rows * 2, 512, device="neuron").bfloat16(),
            torch.zeros(kv_rows, 512, device="neuron").bfloat16(),
            torch.zeros(rows, keys, device="neuron"),
            torch.zeros(2, 1, device="neuron"),
        )

    if table is None:
        kernel = wrap_nki(neuron_sim.kernel_definitions.gathered_attn)
        return traced(lambda q, kv, mask, sink: kernel(q, kv, mask, sink, 0.5), *operands(rows * keys))
    kernel = wrap_nki(neuron_sim.kernel_definitions.gathered_attn_idx)
    q, kv, mask, sink = operands(table)
    idx = torch.zeros(rows, keys, dtype=torch.int32, device="neuron")
    return traced(lambda *a: kernel(*a, softmax_scale=0.5), q, kv, idx, mask, sink)


@pytest.mark.parametrize("table", [None, 40])
@pytest.mark.parametrize(
    ("rows", "keys", "broken"),
    [
        (1, 128, []),
        (8, 384, []),
        (6, 128, ["kernel-rows"]),
        (4, 100, ["kernel-keys"]),
        (3, 64, ["kernel-keys", "kernel-rows"]),
    ],
)
def test_row_and_key_counts_into_attention_kernels_are_checked(rows, keys, table, broken):
    assert rules(attention(rows, keys, table)) == broken


def test_a_broken_rule_can_be_waived_by_name():
    assert rules(attention(3, 64), ignore=("kernel-keys",)) == ["kernel-rows"]


def test_the_score_kernel_is_checked_and_pooling_has_no_size_rule():
    from torch_neuronx.nki_hop import wrap_nki

    def scores(tokens, keys):
        kernel = wrap_nki(neuron_sim.kernel_definitions.weighted_scores)
        q, k = (torch.zeros(n, 128, device="neuron").bfloat16() for n in (tokens * 3, keys))
        return traced(lambda q, k, w: kernel(q, k, w), q, k, torch.zeros(3, tokens, device="neuron"))

    assert rules(scores(2, 256)) == []
    assert rules(scores(3, 200)) == ["kernel-keys", "kernel-rows"]
    pool = wrap_nki(neuron_sim.kernel_definitions.softmax_pool)
    rows = torch.zeros(5, 3, 7, device="neuron")
    assert rules(traced(lambda a, b: pool(a, b), rows, rows + 1)) == []


def test_a_kernel_nobody_described_is_an_error():
    from torch_neuronx.nki_hop import wrap_nki

    @neuron_sim.define("undescribed")
    def undescribed(a):
        return a + 1

    kernel = wrap_nki(undescribed)
    graph = traced(lambda a: kernel(a), torch.zeros(4, device="neuron"))
    with pytest.raises(LookupError, match="undescribed is not in graph_rules"):
        neuron_sim.graph_rules.check(graph)


def test_symbolic_sizes_are_found():
    assert rules(traced(lambda x: x * 2, torch.zeros(6, 4, device="neuron"), dynamic=True)) == ["static"]
    assert rules(traced(lambda x: x * 2, torch.zeros(6, 4, device="neuron"))) == []


def test_a_broken_rule_reads_as_a_sentence():
    [broken] = neuron_sim.graph_rules.check(attention(6, 128))
    assert str(broken) == "kernel-rows: gathered_attn_proxy: gathered_attn(mask_bias) has 6 rows, not a power of two"
