"""Index keys and queries to data and scales, into planar index pages, and back (docs/formats.md has the layout)."""

from __future__ import annotations

import torch

from .contract import Checker, either, paged_cache
from .minifloat import NUMBERS
from .packers import (
    E4M3_MAX,
    checked_format,
    checked_slots,
    checked_values,
    decode,
    decode_keys,
    dtype_name,
    encode,
)
from .record_format import INDEX_FORMATS, RecordFormat

_BY_DATA_BYTES = {fmt.data_bytes: fmt for fmt in INDEX_FORMATS.values()}
_CACHE_DIMS = ("pages", "page_kv", "token_bytes")


def quantize_index(keys: torch.Tensor, format: str = "fp8", cap: float = E4M3_MAX) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize indexer keys; scales and rounding as in :func:`quantize_kv`, one ue8m0 scale per 32 elements.

    Args:
        keys: ``[.., 128]`` bfloat16 or float32, finite.
        format: "fp8" or "fp4".
        cap: bounds fp8's e4m3 elements, in 6..448 (224 for caches that Neuron reads). fp4 has no e4m3 code here.

    Returns:
        Data ``[.., 128]`` (fp8) or ``[.., 64]`` (fp4: two elements a byte, the even one in the low nibble) and scales
        ``[.., 4]``, both uint8.

    Raises:
        RuntimeError: a bad argument, or a NaN or an infinity, naming its position.
    """
    check = Checker("quantize_index")
    fmt = checked_format(check, INDEX_FORMATS, format)
    checked_values(check, "keys", keys, fmt, cap)
    return encode(keys, fmt, cap)


def quantize_index_query(
    queries: torch.Tensor, format: str = "fp8", cap: float = E4M3_MAX, *, sf_dtype: torch.dtype = torch.uint8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize indexer queries to the dtypes that ``paged_mqa_logits`` takes.

    Args:
        queries: ``[T, 1, H, 128]`` (any leading dimensions) bfloat16 or float32, finite.
        format, cap: as in :func:`quantize_index`.
        sf_dtype: uint8, or int16 for two scales an item (low byte first).

    Returns:
        ``q_data [.., 128]`` float8_e4m3fn or ``[.., 64]`` int8, and ``q_sf [.., 4]`` uint8 or ``[.., 2]`` int16.

    Raises:
        RuntimeError: a bad argument, or a NaN or an infinity, naming its position. (A NaN that must reach the scores
            is written into ``q_data`` by hand: byte 0x7F in fp8; fp4 has none.)
    """
    check = Checker("quantize_index_query")
    fmt = checked_format(check, INDEX_FORMATS, format)
    check.require(sf_dtype in (torch.uint8, torch.int16), "sf_dtype", "torch.uint8 or torch.int16", lambda: sf_dtype)
    checked_values(check, "queries", queries, fmt, cap)
    data, scales = encode(queries, fmt, cap)
    # The operator tells the formats apart by dtype: whole-byte elements are typed, packed ones are int8.
    typed = torch.float8_e4m3fn if NUMBERS[fmt.element].per_byte == 1 else torch.int8
    return data.view(typed), scales.view(sf_dtype)


def dequantize_index(data: torch.Tensor, scales: torch.Tensor, *, keep_nonfinite: bool = False) -> torch.Tensor:
    """Decode index keys or queries as the operator does.

    Args:
        data: ``[.., 128]`` (fp8) or ``[.., 64]`` (fp4) of a one-byte dtype.
        scales: ``[.., 4]`` uint8 or ``[.., 2]`` int16, leading dimensions as in ``data``.
        keep_nonfinite: False, as for keys: a NaN or infinite product is 0. True, as for queries: it stays.

    Returns:
        ``[.., 128]`` bfloat16, exact.

    Raises:
        RuntimeError: another dtype or shape.
    """
    check = Checker("dequantize_index")
    one_byte = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    check.require(data.dtype in one_byte, "data", "dtype uint8, int8 or float8_e4m3fn", lambda: dtype_name(data))
    width = data.shape[-1] if data.dim() else 0
    known = either([f"{fmt.data_bytes} ({fmt.name})" for fmt in INDEX_FORMATS.values()])
    check.require(width in _BY_DATA_BYTES, "data", f"element bytes {known}", lambda: width)
    fmt = _BY_DATA_BYTES[width]
    check.tensor(
        "scales",
        scales,
        [torch.uint8, torch.int16],
        [*data.shape[:-1], fmt.scale_bytes // scales.element_size()],
    )
    products = (decode if keep_nonfinite else decode_keys)(as_bytes(data), as_bytes(scales), fmt)
    return products.to(torch.bfloat16)


def index_planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two planes of an index cache's pages, as views that can be written.

    Args:
        cache: ``[pages, page_kv, 1, token_bytes]`` uint8, 132 (fp8) or 68 (fp4) bytes a token; ``stride(0)`` may be
            larger than a page.

    Returns:
        Data ``[pages, page_kv, 128 or 64]`` and scales ``[pages, page_kv, 4]``: a page is one run of bytes, the
        elements of all its tokens, then the scales of all its tokens. The cache's own last two dimensions are nominal.

    Example:
        >>> keys = dequantize_index(*index_planes(cache))  # [pages, page_kv, 128]
    """
    return _planes(Checker("index_planes"), cache)


def write_index(cache: torch.Tensor, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Put quantized keys into slots of an index cache, in place, each into both planes of its page.

    Args:
        cache: ``[pages, page_kv, 1, token_bytes]`` uint8 (see :func:`index_planes`).
        slots: ``[n]`` int32 or int64 slots (``page * page_kv + offset``), each at most once; -1 skips its key.
        data, scales: ``[n, 128 or 64]`` and ``[n, 4]`` uint8, from :func:`quantize_index` in the cache's format.

    Raises:
        RuntimeError: a bad argument, a slot outside the cache or one listed twice, before anything is written.
    """
    check = Checker("write_index")
    data_plane, scale_plane = _planes(check, cache)
    page, offset, live = checked_slots(check, slots, cache)
    check.tensor("data", data, [torch.uint8], ["n", data_plane.shape[2]])
    check.tensor("scales", scales, [torch.uint8], ["n", scale_plane.shape[2]])
    data_plane[page, offset] = data[live]
    scale_plane[page, offset] = scales[live]


def _planes(check: Checker, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fmt: RecordFormat = paged_cache(check, "cache", cache, INDEX_FORMATS, _CACHE_DIMS, planar=True)
    pages, page_kv = cache.shape[:2]
    return split_runs(cache.as_strided((pages, page_kv * fmt.bytes), (cache.stride(0), 1)), fmt)


def split_runs(runs: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Page runs ``[pages, page_kv * token_bytes]`` as data and scales, ``[pages, page_kv, ..]``."""
    pages, page_kv = runs.shape[0], runs.shape[1] // fmt.bytes
    data, scales = runs.tensor_split([fmt.page_scale_offset(page_kv)], dim=1)
    return data.view(pages, page_kv, fmt.data_bytes), scales.view(pages, page_kv, fmt.scale_bytes)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Any tensor of whole bytes as uint8; a wider dtype's last dimension grows, low byte first."""
    if tensor.dtype == torch.uint8:
        return tensor
    # Cloned: contiguous() leaves the strides of an empty tensor as they are, and view refuses those.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
