"""Which route a call takes: pure functions of shapes, strides, dtypes, hints and settings.

The table of routes, with the measurements behind it, is in docs/neuron.md.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import Settings
from .plans import DecodePlan, LogitsPlan, PoolPlan, Read, ScopePlan
from .shapes import DecodeShape, LogitsShape, PoolShape, ScopeShape, power_of_two, round_up

KEY_TILE = 128
"""Keys come in multiples of a partition count."""

MAX_KERNEL_HEADS = 128
"""Heads lie on the 128 partitions of one tile."""

MAX_KERNEL_POOL = 4096
"""Rows pooled into one that the kernel's tiles hold in SBUF, with room to spare (it fits about 8000)."""

SHARED_MIN_TOPK = 1024
"""Lists shorter than this stay per row on the shared-scope route."""

SWA_BLOCK = 64
"""Slots of a sub-block of the sliding-window ring."""


def plan_decode(shape: DecodeShape, settings: Settings) -> DecodePlan:
    """The route of one ``flash_mla_decode`` call."""
    scopes = tuple(scope for scope in shape.scopes if scope.topk and scope.cache.slots)
    if not shape.rows or not scopes:
        why = "no rows" if not shape.rows else "no scope has both list entries and slots: every row is 0"
        return DecodePlan("empty", why, None, 0, shape.rows, shape.rows, shape.heads, 0, ())
    gathered = _plan_gathered(shape, scopes, settings)
    refusal = _chunk_refusal(shape, scopes, settings)
    if shape.chunk_blocks is None:
        return gathered
    if refusal:
        return replace(gathered, reason=f"{gathered.reason}; not the dense chunk: {refusal}")
    return _plan_chunk(shape, scopes, gathered if settings.prefill_dense_check else None)


def _chunk_refusal(shape: DecodeShape, scopes: tuple[ScopeShape, ...], settings: Settings) -> str | None:
    if not settings.prefill_dense:
        return "prefill_dense is off"
    if len(scopes) < 2:
        return "it needs a main and an extra scope, both with list entries and slots"
    return None


def _plan_chunk(shape: DecodeShape, scopes: tuple[ScopeShape, ...], checked: DecodePlan | None) -> DecodePlan:
    """One ring and the request's first compressed blocks, attended to by dense matmuls."""
    ring, compressed = scopes
    plans = [ScopePlan(ring.name, ring.cache, ring.topk, Read.RING, 1, ring.cache.page)]
    if shape.chunk_blocks:
        records = shape.chunk_blocks * compressed.cache.page
        blocks = power_of_two(shape.chunk_blocks)
        plans.append(ScopePlan(compressed.name, compressed.cache, compressed.topk, Read.LISTED, blocks, records))
    keys = sum(plan.decoded for plan in plans)
    why = f"one request's chunk: its ring of {ring.cache.page} slots and {shape.chunk_blocks} compressed blocks"
    return _decode_plan(shape, "dense chunk", why, None, keys, plans, checked=checked)


def _plan_gathered(shape: DecodeShape, scopes: tuple[ScopeShape, ...], settings: Settings) -> DecodePlan:
    """Table, shared scope or per row."""
    if shape.rows > 1:
        tables = [_plan_table_scope(scope, shape, settings) for scope in scopes]
        slots = sum(table.decoded for table in tables)
        if slots <= settings.attn_table_slots:
            return _plan_table(shape, tables, slots, settings)
        why_not_table = f"{slots} slots to decode > attn_table_slots {settings.attn_table_slots}"
    else:
        why_not_table = "one row"
    widest = max(scope.topk for scope in scopes)
    if shape.rows == settings.prefill_bucket and widest >= SHARED_MIN_TOPK:
        plans = [_plan_row_scope(scope, shape, shared=scope.topk >= SHARED_MIN_TOPK) for scope in scopes]
        why = (
            f"{why_not_table}; {shape.rows} rows are the prefill_bucket and {widest} list entries >= {SHARED_MIN_TOPK}"
        )
        return _decode_plan(shape, "shared scope", why, None, sum(scope.topk for scope in scopes), plans)
    plans = [_plan_row_scope(scope, shape, shared=False) for scope in scopes]
    keys = round_up(sum(scope.topk for scope in scopes), KEY_TILE)
    kernel, why_plain = _attention_kernel("gathered_attn", shape, settings)
    return _decode_plan(shape, "per row", why_not_table + why_plain, kernel, keys, plans)


def _plan_table(shape: DecodeShape, tables: list[ScopePlan], slots: int, settings: Settings) -> DecodePlan:
    """A decoded table; its rows, one of them zeros for dead lanes, are padded to whole tiles."""
    table_rows = round_up(slots + 1, KEY_TILE)
    padded_rows = power_of_two(shape.rows)
    why = f"{shape.rows} rows and {slots} slots to decode <= attn_table_slots {settings.attn_table_slots}"
    if padded_rows >= settings.dense_attn_min_rows and slots <= settings.dense_attn_max_kv:
        why += (
            f"; dense: {padded_rows} padded rows >= dense_attn_min_rows {settings.dense_attn_min_rows}"
            f" and {slots} slots <= dense_attn_max_kv {settings.dense_attn_max_kv}"
        )
        return _decode_plan(shape, "dense table", why, None, table_rows, tables, table_rows)
    kernel, why_plain = _attention_kernel("gathered_attn_idx", shape, settings)
    keys = round_up(sum(table.topk for table in tables), KEY_TILE)
    return _decode_plan(shape, "table", why + why_plain, kernel, keys, tables, table_rows)


def _plan_row_scope(scope: ScopeShape, shape: DecodeShape, *, shared: bool) -> ScopePlan:
    if shared:
        return ScopePlan(scope.name, scope.cache, scope.topk, Read.SHARED, 0, scope.topk)
    records = power_of_two(shape.rows) * scope.topk
    return ScopePlan(scope.name, scope.cache, scope.topk, Read.RECORDS, 0, records)


def _plan_table_scope(scope: ScopeShape, shape: DecodeShape, settings: Settings) -> ScopePlan:
    """The used blocks where a hint bounds them to fewer than all, else the whole cache."""
    best = ScopePlan(scope.name, scope.cache, scope.topk, Read.WHOLE, 0, scope.cache.slots)
    if shape.max_requests is None:
        return best
    candidates = []
    if shape.max_context is not None:
        a_request = -(-shape.max_context // scope.cache.page) + 1
        candidates.append((scope.cache, a_request))
    is_ring = scope.name == "main" and len(shape.scopes) > 1
    if is_ring and settings.swa_subblock and scope.cache.page > SWA_BLOCK and scope.cache.page % SWA_BLOCK == 0:
        # Rows of a request look at windows of consecutive slots, one step apart: their union is topk + rows long. The
        # sum over requests stays below this bound however the rows are shared out.
        window = scope.topk + -(-shape.rows // max(shape.max_requests, 1))
        if scope.cache.even:
            candidates.append((scope.cache.in_blocks_of(SWA_BLOCK), -(-window // SWA_BLOCK) + 2))
    for cache, a_request in candidates:
        # One more: dead slots point at block 0.
        blocks = power_of_two(shape.max_requests * a_request + 1)
        if blocks < cache.blocks and blocks * cache.page < best.decoded:
            best = ScopePlan(scope.name, cache, scope.topk, Read.USED, blocks, blocks * cache.page)
    return best


def _attention_kernel(name: str, shape: DecodeShape, settings: Settings) -> tuple[str | None, str]:
    """The kernel, or None and why plain torch operators stand in."""
    if not settings.nki_attn:
        return None, "; plain torch: nki_attn is off"
    if shape.heads > MAX_KERNEL_HEADS:
        return None, f"; plain torch: {shape.heads} heads > {MAX_KERNEL_HEADS}"
    return name, ""


def _decode_plan(
    shape: DecodeShape,
    route: str,
    why: str,
    kernel: str | None,
    keys: int,
    scopes: list[ScopePlan],
    table_rows: int = 0,
    checked: DecodePlan | None = None,
) -> DecodePlan:
    rows, padded = shape.rows, power_of_two(shape.rows)
    calls = 1 if kernel else 0
    return DecodePlan(route, why, kernel, calls, rows, padded, shape.heads, keys, tuple(scopes), table_rows, checked)


def plan_logits(shape: LogitsShape) -> LogitsPlan:
    """The route of one ``paged_mqa_logits`` call."""
    length = min(shape.max_context_len, shape.width * shape.cache.page)
    call = (shape.query, shape.cache, shape.tokens, shape.heads)
    if not shape.tokens or not length or not shape.cache.blocks:
        return LogitsPlan("empty", "no token, no position or no page: every score is -inf", None, 0, *call, 0, 0, 0, 0)
    pages = -(-length // shape.cache.page)
    positions = round_up(pages * shape.cache.page, KEY_TILE)
    if shape.one_sequence:
        tables, together, route, why = 1, power_of_two(shape.tokens), "one sequence", "one_sequence: keys gathered once"
    else:
        tables, together, route, why = shape.tokens, 1, "per token", "each token has its own pages and context"
    kernel: str | None = "weighted_scores"
    if shape.heads > MAX_KERNEL_HEADS:
        kernel, why = None, f"{why}; plain torch: {shape.heads} heads > {MAX_KERNEL_HEADS}"
    return LogitsPlan(route, why, kernel, tables if kernel else 0, *call, tables, pages, positions, together)


def plan_pool(shape: PoolShape) -> PoolPlan:
    """The route of one ``softmax_pool`` call."""
    if not shape.n or not shape.d:
        return PoolPlan("empty", "no rows or no columns", None, 0, shape.n, shape.r, shape.d)
    if not 2 <= shape.r <= MAX_KERNEL_POOL:
        why = f"plain torch: the kernel takes R in 2..{MAX_KERNEL_POOL}, not {shape.r}"
        return PoolPlan("plain", why, None, 0, shape.n, shape.r, shape.d)
    return PoolPlan("kernel", f"R = {shape.r}", "softmax_pool", 1, shape.n, shape.r, shape.d)
