"""Bytes of quantized records to bf16, by arithmetic on gathered bytes (SPEC section 7, rules 1 and 3).

No computed tensor is ever bitcast: a fused int32 -> fp32 bitcast is lowered as a numeric convert. Powers of two come
from ``exp2`` of an integer-valued fp32, which the device computes exactly.

``fast`` picks one of two ways to the same values. The exact one is integer arithmetic: it runs on GpSimd and was the
attention graphs' largest cost. The fast one runs on the Vector engine; its e4m3 conversion needs the compiler flag
``--experimental-unsafe-fp8e4m3fn-as-fp8e4m3`` and codes up to 240: Trn2 reads exponent field 15 as infinity or NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from ..record_format import RecordFormat

_Decoder: TypeAlias = Callable[[torch.Tensor, bool], torch.Tensor]

BF16_MAX = torch.finfo(torch.bfloat16).max


def decode_keys(
    data: torch.Tensor, scales: torch.Tensor, fmt: RecordFormat, *, fast: bool, live: torch.Tensor | None = None
) -> torch.Tensor:
    """``data`` [n, data_bytes] and ``scales`` [n, scale_bytes] uint8 -> [n, dim] bf16 without NaN or infinity.

    Records that are not ``live`` [n] become 0. Zeroing their scales does it, on a sixteenth of the elements or fewer;
    it has to be done because a mask is added to logits: a dead key of 1e38 would outweigh -1e30.
    """
    factors = _SCALES[fmt.scale](scales, fast)
    if live is not None:
        factors = torch.where(live.unsqueeze(1), factors, 0.0)
    product = _scaled(_ELEMENTS[fmt.element](data, fast), factors, fmt)
    # One comparison drops NaN and both infinities: garbage in an unwritten slot must not poison a row.
    return torch.where(product.abs() <= BF16_MAX, product, 0.0)


def decode_queries(q_data: torch.Tensor, q_sf: torch.Tensor, fmt: RecordFormat, *, fast: bool) -> torch.Tensor:
    """Indexer queries: ``q_data`` [T, 1, H, 128] float8_e4m3fn or [T, 1, H, 64] uint8 or int8, ``q_sf`` [T, 1, H, 4]
    uint8 or [T, 1, H, 2] int16 -> [T * H, 128] bf16. NaN stays NaN: it is the model's own.
    """
    count = q_data.shape[0] * q_data.shape[2]
    if fmt.element == "e2m1":
        elements = _e2m1(_unsigned(q_data).reshape(count, fmt.data_bytes), fast)
    elif fast:
        elements = q_data.to(torch.bfloat16).reshape(count, fmt.dim)
    else:
        # A view of the caller's own bytes, before anything is computed from them (rule 1).
        elements = _e4m3_exact(q_data.view(torch.uint8).reshape(count, fmt.dim))
    scales = q_sf
    if scales.dtype == torch.int16:
        pairs = scales.to(torch.int32)
        scales = torch.stack([pairs & 0xFF, (pairs >> 8) & 0xFF], dim=-1)
    return _scaled(elements, _SCALES[fmt.scale](scales.reshape(count, fmt.scale_bytes), fast), fmt)


def _scaled(elements: torch.Tensor, factors: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Elements times their group's scale; every finite product is exact in bf16 (7 significant bits at most)."""
    groups = elements.to(torch.float32).view(-1, fmt.scale_bytes, fmt.group)
    return (groups * factors.to(torch.float32).unsqueeze(2)).to(torch.bfloat16).view(-1, fmt.dim)


def _unsigned(data: torch.Tensor) -> torch.Tensor:
    """Packed nibbles as numbers 0..255, in arithmetic: an int8 query is not viewed as uint8."""
    return data.to(torch.int32) & 0xFF if data.dtype == torch.int8 else data


def _ue8m0(scales: torch.Tensor, fast: bool) -> torch.Tensor:
    """2^(b - 127); code 0 is 0, code 255 NaN. 2^-127 is no normal fp32 number, so the exponent stops at -126."""
    code = scales.to(torch.float32)
    value = torch.exp2((code - 127.0).clamp(-126.0, 127.0))
    return torch.where(code == 0.0, 0.0, torch.where(code == 255.0, torch.nan, value))


def _e4m3(data: torch.Tensor, fast: bool) -> torch.Tensor:
    if fast:
        return data.contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
    return _e4m3_exact(data)


def _e4m3_exact(data: torch.Tensor) -> torch.Tensor:
    """(8 + m) * 2^(e - 10), subnormals m * 2^-9; NaN for the codes 0x7F and 0xFF."""
    code = data.to(torch.int32)
    exponent, mantissa = (code >> 3) & 15, code & 7
    significand = torch.where(exponent > 0, mantissa + 8, mantissa)
    magnitude = significand.to(torch.float32) * torch.exp2((exponent.clamp(min=1) - 10).to(torch.float32))
    magnitude = torch.where((code & 0x7F) == 0x7F, torch.nan, magnitude)
    return torch.where(code >= 0x80, -magnitude, magnitude)


def _e2m1(data: torch.Tensor, fast: bool) -> torch.Tensor:
    """[n, bytes] -> [n, 2 * bytes]: the even element is the low nibble."""
    low, high = _nibbles_float(data) if fast else _nibbles_exact(data)
    value = _e2m1_float if fast else _e2m1_exact
    return torch.stack([value(low), value(high)], dim=-1).flatten(1)


def _nibbles_float(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes are exact in bf16, and so is a sixteenth of one."""
    byte = data.to(torch.bfloat16)
    high = torch.floor(byte * 0.0625)
    return byte - 16.0 * high, high


def _nibbles_exact(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    code = data.to(torch.int32)
    return code & 15, code >> 4


def _e2m1_float(nibble: torch.Tensor) -> torch.Tensor:
    """Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 are convex in the code: the largest of three lines."""
    negative = nibble >= 8.0
    code = torch.where(negative, nibble - 8.0, nibble)
    magnitude = torch.maximum(torch.maximum(0.5 * code, code - 2.0), 2.0 * code - 8.0)
    return torch.where(negative, -magnitude, magnitude)


def _e2m1_exact(nibble: torch.Tensor) -> torch.Tensor:
    """(2 + m) * 2^(e - 2), subnormals m / 2."""
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    significand = torch.where(exponent > 0, mantissa + 2, mantissa)
    magnitude = significand.to(torch.float32) * torch.exp2((exponent.clamp(min=1) - 2).to(torch.float32))
    return torch.where(nibble >= 8, -magnitude, magnitude)


_ELEMENTS: dict[str, _Decoder] = {"e4m3": _e4m3, "e2m1": _e2m1}
_SCALES: dict[str, _Decoder] = {"ue8m0": _ue8m0, "e4m3": _e4m3}
