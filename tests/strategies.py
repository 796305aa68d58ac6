"""What all drawn problems share. A problem is a small frozen record (shapes, layouts, kinds of content, a seed) that
shrinks well; its ``build`` function turns it into tensors, always the same ones, on any device.
"""

from __future__ import annotations

import hypothesis
import numpy as np
from hypothesis import strategies as st
from oracle import Format
from pack import COMPACT, Layout, hostile_bytes, quantize

SEEDS = st.integers(0, 2**31 - 1)
HOSTILE = st.sampled_from(["ff", "nan", "random"])
PLACES = st.sampled_from(["contiguous", "gapped", "sliced", "swapped"])

CONTENTS = ("model", "codes", "extreme", "garbage")
"""Kinds of live bytes: quantized normal numbers; finite codes under near scales; any under far scales; anything."""


def examples(quick: int, ci: int) -> hypothesis.settings:
    """How many problems a property draws in the two profiles of conftest.py."""
    ci_profile = hypothesis.settings.get_current_profile_name() == "ci"
    return hypothesis.settings(max_examples=ci if ci_profile else quick)


@st.composite
def layouts(draw: st.DrawFn, *, planar: bool = False) -> Layout:
    """Half of them compact. An index page is one run of bytes, so ``planar`` caches have no padded tokens."""
    if draw(st.booleans()):
        return COMPACT
    pool = draw(st.integers(1, 3))
    return Layout(
        token_pad=0 if planar else draw(st.sampled_from([0, 16, 1, 112])),
        block_pad=draw(st.sampled_from([0, 64, 7, 1000])),
        pool=pool,
        layer=draw(st.integers(0, pool - 1)),
        offset=draw(st.sampled_from([0, 64, 1, 528])),
    )


def token_bytes(
    rng: np.random.Generator, fmt: Format, count: int, content: str, cap: float
) -> tuple[np.ndarray, np.ndarray]:
    """Element and scale bytes of ``count`` tokens of one of :data:`CONTENTS`.

    ``cap`` < 448 keeps e4m3 codes out of exponent field 15 (0x7F and 0xFF, NaN everywhere, may stay).
    """
    if content == "model":
        # Tokens differ in size, and channels within a token, as RMS-normed latents with outlier channels do.
        values = rng.standard_normal((count, fmt.dim)) * np.exp2(rng.integers(-3, 3, (count, 1)))
        values *= np.exp2(rng.integers(-2, 3, (1, fmt.dim)))
        return quantize(values, fmt, cap)
    data = hostile_bytes(rng, "random", (count, fmt.data_bytes))
    scales = hostile_bytes(rng, "random", (count, fmt.scales))
    if content == "codes":
        data = _finite(data) if fmt.element == "e4m3" else data
        scales = _finite(scales) if fmt.scale == "e4m3" else (120 + scales % 15).astype(np.uint8)
    if content == "extreme" and fmt.scale == "ue8m0":
        # Far apart, yet a sum of products of two such numbers stays inside fp32.
        scales = rng.choice(np.array([0, 255, *range(100, 155)], dtype=np.uint8), scales.shape)
    if cap < 448:
        data = _below_field_15(data) if fmt.element == "e4m3" else data
        scales = _below_field_15(scales) if fmt.scale == "e4m3" else scales
    return data, scales


def _finite(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)


def _below_field_15(codes: np.ndarray) -> np.ndarray:
    field_15 = (codes & 0x78 == 0x78) & (codes & 0x7F != 0x7F)
    capped = np.where(field_15, codes & 0xEF, codes)  # 256..448 become 64..112
    return np.where(capped & 0x7F == 0x77, capped ^ 1, capped)  # 240 becomes 224
