"""Latents to quantized records and back, and records into paged caches (docs/formats.md has the layouts).

For tests, examples, and users without a quantizer of their own. Plain torch operators that look at their data (a
value that cannot be stored raises), so they run eagerly. ``packers_index.py`` holds the index caches' side.
"""

from __future__ import annotations

import torch

from .contract import Checker, either, paged_cache
from .minifloat import NUMBERS, decode_bytes, pack_bytes, positive_values
from .record_format import KV_FORMATS, RecordFormat

E4M3_MAX = 448.0
"""Largest e4m3 number."""

NEURON_CAP = 224.0
"""The cap for caches that Trn2 reads: below its reading of e4m3, which ends at 240."""

_ROWS = 2048
"""Rows encoded at once: temporaries of a few MiB, whatever the input."""


def quantize_kv(latents: torch.Tensor, format: str = "fp8", cap: float = E4M3_MAX) -> torch.Tensor:
    """Quantize latents to records of a main KV cache.

    A group (32 elements in fp8, 16 in fp4) with largest magnitude a gets the smallest scale s with ``a / s <= c``, and
    elements ``x / s`` rounded to nearest, ties to even. c is ``cap`` for e4m3 elements and 6 for e2m1. Scales are
    powers of two from 2^-126 up (ue8m0, fp8) or e4m3 numbers from 2^-9 up to ``cap`` (fp4), never 0 and never NaN.

    Args:
        latents: ``[.., 512]`` bfloat16 or float32, finite.
        format: "fp8" or "fp4".
        cap: bounds every e4m3 code, in 6..448: fp8's elements and, as Trn2 decodes them the same way, fp4's scales.
            Use 224 (``NEURON_CAP``) for caches that Neuron reads.

    Returns:
        ``[.., bytes]`` uint8, contiguous: 528 bytes a record in fp8, 288 in fp4. Values that are representable under
        their group's scale survive exactly, zeros always. An fp4 group beyond ``6 * cap`` (2688 at cap 448) has no
        scale that is large enough: it saturates there, element by element.

    Raises:
        RuntimeError: a bad argument, or a NaN or an infinity, naming its position.

    Example:
        >>> records = quantize_kv(torch.randn(10, 512), "fp8")  # [10, 528]
    """
    check = Checker("quantize_kv")
    fmt = checked_format(check, KV_FORMATS, format)
    checked_values(check, "latents", latents, fmt, cap)
    return torch.cat(encode(latents, fmt, cap), dim=-1)


def dequantize_kv(records: torch.Tensor) -> torch.Tensor:
    """Decode records as the operators do.

    Args:
        records: ``[.., bytes]`` uint8 with 528 (fp8) or 288 (fp4) bytes; a whole cache
            ``[num_blocks, page, 1, bytes]`` of any strides will do.

    Returns:
        ``[.., 512]`` bfloat16: element * scale, exact; 0 where that is NaN or infinite.

    Raises:
        RuntimeError: another dtype or another size.
    """
    check = Checker("dequantize_kv")
    check.require(records.dtype == torch.uint8, "records", "dtype uint8", lambda: dtype_name(records))
    known = either([f"{fmt.bytes} ({fmt.name})" for fmt in KV_FORMATS.values()])
    size = records.shape[-1] if records.dim() else 0
    check.require(size in KV_FORMATS, "records", f"bytes {known}", lambda: size)
    fmt = KV_FORMATS[size]
    return decode_keys(records[..., : fmt.data_bytes], records[..., fmt.data_bytes :], fmt).to(torch.bfloat16)


def write_kv(cache: torch.Tensor, slots: torch.Tensor, records: torch.Tensor) -> None:
    """Put records into slots of a paged cache, in place.

    Args:
        cache: ``[num_blocks, page, 1, bytes]`` uint8 with the strides the operators take (records may be padded,
            blocks may be slices of a pool).
        slots: ``[n]`` int32 or int64 slots (``block * page + offset``), each at most once; -1 skips its record.
        records: ``[n, bytes]`` uint8.

    Raises:
        RuntimeError: a bad argument, a slot outside the cache or one listed twice, before anything is written.
    """
    check = Checker("write_kv")
    paged_cache(check, "cache", cache, KV_FORMATS, ("num_blocks", "page", "bytes"), planar=False)
    block, offset, live = checked_slots(check, slots, cache)
    check.tensor("records", records, [torch.uint8], ["n", "bytes"])
    cache[block, offset, 0] = records[live]


def encode(values: torch.Tensor, fmt: RecordFormat, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``[.., dim]`` finite values to ``[.., data_bytes]`` and ``[.., scale_bytes]`` uint8."""
    rows = torch.split(values.reshape(-1, fmt.dim), _ROWS)
    parts = [_encode_rows(part.float(), fmt, cap) for part in rows]
    data, scales = (torch.cat(side) for side in zip(*parts, strict=True))
    return data.view(*values.shape[:-1], fmt.data_bytes), scales.view(*values.shape[:-1], fmt.scale_bytes)


def _encode_rows(rows: torch.Tensor, fmt: RecordFormat, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
    element, groups = NUMBERS[fmt.element], rows.view(-1, fmt.scale_bytes, fmt.group)
    elements, scales = (positive_values(NUMBERS[name], cap).to(rows.device) for name in (fmt.element, fmt.scale))
    limit = cap if element.capped else elements[-1]
    # The first scale that brings the group's largest magnitude under the limit; the last one if none does.
    index = torch.searchsorted(scales * limit, groups.abs().amax(-1).double()).clamp_max_(len(scales) - 1)
    # Rounding this quotient to float32 never moves it onto a tie m: a float32 next to m * s is off by more than 2^-24
    # of it, half a step of m or more.
    scaled = groups / scales[index].float().unsqueeze(-1)
    largest = float(elements[-1])
    codes = element.encode(scaled.clamp_(-largest, largest)).flatten(-2)
    return pack_bytes(codes, element.per_byte), (index + 1).to(torch.uint8)


def decode(data: torch.Tensor, scales: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """``[.., data_bytes]`` and ``[.., scale_bytes]`` uint8 to ``[.., dim]`` float32 products, NaN and inf kept."""
    elements = decode_bytes(data, fmt.element).view(*scales.shape, fmt.group)
    return elements.mul_(decode_bytes(scales, fmt.scale).unsqueeze(-1)).flatten(-2)


def decode_keys(data: torch.Tensor, scales: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """The same for keys: what is not finite counts as 0, so that garbage poisons no row."""
    return decode(data, scales, fmt).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def checked_format(check: Checker, formats: dict[int, RecordFormat], name: str) -> RecordFormat:
    """The format called ``name``, or an error that lists the known ones."""
    known = {fmt.name: fmt for fmt in formats.values()}
    check.require(name in known, "format", either([repr(word) for word in known]), lambda: repr(name))
    return known[name]


def checked_values(check: Checker, argument: str, values: torch.Tensor, fmt: RecordFormat, cap: float) -> None:
    """``values`` is something that can be stored: dtype, width, finite. And ``cap`` is one."""
    check.no_grad(**{argument: values})
    dtypes = [torch.bfloat16, torch.float32]
    check.require(values.dtype in dtypes, argument, "dtype bfloat16 or float32", lambda: dtype_name(values))
    width = values.dim() > 0 and values.shape[-1] == fmt.dim
    check.require(width, argument, f"shape [.., {fmt.dim}]", lambda: list(values.shape))
    # From 6 on a cap is no constraint for e2m1, and a ue8m0 scale is found for every float32.
    check.require(6 <= cap <= E4M3_MAX, "cap", f"a number in 6..{E4M3_MAX:g}", lambda: cap)
    bad = values.isfinite().logical_not_().nonzero()
    check.require(
        len(bad) == 0,
        argument,
        "finite values",
        lambda: f"{values[tuple(bad[0])].item()} at {bad[0].tolist()}",
    )


def checked_slots(
    check: Checker, slots: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``slots`` as block and offset, without the -1s, and where those are not."""
    check.tensor("slots", slots, [torch.int32, torch.int64], ["n"])
    slots = slots.long()
    page, count = cache.shape[1], cache.shape[0] * cache.shape[1]
    outside = ((slots < -1) | (slots >= count)).nonzero().flatten()
    check.require(
        len(outside) == 0,
        "slots",
        f"-1 or 0 <= slot < {count}",
        lambda: f"{int(slots[outside[0]])} at [{int(outside[0])}]",
    )
    live = slots >= 0
    chosen = slots[live]
    # Which of two records a slot would keep is undefined in torch: refuse rather than choose.
    ordered = chosen.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    check.require(len(twice) == 0, "slots", "each slot at most once", lambda: f"{int(twice[0])} more than once")
    return chosen // page, chosen % page, live


def dtype_name(tensor: torch.Tensor) -> str:
    """As the messages spell it: without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")
