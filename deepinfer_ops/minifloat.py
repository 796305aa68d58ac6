"""The small number formats as data: value of every code, nearest code of every value. Python's ``csrc/minifloat.h``.

Sources: OCP 8-bit Floating Point Specification (e4m3) and OCP Microscaling Formats (e2m1, ue8m0 there called E8M0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FLOAT32_MANTISSA = 23
_FLOAT32_BIAS = 127


@dataclass(frozen=True)
class Minifloat:
    """Fields sign, exponent, mantissa; exponent field 0 is subnormal; at most the all-ones magnitude is NaN.

    Read that way, ue8m0 needs no rule of its own: without mantissa bits its subnormal code 0 is the number 0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool
    has_nan: bool
    capped: bool
    """Whether the packers' ``cap`` bounds it: Trn2 reads e4m3's top exponent field as infinities and NaN."""

    @property
    def magnitude_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def per_byte(self) -> int:
        """Codes in a byte: the first one sits in the low bits."""
        return 8 // (self.magnitude_bits + self.signed)

    def value(self, code: int) -> float:
        """The number a code stands for; bits above it are ignored."""
        magnitude = code & (1 << self.magnitude_bits) - 1
        if self.has_nan and magnitude == (1 << self.magnitude_bits) - 1:
            return float("nan")
        field, mantissa = magnitude >> self.mantissa_bits, magnitude & (1 << self.mantissa_bits) - 1
        significand = mantissa + (1 << self.mantissa_bits if field > 0 else 0)
        sign = -1.0 if self.signed and code >> self.magnitude_bits & 1 else 1.0
        return sign * significand * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Nearest codes (ties to the even one) of float32 values no larger than the largest one, as uint8."""
        magnitude = values.abs()
        # The binade of each value: the power of two below it, and below the smallest normal number, that one's.
        field = magnitude.clamp_min(2.0 ** (1 - self.bias)).view(torch.int32) >> _FLOAT32_MANTISSA
        binade = (field << _FLOAT32_MANTISSA).view(torch.float32)
        steps = (magnitude / binade * (1 << self.mantissa_bits)).round_()
        # Steps run to 2^(mantissa_bits + 1), included: adding them carries a value rounded up into the next binade.
        codes = (field - (_FLOAT32_BIAS - self.bias + 1) << self.mantissa_bits).add_(steps.int())
        return codes.add_(values.signbit().int() << self.magnitude_bits).to(torch.uint8)


NUMBERS = {
    number.name: number
    for number in (
        Minifloat("e4m3", 4, 3, 7, signed=True, has_nan=True, capped=True),
        Minifloat("e2m1", 2, 1, 1, signed=True, has_nan=False, capped=False),
        Minifloat("ue8m0", 8, 0, 127, signed=False, has_nan=True, capped=False),
    )
}
"""By the names that ``record_format`` uses."""


# Built once, on CPU: a table made on first use could be born a fake tensor inside a trace, and stay one.
_POSITIVE = {
    n.name: torch.tensor(
        [n.value(code) for code in range(1, (1 << n.magnitude_bits) - n.has_nan)], dtype=torch.float64, device="cpu"
    )
    for n in NUMBERS.values()
}
_BYTES = {
    n.name: torch.tensor(
        [n.value(byte >> 8 // n.per_byte * i) for byte in range(256) for i in range(n.per_byte)],
        dtype=torch.float32,
        device="cpu",
    )
    for n in NUMBERS.values()
}


def positive_values(number: Minifloat, cap: float) -> torch.Tensor:
    """float64 values of the codes 1, 2, ...: ascending, finite, and at most ``cap`` where the cap applies."""
    values = _POSITIVE[number.name]
    return values[values <= cap] if number.capped else values


def decode_bytes(data: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 ``[.., n]`` to float32 ``[.., n * per_byte]``: one table look-up a byte, the fastest torch has on CPU."""
    # Two numbers of one byte are looked up side by side, as one float64.
    table = _BYTES[name].view({1: torch.float32, 2: torch.float64}[NUMBERS[name].per_byte]).to(data.device)
    return table.index_select(0, data.int().flatten()).view(data.shape).view(torch.float32)


def pack_bytes(codes: torch.Tensor, per_byte: int) -> torch.Tensor:
    """``[.., dim]`` uint8 codes to ``[.., dim / per_byte]`` bytes, even elements in the low bits."""
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = grouped[..., 0].clone()
    for i in range(1, per_byte):
        packed |= grouped[..., i] << (8 // per_byte * i)
    return packed
