"""Class G: masked rows and extreme scores in the compressor's pooling."""

from __future__ import annotations

import math

import pytest
import torch
from compare import assert_equal

INF, LN2 = math.inf, math.log(2.0)
MIN = torch.finfo(torch.float32).min


def pool(scores: list[float], latents: list[float], width: int) -> torch.Tensor:
    """The same column ``width`` times."""
    score, latent = (torch.tensor(values).reshape(1, -1, 1).expand(1, -1, width) for values in (scores, latents))
    return torch.ops.deepinfer.softmax_pool(score, latent)


@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize(
    ("scores", "latents", "want"),
    [
        # Missing rows of the overlap window are masked, not scored 0 (which would give 5.4).
        ([-INF] * 4 + [0.0, LN2, 0.0, LN2], [0.0] * 4 + [6.0, 6.0, 12.0, 12.0], 9.0),
        ([0.0, 0.0, 0.0, -INF], [1.0, 2.0, 3.0, 1000.0], 2.0),
    ],
)
def test_missing_rows_take_no_weight(scores, latents, want, width):  # omlx 2271
    assert_equal(pool(scores, latents, width), want)


@pytest.mark.parametrize("width", [1, 16, 37])
@pytest.mark.parametrize(
    ("scores", "want"),
    [
        ([MIN] * 4, 3.0),
        ([MIN, MIN, 0.0, MIN], 3.0),
        ([-INF] * 4, 0.0),
        ([3e38, 3e38, -3e38, 0.0], 1.5),
        ([3e38, -3e38, -INF, -INF], 1.0),
    ],
)
def test_extreme_finite_scores_are_no_masks_and_do_not_overflow(scores, want, width):  # Automodel 2658
    assert_equal(pool(scores, [1.0, 2.0, 3.0, 6.0], width), want)
