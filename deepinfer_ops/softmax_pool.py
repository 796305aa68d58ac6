"""``deepinfer::softmax_pool``: softmax-weighted pooling of R rows, the compressor's reduction.

Schema, contract, fake function, public function, in this order. The CPU kernel is ``csrc/softmax_pool.cpp``, the
Neuron composition ``neuron/softmax_pool.py``.
"""

from __future__ import annotations

import torch

from .contract import Checker
from .library import define, fake

define("softmax_pool(Tensor score_rows, Tensor latent_rows) -> Tensor")


def check_arguments(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> None:
    """The contract. ``csrc/softmax_pool.cpp`` checks the same, in the same order, with the same words."""
    check = Checker("softmax_pool")
    check.no_grad(score_rows=score_rows, latent_rows=latent_rows)
    check.tensor("score_rows", score_rows, [torch.float32], ["N", "R", "D"])
    check.at_least("score_rows", "R", check.size("R"), 1)
    check.tensor("latent_rows", latent_rows, [torch.float32], ["N", "R", "D"])


@fake("softmax_pool")
def _(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> torch.Tensor:
    check_arguments(score_rows, latent_rows)
    rows, _, width = score_rows.shape
    return torch.empty((rows, width), dtype=torch.bfloat16, device=score_rows.device)


def softmax_pool(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> torch.Tensor:
    """Pool R rows into one, column by column: ``out[n, d] = sum_r latent[n, r, d] * softmax_r(score[n, :, d])``.

    Args:
        score_rows: ``[N, R, D]`` float32, any strides, R >= 1. -inf masks its entry: the latent there is not used,
            even if it is NaN. A very negative finite score is no mask. A column of -inf only gives 0.
        latent_rows: ``[N, R, D]`` float32, any strides.

    Returns:
        ``[N, D]`` bfloat16, contiguous. NaN (and a score of +inf) makes its own column NaN, and no other.

    Raises:
        RuntimeError: a bad argument (``deepinfer::softmax_pool: <argument>: expected ..., got ...``).

    Example:
        >>> pooled = softmax_pool(torch.zeros(1, 4, 512), latents)  # the plain mean of four latents
    """
    return torch.ops.deepinfer.softmax_pool(score_rows, latent_rows)  # type: ignore[no-any-return]
