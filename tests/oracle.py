"""What the operators mean, in float64 and plain numpy. Imports nothing of the product, shares no code with it.

Each operator's oracle takes the operator's arguments and returns an :class:`Exact`: the value before the final
rounding, and how far a right implementation may be from it, element by element. Written for clarity: row by row, from
the definitions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

BF16_ROUNDING = 2.0**-8
"""Round to nearest even to 8 significant bits: half a unit in the last place is at most 2^-8 of the value."""

FP32_UNIT = 2.0**-24
"""Unit roundoff of float32: one operation is off by at most this part of its result."""

SMALLEST_NORMAL = 2.0**-126
"""Anything below may be kept or flushed to 0 (accelerators flush)."""


class Exact(NamedTuple):
    """The exact result and the allowed absolute difference, both float64 of the output's shape."""

    value: np.ndarray
    tolerance: np.ndarray


@dataclass(frozen=True)
class Format:
    """One token's bytes: ``dim`` elements, then one scale per ``group`` consecutive elements."""

    name: str
    dim: int
    element: str
    scale: str
    group: int

    @property
    def data_bytes(self) -> int:
        return self.dim // 2 if self.element == "e2m1" else self.dim

    @property
    def scales(self) -> int:
        return self.dim // self.group

    @property
    def bytes(self) -> int:
        return self.data_bytes + self.scales


KV = {f.bytes: f for f in (Format("fp8", 512, "e4m3", "ue8m0", 32), Format("fp4", 512, "e2m1", "e4m3", 16))}
INDEX = {f.bytes: f for f in (Format("fp8", 128, "e4m3", "ue8m0", 32), Format("fp4", 128, "e2m1", "ue8m0", 32))}
"""Main and index formats by bytes of a token: the tests' own statement of SPEC section 2."""


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def _e2m1(code: int) -> float:
    return (-1.0 if code & 8 else 1.0) * (0, 0.5, 1, 1.5, 2, 3, 4, 6)[code & 7]


def _ue8m0(code: int) -> float:
    # Code 0 would be 2^-127, no normal fp32 number: it counts as 0. 255 is NaN.
    return 0.0 if code == 0 else float("nan") if code == 255 else 2.0 ** (code - 127)


TABLES = {
    "e4m3": np.array([_e4m3(code) for code in range(256)]),
    "e2m1": np.array([_e2m1(code) for code in range(16)]),
    "ue8m0": np.array([_ue8m0(code) for code in range(256)]),
}
"""Value of every code, from the definitions."""


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float64 to the nearest bfloat16 (ties to even), subnormals included; 2^128 and beyond become infinite."""
    _, exponent = np.frexp(x)
    unit = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    with np.errstate(invalid="ignore"):
        rounded = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded)


def decode_products(data: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """``[..., data_bytes]`` and ``[..., scales]`` uint8 to ``[..., dim]``: element * scale in bf16, NaN kept."""
    codes = data
    if fmt.element == "e2m1":
        codes = np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], fmt.dim)
    elements = TABLES[fmt.element][codes]
    return round_to_bf16(elements * np.repeat(TABLES[fmt.scale][scales], fmt.group, axis=-1))


def decode_keys(data: np.ndarray, scales: np.ndarray, fmt: Format) -> np.ndarray:
    """The same for keys: a product that is NaN or infinite counts as 0, so that garbage poisons no row."""
    products = decode_products(data, scales, fmt)
    return np.where(np.isfinite(products), products, 0.0)


def decode_slots(cache: torch.Tensor, slots: np.ndarray) -> np.ndarray:
    """Records of a main cache, ``[len(slots), 512]``. Gathers first: the cache may be larger than memory."""
    fmt = KV[cache.shape[3]]
    slots_t = torch.from_numpy(slots.astype(np.int64)).to(cache.device)
    page = cache.shape[1]
    records = cache[slots_t // page, slots_t % page, 0].cpu().numpy()
    return decode_keys(records[:, : fmt.data_bytes], records[:, fmt.data_bytes :], fmt)


RowKeys = Callable[[int, int], np.ndarray]
"""The decoded live keys ``[n, 512]`` of row (b, s)."""


def _scope_keys(cache: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None) -> RowKeys:
    lists = indices.cpu().numpy()
    # An index outside the cache raises on CPU; on Neuron it is masked like -1, which is what the oracle models.
    live = (lists >= 0) & (lists < cache.shape[0] * cache.shape[1])
    if topk_length is not None:
        live &= np.arange(lists.shape[2]) < topk_length.cpu().numpy()[:, None, None]
    slots = np.unique(lists[live])
    keys = decode_slots(cache, slots)
    return lambda b, s: keys[np.searchsorted(slots, lists[b, s][live[b, s]])]


def live_keys(
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
) -> RowKeys:
    """The keys of every row: main scope first, then extra."""
    main = _scope_keys(k_cache, indices, topk_length)
    if extra_k_cache is None or extra_indices is None:
        return main
    extra = _scope_keys(extra_k_cache, extra_indices, extra_topk_length)
    return lambda b, s: np.concatenate([main(b, s), extra(b, s)])


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def attend(q: np.ndarray, keys: np.ndarray, sink: np.ndarray | None, softmax_scale: float) -> np.ndarray:
    """One row: ``q [h, 512]``, ``keys [n, 512]`` (also the values), ``sink [h]`` to ``[h, 512]``."""
    if len(keys) == 0:
        return np.zeros_like(q)
    logits = softmax_scale * (q @ keys.T)
    largest = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - largest)
    total = weights.sum(axis=1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None] - largest)
    return weights @ keys / total


def flash_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    softmax_scale: float,
    **_hints: object,
) -> Exact:
    """SPEC section 3. Tolerance: 2^-8 of the value + 1e-5 of the row's largest decoded element, for |logits| <= 60;
    and twice the smallest normal number, for elements and results that accelerators flush.
    """
    queries = q.cpu().double().numpy()
    sink = None if attn_sink is None else attn_sink.cpu().double().numpy()
    value, tolerance = np.zeros(q.shape), np.zeros(q.shape)
    row_keys = live_keys(k_cache, indices, topk_length, extra_k_cache, extra_indices, extra_topk_length)
    for b, s in np.ndindex(*q.shape[:2]):
        keys = row_keys(b, s)
        value[b, s] = attend(queries[b, s], keys, sink, softmax_scale)
        tolerance[b, s] = BF16_ROUNDING * np.abs(value[b, s]) + 1e-5 * np.abs(keys).max(initial=0.0)
        tolerance[b, s] += 2 * SMALLEST_NORMAL if len(keys) else 0.0
    return Exact(value, tolerance)


def decode_queries(q_data: torch.Tensor, q_sf: torch.Tensor) -> np.ndarray:
    """Indexer queries ``[T, H, 128]``: NaN codes stay NaN. int16 scales hold two bytes, the low one first."""
    fmt = INDEX[132 if q_data.dtype == torch.float8_e4m3fn else 68]
    data = q_data.cpu().contiguous().view(torch.uint8).numpy()[:, 0]
    scales = q_sf.cpu().contiguous().numpy()[:, 0]
    if scales.dtype == np.int16:
        scales = np.stack([scales & 0xFF, scales >> 8 & 0xFF], axis=-1).reshape(*scales.shape[:-1], fmt.scales)
    return decode_products(data, scales, fmt)


def decode_pages(kv_cache: torch.Tensor, pages: np.ndarray) -> np.ndarray:
    """Whole index pages to ``[len(pages) * page_kv, 128]``. A page is planar: all elements, then all scales."""
    fmt, page_kv = INDEX[kv_cache.shape[3]], kv_cache.shape[1]
    ids = torch.from_numpy(pages.astype(np.int64)).to(kv_cache.device)
    runs = kv_cache[ids].cpu().numpy().reshape(len(pages), page_kv * fmt.bytes)
    data = runs[:, : page_kv * fmt.data_bytes].reshape(-1, fmt.data_bytes)
    return decode_keys(data, runs[:, page_kv * fmt.data_bytes :].reshape(-1, fmt.scales), fmt)


@np.errstate(invalid="ignore", over="ignore")
def paged_mqa_logits(
    q_data: torch.Tensor,
    q_sf: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    *,
    one_sequence: bool = False,
) -> Exact:
    """SPEC section 4. Tolerance: one rounding to bf16, and the bound for a float32 sum of products in any order:
    n operations over terms t_i are off by at most n * unit * sum |t_i|, with n = 128 products + H heads + 2.
    """
    queries, page_kv = decode_queries(q_data, q_sf), kv_cache.shape[1]
    head_weights = weights.cpu().double().numpy()
    value = np.full((len(queries), max_context_len), -np.inf)
    tolerance = np.zeros(value.shape)
    for t, (q, w) in enumerate(zip(queries, head_weights, strict=True)):
        table = block_table[0 if one_sequence else t].cpu().numpy()
        context = min(int(context_lens[t, 0]), max_context_len, len(table) * page_kv)
        pages = table[: -(-context // page_kv)]
        valid = (pages >= 0) & (pages < kv_cache.shape[0])  # elsewhere CPU raises; Neuron masks, as modelled here
        k = decode_pages(kv_cache, np.where(valid, pages, 0))[:context]
        value[t, :context] = w @ np.maximum(q @ k.T, 0.0)
        size = np.abs(q) @ np.abs(k).T
        flushed = SMALLEST_NORMAL * (256 + np.abs(q).sum(axis=1)[:, None] + np.abs(k).sum(axis=1))
        tolerance[t, :context] = BF16_ROUNDING * np.abs(value[t, :context]) + np.abs(w) @ (
            (128 + len(q) + 2) * FP32_UNIT * size + flushed
        )
        value[t, :context][~np.repeat(valid, page_kv)[:context]] = -np.inf
    return Exact(value, tolerance)


@np.errstate(invalid="ignore", over="ignore")
def softmax_pool(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> Exact:
    """SPEC section 5. Tolerance: one rounding to bf16, and (2 R + 16) float32 roundings of the column's largest latent:
    R terms and R weights summed, an exponential good to a few units, one division.
    """
    score, latent = score_rows.cpu().double().numpy(), latent_rows.cpu().double().numpy()
    masked = score == -np.inf
    weights = np.where(masked, 0.0, np.exp(score - score.max(axis=1, keepdims=True)))
    total = weights.sum(axis=1)
    used = np.where(masked, 0.0, latent)
    value = np.where(masked.all(axis=1), 0.0, (weights * used).sum(axis=1) / np.where(total == 0, 1.0, total))
    roundings = (2 * score.shape[1] + 16) * FP32_UNIT
    return Exact(value, BF16_ROUNDING * np.abs(value) + roundings * np.abs(used).max(axis=1) + SMALLEST_NORMAL)
