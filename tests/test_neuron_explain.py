"""``explain`` tells route, sizes and reason from shapes alone, for the calls that the operators take."""

from __future__ import annotations

import pytest
import torch

from deepinfer_ops import config, flash_mla_decode, neuron


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_call(rows: int = 8) -> dict[str, object]:
    return {
        "q": meta(rows, 1, 64, 512, dtype=torch.bfloat16),
        "k_cache": meta(8, 256, 1, 528, dtype=torch.uint8),
        "indices": meta(rows, 1, 128, dtype=torch.int32),
        "extra_k_cache": meta(40_000, 64, 1, 528, dtype=torch.uint8),
        "extra_indices": meta(rows, 1, 512, dtype=torch.int32),
        "max_requests": 8,
        "max_context": 1000,
    }


def test_it_prints_every_size_and_cost():
    assert str(neuron.explain("flash_mla_decode", **decode_call())).split("\n") == [
        "route               table",
        "why                 8 rows and 18432 slots to decode <= attn_table_slots 32768",
        "kernel              gathered_attn_idx x 1",
        "rows                8, padded to 8, of 64 heads",
        "keys of a row       640",
        "table rows          18560",
        "main cache          fp8, page 256: whole cache decoded in place, 2048 records",
        "extra cache         fp8, page 64: used blocks gathered, 256 of 40000 blocks, 16384 records",
        "bytes gathered      8,650,752",
        "gathered in kernel  5,242,880",
        "decoded elements    9,437,184",
        "matmul FLOPs        671,088,640",
    ]


def test_it_follows_the_settings_in_force():
    call = decode_call()
    with config.override(attn_table_slots=1000):
        plan = neuron.explain("flash_mla_decode", **call)
    assert plan.route == "per row"
    assert neuron.explain("flash_mla_decode", **call).route == "table"


@pytest.mark.parametrize(
    "op",
    [
        "flash_mla_decode",
        flash_mla_decode,
        torch.ops.deepinfer.flash_mla_decode,
        torch.ops.deepinfer.flash_mla_decode.default,
    ],
    ids=["name", "function", "packet", "overload"],
)
def test_an_operator_goes_by_its_name_or_itself(op):
    assert neuron.explain(op, **decode_call()).route == "table"


def test_it_raises_what_the_operator_raises():
    call = decode_call() | {"indices": meta(7, 1, 128, dtype=torch.int32)}
    message = r"deepinfer::flash_mla_decode: indices: expected shape \[8, 1, topk\], got \[7, 1, 128\]"
    with pytest.raises(RuntimeError, match=message):
        neuron.explain("flash_mla_decode", **call)


@pytest.mark.parametrize("op", ["flash_mla", torch.add], ids=["name", "function"])
def test_an_unknown_operator_is_named(op):
    with pytest.raises(ValueError, match="op: expected one of flash_mla_decode, paged_mqa_logits, softmax_pool, got"):
        neuron.explain(op)


def test_logits_and_pooling_print_too():
    plan = neuron.explain(
        "paged_mqa_logits",
        meta(4, 1, 64, 128, dtype=torch.float8_e4m3fn),
        meta(4, 1, 64, 4, dtype=torch.uint8),
        meta(100, 64, 1, 132, dtype=torch.uint8),
        meta(4, 64, dtype=torch.bfloat16),
        meta(4, 1, dtype=torch.int32),
        meta(4, 20, dtype=torch.int32),
        1000,
        one_sequence=True,
    )
    assert str(plan).split("\n") == [
        "route               one sequence",
        "why                 one_sequence: keys gathered once",
        "kernel              weighted_scores x 1",
        "tokens              4 of 64 heads, 4 in a call",
        "pages               1 x 16 of 64 tokens, fp8",
        "positions           1024",
        "bytes gathered      135,168",
        "gathered in kernel  0",
        "decoded elements    131,072",
        "matmul FLOPs        67,633,152",
    ]
    rows = meta(64, 8, 512, dtype=torch.float32)
    assert "rows                64 of 8 x 512" in str(neuron.explain("softmax_pool", rows, rows))
