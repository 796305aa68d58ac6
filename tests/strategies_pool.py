"""Drawn problems of ``softmax_pool``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import oracle
import torch
from hypothesis import strategies as st
from pack import place
from strategies import PLACES, SEEDS

FP32_MAX = float(np.finfo(np.float32).max)
SCORES = {"-inf": -np.inf, "min": -FP32_MAX, "max": FP32_MAX, "nan": np.nan, "+inf": np.inf, "-0": -0.0}
LATENTS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "huge": 3e38, "tiny": 1e-40}


@dataclass(frozen=True)
class PoolProblem:
    """``scores``, ``latents``: special values strewn in, a tenth of all entries; ``spread``: size of the other scores;
    ``masked_rows``: leading rows that are -inf in every column, as before a sequence's start.
    """

    n: int = 1
    r: int = 1
    d: int = 1
    spread: float = 1.0
    scores: tuple[str, ...] = ()
    latents: tuple[str, ...] = ()
    masked_rows: int = 0
    score_place: str = "contiguous"
    latent_place: str = "contiguous"
    seed: int = 0


class PoolInputs(NamedTuple):
    """The operator's arguments, by their names."""

    score_rows: torch.Tensor
    latent_rows: torch.Tensor

    def run(self) -> torch.Tensor:
        return torch.ops.deepinfer.softmax_pool(*self)

    def exact(self) -> oracle.Exact:
        return oracle.softmax_pool(*self)


@st.composite
def pool_problems(draw: st.DrawFn, *, places: st.SearchStrategy[str] = PLACES) -> PoolProblem:
    r = draw(st.integers(1, 10))
    scores = draw(st.lists(st.sampled_from(list(SCORES)), max_size=3, unique=True))
    latents = draw(st.lists(st.sampled_from(list(LATENTS)), max_size=2, unique=True))
    spread = draw(st.sampled_from([1.0, 0.0, 20.0, 1e4, 1e38]))
    if {"inf", "-inf"} & set(latents):
        # A weight that underflows in fp32 alone would make inf * weight NaN there and inf in float64.
        scores, spread = [s for s in scores if s not in ("min", "max")], min(spread, 1.0)
    return PoolProblem(
        n=draw(st.sampled_from([1, 2, 3, 9, 40, 1, 2, 3, 9, 0])),
        r=r,
        d=draw(st.sampled_from([1, 2, 7, 8, 16, 17, 64, 127, 512, 1024])),
        spread=spread,
        scores=tuple(scores),
        latents=tuple(latents),
        masked_rows=draw(st.one_of(st.just(0), st.integers(0, r))),
        score_place=draw(places),
        latent_place=draw(places),
        seed=draw(SEEDS),
    )


def build(problem: PoolProblem, device: torch.device | str = "cpu") -> PoolInputs:
    """The tensors of a problem: deterministic, equal on every device."""
    rng, p = np.random.default_rng(problem.seed), problem
    shape = (p.n, p.r, p.d)
    score = p.spread * np.clip(rng.standard_normal(shape), -3, 3)
    latent = rng.standard_normal(shape) * np.exp2(rng.integers(-8, 9, shape))
    score = _strew(rng, score, [SCORES[name] for name in p.scores])
    latent = _strew(rng, latent, [LATENTS[name] for name in p.latents])
    score[:, : p.masked_rows] = -np.inf
    return PoolInputs(
        place(torch.from_numpy(score).float(), p.score_place, device),
        place(torch.from_numpy(latent).float(), p.latent_place, device),
    )


def _strew(rng: np.random.Generator, values: np.ndarray, specials: list[float]) -> np.ndarray:
    if not specials:
        return values
    return np.where(rng.random(values.shape) < 0.1, rng.choice(specials, values.shape), values)
