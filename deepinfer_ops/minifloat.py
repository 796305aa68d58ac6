"""The small number formats as data: value of every code, nearest code of every value. Python's ``csrc/minifloat.h``.

Sources: OCP 8-bit Floating Point Specification (e4m3) and OCP Microscaling Formats (e2m1, ue8m0 there called E8M0).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
        magnitude = code & (1 << self.magnitude_bits) - 1
        if self.has_nan and magnitude == (1 << self.magnitude_bits) - 1:
            return float("nan")
        field, mantissa = magnitude >> self.mantissa_bits, magnitude & (1 << self.mantissa_bits) - 1
        significand = mantissa + (1 << self.mantissa_bits if field > 0 else 0)
        sign = -1.0 if code >> self.magnitude_bits else 1.0
        return sign * significand * 2.0 ** (max(field, 1) - self.bias - self.mantissa_bits)

    def positive(self, cap: float) -> torch.Tensor:
        """float64 values of the codes 1, 2, ...: ascending, finite, and at most ``cap`` where the cap applies."""
        values = [self.value(code) for code in range(1, (1 << self.magnitude_bits) - self.has_nan)]
        return torch.tensor([v for v in values if not self.capped or v <= cap], dtype=torch.float64)

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


@cache
def _byte_table(name: str, device: torch.device) -> torch.Tensor:
    """What each of 256 bytes stands for: a float32, or two of them side by side as one float64."""
    number = NUMBERS[name]
    width = 8 // number.per_byte
    codes = [[byte >> width * i & (1 << width) - 1 for i in range(number.per_byte)] for byte in range(256)]
    values = torch.tensor([[number.value(code) for code in row] for row in codes], device=device)
    return values.view({1: torch.float32, 2: torch.float64}[number.per_byte]).flatten()


def decode_bytes(data: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 ``[.., n]`` to float32 ``[.., n * per_byte]``: one table look-up a byte, the fastest torch has on CPU."""
    found = _byte_table(name, data.device).index_select(0, data.int().flatten())
    return found.view(data.shape).view(torch.float32)


def pack_bytes(codes: torch.Tensor, per_byte: int) -> torch.Tensor:
    """``[.., dim]`` uint8 codes to ``[.., dim / per_byte]`` bytes, even elements in the low bits."""
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = grouped[..., 0].clone()
    for i in range(1, per_byte):
        packed |= grouped[..., i] << (8 // per_byte * i)
    return packed
