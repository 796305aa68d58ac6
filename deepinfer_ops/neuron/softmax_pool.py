"""``deepinfer::softmax_pool`` on Neuron: one kernel call, cast to bf16."""

from __future__ import annotations

import torch

from ..softmax_pool import check_arguments
from . import kernels
from .plans import PoolPlan
from .routes import plan_pool
from .shapes import PoolShape


def softmax_pool(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> torch.Tensor:
    """The operator's arguments, the operator's result."""
    plan = plan_call(score_rows, latent_rows)
    if plan.route == "empty":
        return score_rows.new_zeros((plan.n, plan.d), dtype=torch.bfloat16)
    # The kernel takes the latents first, the operator the scores.
    pooled = kernels.call("softmax_pool", latent_rows, score_rows, on_device=plan.kernel is not None)
    return pooled.to(torch.bfloat16)


def plan_call(score_rows: torch.Tensor, latent_rows: torch.Tensor) -> PoolPlan:
    """The route of one call; raises as the operator does where the contract is broken."""
    check_arguments(score_rows, latent_rows)
    return plan_pool(PoolShape.of(score_rows))
