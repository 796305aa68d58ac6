"""What each route of the Neuron composition moves and computes, for layers of DeepSeek-V4.

    python -m benchmarks.neuron_cost                 every case
    python -m benchmarks.neuron_cost --model V4-Pro  one model's

Counts from shapes alone, not times: the numbers to argue about the thresholds of ``deepinfer_ops/config.py`` with. In
each case ``*`` marks the route that default settings take; the other lines are what settings could make of the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepinfer_ops import config, neuron
from deepinfer_ops.neuron.plans import Plan

RING, WINDOW, PAGE, POOL_REQUESTS = 256, 128, 64, 64
"""Slots of a request's ring, keys a token sees of it, compressed keys of a block, requests the caches have room for."""


@dataclass(frozen=True)
class Model:
    """``topk``: keys that the indexer of a 4:1 layer picks."""

    name: str
    heads: int
    index_heads: int
    topk: int


@dataclass(frozen=True)
class Situation:
    """``requests`` of ``rows`` query tokens each, at a context of ``context`` tokens."""

    name: str
    requests: int
    rows: int
    context: int


MODELS = (Model("V4-Flash", 64, 64, 512), Model("V4-Pro", 128, 64, 1024))
RATIOS = {"window only": None, "4:1, indexed": 4, "128:1, all keys": 128}
"""The three kinds of layer, by how many positions make one compressed key."""

SITUATIONS = (
    Situation("1 request", 1, 1, 16_384),
    Situation("8 requests", 8, 1, 16_384),
    Situation("64 requests", 64, 1, 16_384),
    Situation("512-token prompt chunk", 1, 512, 8_192),
)

ANY = 2**31 - 1
FORCED: dict[str, dict[str, int]] = {
    "table": {"attn_table_slots": ANY, "dense_attn_min_rows": ANY},
    "dense table": {"attn_table_slots": ANY, "dense_attn_min_rows": 0, "dense_attn_max_kv": ANY},
    "shared scope": {"attn_table_slots": 0, "prefill_bucket": 512},
    "per row": {"attn_table_slots": 0},
}
"""Settings that lead to a route wherever a call has it at all."""


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def decode_call(model: Model, ratio: int | None, now: Situation, fmt: int) -> dict[str, object]:
    """The arguments of one layer's attention, with the hints of an engine that knows its batch."""
    lists = meta(now.requests, now.rows, WINDOW, dtype=torch.int32)
    call: dict[str, object] = {
        "q": meta(now.requests, now.rows, model.heads, 512, dtype=torch.bfloat16),
        "k_cache": meta(POOL_REQUESTS, RING, 1, fmt, dtype=torch.uint8),
        "indices": lists,
        "max_requests": now.requests,
    }
    if ratio is None:
        return call
    visible = now.context // ratio
    blocks = POOL_REQUESTS * -(-visible // PAGE)
    width = min(model.topk, visible) if ratio == 4 else visible
    return call | {
        "extra_k_cache": meta(blocks, PAGE, 1, fmt, dtype=torch.uint8),
        "extra_indices": meta(now.requests, now.rows, width, dtype=torch.int32),
        "max_context": visible,
    }


def chunk_of(ratio: int, now: Situation) -> dict[str, object]:
    blocks = -(-now.context // ratio // PAGE)
    return {
        "chunk_block_table": meta(blocks, dtype=torch.int32),
        "chunk_blocks": blocks,
        "chunk_offset_len": meta(now.rows, 2, dtype=torch.int32),
    }


def decode_plans(model: Model, ratio: int | None, now: Situation, fmt: int) -> Iterator[tuple[str, Plan]]:
    """The default route first, then every other one that the call can take."""
    call = decode_call(model, ratio, now, fmt)
    # Its promise is that the list of a row holds every key the row sees: so on 128:1 layers.
    hints = chunk_of(ratio, now) if ratio == 128 and now.rows > 1 else {}
    default = neuron.explain("flash_mla_decode", **call, **hints)
    yield f"{default.route} *", default
    for name, settings in FORCED.items():
        with config.override(**settings):
            plan = neuron.explain("flash_mla_decode", **call)
        if plan.route == name != default.route:
            yield name, plan
    without = {name: value for name, value in call.items() if name not in ("max_requests", "max_context")}
    with config.override(**FORCED["table"]):
        plan = neuron.explain("flash_mla_decode", **without)
    if plan.route == "table":
        yield "table, no hints", plan


def logits_plans(model: Model, now: Situation) -> Iterator[tuple[str, Plan]]:
    tokens, visible = now.requests * now.rows, now.context // 4
    width = -(-visible // PAGE)
    call = (
        meta(tokens, 1, model.index_heads, 128, dtype=torch.float8_e4m3fn),
        meta(tokens, 1, model.index_heads, 4, dtype=torch.uint8),
        meta(POOL_REQUESTS * width, PAGE, 1, 132, dtype=torch.uint8),
        meta(tokens, model.index_heads, dtype=torch.bfloat16),
        meta(tokens, 1, dtype=torch.int32),
        meta(tokens, width, dtype=torch.int32),
        visible,
    )
    one = now.requests == 1
    yield "per token" + ("" if one else " *"), neuron.explain("paged_mqa_logits", *call)
    if one:
        yield "one sequence *", neuron.explain("paged_mqa_logits", *call, one_sequence=True)


def pool_plans(now: Situation) -> Iterator[tuple[str, Plan]]:
    """Rows of the 4:1 compressor: overlapping windows of 8."""
    rows = meta(now.requests * -(-now.rows // 4), 8, 512, dtype=torch.float32)
    plan = neuron.explain("softmax_pool", rows, rows)
    yield f"{plan.route} *", plan


HEADINGS = f"{'':30}{'gathered':>12}{'in kernel':>12}{'decoded':>12}{'matmul':>12}{'kernel':>8}"
UNITS = f"{'':30}{'MB':>12}{'MB':>12}{'M elements':>12}{'GFLOP':>12}{'calls':>8}"


def line(name: str, plan: Plan) -> str:
    counts = (plan.bytes_gathered, plan.kernel_bytes_gathered, plan.decoded_elements, plan.matmul_flops / 1e3)
    return f"  {name:28}" + "".join(f"{count / 1e6:12,.2f}" for count in counts) + f"{plan.kernel_calls:8}"


def report(models: tuple[Model, ...], fmt: int) -> None:
    for model in models:
        for now in SITUATIONS:
            print(f"\n{model.name}, {now.name}, context {now.context:,}\n{HEADINGS}\n{UNITS}")
            for layer, ratio in RATIOS.items():
                print(f" flash_mla_decode, {layer}")
                for name, plan in decode_plans(model, ratio, now, fmt):
                    print(line(name, plan))
            print(" paged_mqa_logits")
            for name, plan in logits_plans(model, now):
                print(line(name, plan))
            print(" softmax_pool, 4:1")
            for name, plan in pool_plans(now):
                print(line(name, plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[model.name for model in MODELS], help="one model only")
    parser.add_argument("--format", choices=["fp8", "fp4"], default="fp8", help="records of both caches")
    arguments = parser.parse_args()
    models = tuple(model for model in MODELS if arguments.model in (None, model.name))
    report(models, {"fp8": 528, "fp4": 288}[arguments.format])


if __name__ == "__main__":
    main()
