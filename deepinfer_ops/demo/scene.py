"""What the step needs: a context with a planted needle, pooled, quantized and written into paged caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..packers import quantize_kv, write_kv
from ..packers_index import quantize_index, quantize_index_query, write_index
from ..record_format import INDEX_DIM, INDEX_FORMATS, KV_FORMATS, LATENT_DIM, by_name
from ..softmax_pool import softmax_pool

RATIO = 4
"""Tokens per compressed key. Its window also covers the 4 tokens before: 8 rows."""

WINDOW = 128
"""Tokens of the sliding window, kept uncompressed in a ring."""

TOPK = 512
"""Compressed keys that the attention sees."""

INDEX_HEADS = 64
PAGE = 64
"""Slots in a page of the compressed and of the index cache."""

NEEDLE_LOGIT = 12.0
"""Attention logit of the needle; the other keys' are near N(0, 1), so 640 of them weigh about e^7 together."""


@dataclass(frozen=True)
class Context:
    """The float side. A token enters its own window with one row and the next window with another one."""

    length: int
    needle: int  # compressed position
    latent_rows: torch.Tensor  # [context, 2, 512] for (next window, own window)
    latent_scores: torch.Tensor  # [context, 2, 512]
    index_rows: torch.Tensor  # [context, 2, 128]
    index_scores: torch.Tensor  # [context, 2, 128]
    recent: torch.Tensor  # [min(128, context), 512], the sliding window's latents, oldest first
    fact: torch.Tensor  # [512], the needle's latent
    query: torch.Tensor  # [1, 1, heads, 512] bfloat16
    sink: torch.Tensor  # [heads]
    index_query: torch.Tensor  # [1, 1, 64, 128]
    index_weights: torch.Tensor  # [1, 64] bfloat16

    @property
    def compressed(self) -> int:
        """Compressed keys; up to 3 tokens at the end wait for their window to fill."""
        return self.length // RATIO


@dataclass(frozen=True)
class Caches:
    """The quantized side: the arguments of the step's operators, in one format."""

    swa: torch.Tensor  # [rings, 128, 1, bytes]
    swa_slots: torch.Tensor  # [1, 1, min(128, context)] int32
    compressed: torch.Tensor  # [pages, 64, 1, bytes]
    index: torch.Tensor  # [pages, 64, 1, token_bytes]
    block_table: torch.Tensor  # [1, W] int32, of both
    context_lens: torch.Tensor  # [1, 1] int32
    q_data: torch.Tensor  # [1, 1, 64, 128] float8_e4m3fn or [1, 1, 64, 64] int8
    q_sf: torch.Tensor  # [1, 1, 64, 4] uint8
    keys: int  # compressed keys of the request


def make_context(length: int, heads: int, seed: int) -> Context:
    """Random tokens of unit-variance latents, and a fact written over the rows of one window."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    # Outside the sliding window, so that only the compressed cache knows it.
    needle = int(torch.randint(1, (length - WINDOW) // RATIO, (1,), generator=rng))
    latents, index = normal(length, 2, LATENT_DIM), normal(length, 2, INDEX_DIM)
    fact, topic = normal(LATENT_DIM), normal(INDEX_DIM)
    fact = fact * (LATENT_DIM**0.5 / fact.norm())
    for rows, planted in ((latents, fact), (index, topic)):
        own = slice(RATIO * needle, RATIO * (needle + 1))
        before = slice(RATIO * (needle - 1), RATIO * needle)
        rows[own, 1] = planted + 0.1 * rows[own, 1]
        rows[before, 0] = planted + 0.1 * rows[before, 0]
    along_fact = NEEDLE_LOGIT * fact / LATENT_DIM**0.5  # times a latent of norm 512^0.5 and the scale 512^-0.5
    return Context(
        length=length,
        needle=needle,
        latent_rows=latents,
        latent_scores=normal(length, 2, LATENT_DIM),
        index_rows=index,
        index_scores=normal(length, 2, INDEX_DIM),
        recent=normal(min(WINDOW, length), LATENT_DIM),
        fact=fact,
        query=(normal(1, 1, heads, LATENT_DIM) + along_fact).to(torch.bfloat16),
        sink=normal(heads),
        index_query=normal(1, 1, INDEX_HEADS, INDEX_DIM) + 0.5 * topic,
        index_weights=(normal(1, INDEX_HEADS) * 0.2 + 0.5).to(torch.bfloat16),
    )


def windows(rows: torch.Tensor, missing: float) -> torch.Tensor:
    """``[context, 2, D]`` to overlapping windows ``[context // 4, 8, D]``: four rows of the window before, four own.

    The first window has none before it: ``missing`` stands there (-inf in scores masks them).
    """
    count = rows.shape[0] // RATIO
    blocks = rows[: count * RATIO].view(count, RATIO, 2, rows.shape[2])
    before = torch.full_like(blocks[:, :, 0], missing)
    before[1:] = blocks[:-1, :, 0]
    return torch.cat([before, blocks[:, :, 1]], dim=1)


def newest_window(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows ``[1, 8, 512]`` of the last full window: what one decode step pools."""
    end = context.compressed * RATIO
    tail = slice(end - 2 * RATIO, end)
    return windows(context.latent_scores[tail], 0.0)[1:], windows(context.latent_rows[tail], 0.0)[1:]


def normalised(rows: torch.Tensor) -> torch.Tensor:
    """Root mean square 1 per row, as the compressor's norm leaves its keys (learned gains left out)."""
    wide = rows.float()
    return (wide * wide.square().mean(-1, keepdim=True).rsqrt()).to(torch.bfloat16)


def pool_context(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed latents ``[n, 512]`` and index keys ``[n, 128]``, through ``softmax_pool``."""
    missing = float("-inf")
    latents = softmax_pool(windows(context.latent_scores, missing), windows(context.latent_rows, 0.0))
    index = softmax_pool(windows(context.index_scores, missing), windows(context.index_rows, 0.0))
    return normalised(latents), normalised(index)


def make_caches(context: Context, latents: torch.Tensor, index_keys: torch.Tensor, format: str, seed: int) -> Caches:
    """Paged caches as a server has them: shuffled pages, some not this request's, 0xFF where it did not write."""
    rng = torch.Generator().manual_seed(seed)
    kv_bytes, token_bytes = by_name(KV_FORMATS, format).bytes, by_name(INDEX_FORMATS, format).bytes
    count = context.compressed
    table_width = -(-count // PAGE)
    pages = table_width + 8
    block_table = torch.randperm(pages, generator=rng)[:table_width].to(torch.int32)[None]
    slots = to_slots(torch.arange(count), block_table[0])

    compressed = torch.full((pages, PAGE, 1, kv_bytes), 0xFF, dtype=torch.uint8)
    write_kv(compressed, slots, quantize_kv(latents, format))
    index = torch.full((pages, PAGE, 1, token_bytes), 0xFF, dtype=torch.uint8)
    write_index(index, slots, *quantize_index(index_keys, format))

    # This request's ring is the second of four; token t stands at t modulo 128.
    swa = torch.full((4, WINDOW, 1, kv_bytes), 0xFF, dtype=torch.uint8)
    tokens = torch.arange(context.length - len(context.recent), context.length)
    swa_slots = WINDOW + tokens % WINDOW
    write_kv(swa, swa_slots, quantize_kv(context.recent, format))

    q_data, q_sf = quantize_index_query(context.index_query, format)
    return Caches(
        swa=swa,
        swa_slots=swa_slots.to(torch.int32)[None, None],
        compressed=compressed,
        index=index,
        block_table=block_table,
        context_lens=torch.tensor([[count]], dtype=torch.int32),
        q_data=q_data,
        q_sf=q_sf,
        keys=count,
    )


def to_slots(positions: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Positions in a request's sequence to slots of the paged cache."""
    return block_table[positions // PAGE] * PAGE + positions % PAGE
