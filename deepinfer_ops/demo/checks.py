"""Was the needle found, and does everything agree with float64?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..softmax_pool import softmax_pool
from . import exact
from .report import Report
from .scene import RATIO, Caches, Context, to_slots, windows
from .step import TORCH, StepResult, attend, score

LABELS = (
    "softmax_pool",
    "paged_mqa_logits",
    "top-k, its weakest key",
    "flash_mla_decode",
    "softmax_pool, composed",
    "paged_mqa_logits, composed",
    "flash_mla_decode, composed",
)
"""What is compared with float64; "composed": from torch operators."""


class Verdict(NamedTuple):
    """What one format's step came to."""

    rank: int  # of the needle among the index scores, 1 is best
    needle_score: float
    runner_up: float
    chosen: bool
    weight: float  # attention weight of the needle in its weakest head
    cosine: float  # of the output with the planted latent, in its weakest head
    missed: int  # keys of the exact top-k that were not chosen
    used: dict[str, float]  # largest error / tolerance, by operator
    quantization: float  # relative RMS difference of the exact outputs with and without quantization


def judge(context: Context, latents: torch.Tensor, caches: Caches, result: StepResult) -> Verdict:
    chosen, scores, needle = result.chosen[0], result.scores[0].float(), context.needle
    q = exact.index_elements(caches.q_data[0, 0], caches.q_sf[0, 0])
    k = exact.index_keys(caches.index, caches.block_table[0])[: caches.keys]
    exact_scores = exact.index_scores(q, k, context.index_weights[0])

    slots = to_slots(chosen, caches.block_table[0]).long()
    ring = caches.swa.flatten(0, 2)[caches.swa_slots[0, 0].long()]
    keys = torch.cat([exact.latents(ring), exact.latents(caches.compressed.flatten(0, 2)[slots])])
    attended, weights = exact.attention(context.query[0, 0], keys, context.sink)
    whole = torch.cat([context.recent, latents[chosen].float()]).double()
    unquantized, _ = exact.attention(context.query[0, 0], whole, context.sink)

    # The needle's column of the weights: after the sliding window, at its place among the chosen.
    place = (chosen == needle).nonzero().flatten()
    weight = weights[:, len(ring) + place[0]].min() if len(place) else torch.zeros(())
    out = result.out[0, 0].double()
    best = scores.clone()
    best[needle] = -torch.inf
    top = exact_scores.value.topk(len(chosen)).indices
    last, weakest = top[-1], chosen[exact_scores.value[chosen].argmin()]
    shortfall = exact_scores.value[last] - exact_scores.value[weakest]
    composed = attend(TORCH, context.query, context.sink, slots[None, None], caches)
    composed_scores = score(TORCH, context.index_weights, caches)
    return Verdict(
        rank=1 + int((scores > scores[needle]).sum()),
        needle_score=float(scores[needle]),
        runner_up=float(best.max()),
        chosen=len(place) > 0,
        weight=float(weight),
        cosine=float(torch.cosine_similarity(out, context.fact.double()[None], dim=1).min()),
        missed=int((~torch.isin(top, chosen)).sum()),
        used={
            "paged_mqa_logits": exact_scores.used(result.scores[0]),
            "top-k, its weakest key": float(shortfall / exact_scores.tolerance[torch.stack([last, weakest])].sum()),
            "flash_mla_decode": attended.used(result.out[0, 0]),
            "paged_mqa_logits, composed": exact_scores.used(composed_scores[0]),
            "flash_mla_decode, composed": attended.used(composed[0, 0]),
        },
        quantization=float((attended.value - unquantized.value).norm() / unquantized.value.norm()),
    )


def pooling_error(context: Context) -> dict[str, float]:
    """Largest error / tolerance of ``softmax_pool`` over the first 512 windows and the needle's, both ways."""
    count = min(512, context.compressed)
    spans = [slice(0, RATIO * count), slice(RATIO * (context.needle - 1), RATIO * (context.needle + 1))]
    used = {"softmax_pool": 0.0, "softmax_pool, composed": 0.0}
    for span in spans:
        scores, rows = windows(context.latent_scores[span], -torch.inf), windows(context.latent_rows[span], 0.0)
        want = exact.pool(scores, rows)
        for name, pool in (("softmax_pool", softmax_pool), ("softmax_pool, composed", TORCH.softmax_pool)):
            used[name] = max(used[name], want.used(pool(scores, rows)))
    return used


def show(
    report: Report,
    context: Context,
    verdicts: Mapping[str, Verdict],
    pooling: Mapping[str, float],
    compiled_is_eager: Mapping[str, bool] | None,
) -> None:
    """Both tables, and a failure for each thing that is not as it must be."""
    tokens = f"tokens {RATIO * context.needle}..{RATIO * context.needle + RATIO - 1}"
    report.table(
        f"Needle, planted at compressed key {context.needle} ({tokens})",
        ["", "rank", "score", "runner-up", "chosen", "attention weight", "cos(output, needle)"],
        [
            [
                name,
                f"{v.rank} of {context.compressed}",
                f"{v.needle_score:.1f}",
                f"{v.runner_up:.1f}",
                "yes" if v.chosen else "no",
                f"{100 * v.weight:.1f} %",
                f"{v.cosine:.4f}",
            ]
            for name, v in verdicts.items()
        ],
    )
    for name, v in verdicts.items():
        found = v.rank == 1 and v.chosen and v.weight > 0.5 and v.cosine > 0.9
        report.check(found, f"{name}: the needle was not found (rank {v.rank}, weight {v.weight:.3f})")
    rows = []
    for label in LABELS:
        shares = {name: {**pooling, **v.used}[label] for name, v in verdicts.items()}
        rows.append([label, *(f"{100 * share:.1f} %" for share in shares.values())])
        for name, share in shares.items():
            report.check(share <= 1.0, f"{name}: {label}: {share:.2f} times the tolerance from float64")
    rows.append(["top keys of float64 not chosen", *(str(v.missed) for v in verdicts.values())])
    rows.append(["output's change by quantization, RMS", *(f"{100 * v.quantization:.1f} %" for v in verdicts.values())])
    if compiled_is_eager is not None:
        same = [compiled_is_eager[name] for name in verdicts]
        rows.append(["compiled step = eager step, bit for bit", *("yes" if s else "no" for s in same)])
        report.check(all(same), "the compiled step's results differ from the eager ones")
    report.table(
        "Largest error against float64, as a share of the tolerance (one rounding to bf16 alone may use 100 %)",
        ["", *verdicts],
        rows,
    )
