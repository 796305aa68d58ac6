"""Independent encoders of every format, and caches laid out the hard way. Imports nothing of the product."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from oracle import INDEX, KV, TABLES, Format

E4M3_MAX = 448.0
E2M1_MAX = 6.0

KV_FORMAT = {fmt.name: fmt for fmt in KV.values()}
INDEX_FORMAT = {fmt.name: fmt for fmt in INDEX.values()}


def nearest_codes(values: np.ndarray, element: str) -> np.ndarray:
    """Codes of the nearest representable numbers (ties to the even code); beyond the largest one: the largest."""
    sign_bit = len(TABLES[element]) // 2
    magnitudes = TABLES[element][:sign_bit]
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = np.abs(values)
    below = np.searchsorted(middles, size, side="left")  # a tie stays at the lower code
    tie = (below < len(middles)) & (size == middles[np.minimum(below, len(middles) - 1)])
    codes = below + (tie & (below % 2 == 1))
    return (codes + sign_bit * np.signbit(values)).astype(np.uint8)


def smallest_scale(largest: np.ndarray, scale: str, cap: float, scale_cap: float) -> np.ndarray:
    """Codes of the smallest positive scales s with ``largest / s <= cap``; the largest allowed one if none suffices."""
    table = TABLES[scale][:128] if scale == "e4m3" else TABLES[scale]
    codes = np.flatnonzero((table > 0) & (table <= scale_cap))
    return codes[np.minimum(np.searchsorted(table[codes] * cap, largest), len(codes) - 1)].astype(np.uint8)


def quantize(values: np.ndarray, fmt: Format, cap: float = E4M3_MAX) -> tuple[np.ndarray, np.ndarray]:
    """``[n, dim]`` to element bytes ``[n, data_bytes]`` and scale bytes ``[n, scales]``.

    ``cap`` bounds e4m3 codes wherever they stand: fp8 elements and fp4 records' scales.
    """
    groups = values.reshape(len(values), fmt.scales, fmt.group)
    element_cap = E2M1_MAX if fmt.element == "e2m1" else cap
    scale_cap = cap if fmt.scale == "e4m3" else np.inf
    scales = smallest_scale(np.abs(groups).max(axis=2), fmt.scale, element_cap, scale_cap)
    codes = nearest_codes(groups / TABLES[fmt.scale][scales][:, :, None], fmt.element)
    return element_bytes(codes.reshape(len(values), fmt.dim), fmt), scales


def element_bytes(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Element codes to bytes: e2m1 two to a byte, the even element in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4 if fmt.element == "e2m1" else codes


def records(values: np.ndarray, fmt: Format, cap: float = E4M3_MAX) -> np.ndarray:
    """``[n, 512]`` latents to ``[n, bytes]`` records of a main cache."""
    return np.concatenate(quantize(values, fmt, cap), axis=1)


def constant_record(fmt: Format, byte: int, scale: int | None = None) -> np.ndarray:
    """One record whose element bytes are all ``byte``; scales 1.0 unless given."""
    one = 0x38 if fmt.scale == "e4m3" else 127
    scale = one if scale is None else scale
    return np.array([byte] * fmt.data_bytes + [scale] * fmt.scales, dtype=np.uint8)


def planar_pages(data: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """``[pages, page_kv, data_bytes]`` and ``[pages, page_kv, 4]`` to page runs ``[pages, page_kv, token_bytes]``.

    The last two dimensions are nominal: a run holds all tokens' elements, then all tokens' scales.
    """
    pages, page_kv, width = data.shape
    run = np.concatenate([data.reshape(pages, page_kv * width), scales.reshape(pages, -1)], axis=1)
    return run.reshape(pages, page_kv, width + scales.shape[2])


def hostile_bytes(rng: np.random.Generator, kind: str, shape: tuple[int, ...] | int) -> np.ndarray:
    """What may stand where nothing must be read: ``ff``, ``nan`` (the e4m3 code 0x7F), ``random`` or ``zero`` bytes."""
    if kind == "random":
        return rng.integers(0, 256, shape, dtype=np.uint8)
    return np.full(shape, {"ff": 0xFF, "nan": 0x7F, "zero": 0}[kind], dtype=np.uint8)


@dataclass(frozen=True)
class Layout:
    """Where a cache lies in its storage. ``token_pad`` bytes after a record and ``block_pad`` after a block; the pool
    holds ``pool`` caches whose blocks take turns, this one in place ``layer``; ``offset`` bytes come first.
    """

    token_pad: int = 0
    block_pad: int = 0
    pool: int = 1
    layer: int = 0
    offset: int = 0


COMPACT = Layout()


def paged(
    blocks: np.ndarray,
    layout: Layout = COMPACT,
    hostile: str = "ff",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """``[blocks, page, bytes]`` uint8 as a cache ``[blocks, page, 1, bytes]``; other bytes are hostile."""
    count, page, size = blocks.shape
    token = size + layout.token_pad
    stride = page * token * layout.pool + layout.block_pad
    start = layout.offset + layout.layer * page * token
    storage = hostile_bytes(np.random.default_rng(seed), hostile, layout.offset + count * stride + token)
    view = np.lib.stride_tricks.as_strided(storage[start:], blocks.shape, (stride, token, 1))
    view[...] = blocks
    return torch.from_numpy(storage).to(device).as_strided((count, page, 1, size), (stride, token, size, 1), start)


def cache_of(rows: np.ndarray, page: int, **where: object) -> torch.Tensor:
    """Records ``[slots, bytes]`` as a main cache with ``page`` of them in a block (0xFF records fill the last one)."""
    missing = -len(rows) % page
    rows = np.concatenate([rows, np.full((missing, rows.shape[1]), 0xFF, dtype=np.uint8)])
    return paged(rows.reshape(-1, page, rows.shape[1]), **where)


def index_cache_of(data: np.ndarray, scales: np.ndarray, page_kv: int, **where: object) -> torch.Tensor:
    """Index keys ``[tokens, data_bytes]`` and ``[tokens, 4]`` as pages (0xFF tokens fill the last one)."""
    missing = -len(data) % page_kv
    data, scales = (np.pad(a, ((0, missing), (0, 0)), constant_values=0xFF) for a in (data, scales))
    pages = planar_pages(data.reshape(-1, page_kv, data.shape[1]), scales.reshape(-1, page_kv, scales.shape[1]))
    return paged(pages, **where)


def place(tensor: torch.Tensor, how: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """The same numbers behind other strides, hostile values in between.

    ``contiguous``; ``gapped``: every other element of the last dimension; ``sliced``: the middle of a longer first
    dimension; ``swapped``: the first and the last-but-one dimension exchanged in memory.
    """
    shape = list(tensor.shape)
    if how == "contiguous" or not shape:
        return tensor.contiguous().to(device)
    if how == "swapped":
        other = max(len(shape) - 2, 0)
        return tensor.transpose(0, other).contiguous().to(device).transpose(0, other)
    dim = len(shape) - 1 if how == "gapped" else 0
    step = 2 if how == "gapped" else 1
    shape[dim] = shape[dim] * step + 2
    filler = 0xFF if tensor.is_floating_point() else 0x7F  # NaN, or a huge integer
    big = torch.full([*shape, tensor.element_size()], filler, dtype=torch.uint8).view(tensor.dtype).squeeze(-1)
    window = (slice(None),) * dim + (slice(1, 1 + tensor.shape[dim] * step, step),)
    big[window] = tensor
    return big.to(device)[window]
