"""The step in float64, from the caches' bytes: definitions written out, sharing nothing with kernels or packers."""

from __future__ import annotations

from typing import NamedTuple

import torch

BF16_ROUNDING = 2.0**-8
FP32_UNIT = 2.0**-24

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Exact(NamedTuple):
    """A result before its last rounding, and how far from it an operator may be."""

    value: torch.Tensor
    tolerance: torch.Tensor

    def used(self, got: torch.Tensor) -> float:
        """The largest error as a part of its tolerance: at most 1 is right."""
        error = (got.double() - self.value).abs()
        # Equal infinities (masked scores) have no error; anything that is not a number has an infinite one.
        error = torch.where(got.double() == self.value, 0.0, error).nan_to_num(nan=torch.inf)
        return float((error / self.tolerance).max())


def e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).double()


def e2m1(data: torch.Tensor) -> torch.Tensor:
    """Two elements a byte, the even one in the low nibble; bit 3 is the sign."""
    values = torch.tensor(E2M1 + [-x for x in E2M1], dtype=torch.float64)
    return values[torch.stack([data & 15, data >> 4], dim=-1).long()].flatten(-2)


def ue8m0(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes == 0, 0.0, torch.exp2(codes.double() - 127))


def latents(records: torch.Tensor) -> torch.Tensor:
    """KV records ``[n, 528 or 288]`` to ``[n, 512]``."""
    if records.shape[-1] == 528:
        return e4m3(records[:, :512]) * ue8m0(records[:, 512:]).repeat_interleave(32, dim=1)
    return e2m1(records[:, :256]) * e4m3(records[:, 256:]).repeat_interleave(16, dim=1)


def index_elements(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Index keys or queries: 128 element bytes, or 64 of two elements, and four scales."""
    data = data.contiguous().view(torch.uint8)
    elements = e4m3(data) if data.shape[-1] == 128 else e2m1(data)
    return elements * ue8m0(scales).repeat_interleave(32, dim=-1)


def index_keys(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """All keys of the given pages ``[len(pages) * page_kv, 128]``: a page is all elements, then all scales."""
    page_kv, token_bytes = cache.shape[1], cache.shape[3]
    width = token_bytes - 4
    runs = cache[pages.long()].reshape(len(pages), page_kv * token_bytes)
    data = runs[:, : page_kv * width].reshape(-1, width)
    return index_elements(data, runs[:, page_kv * width :].reshape(-1, 4))


def pool(scores: torch.Tensor, rows: torch.Tensor) -> Exact:
    """``[n, 8, D]`` to ``[n, D]``; rows under a score of -inf have weight 0."""
    weights = scores.double().softmax(dim=1)
    value = (weights * rows.double()).sum(dim=1)
    rounding = (2 * scores.shape[1] + 16) * FP32_UNIT * rows.double().abs().amax(dim=1)
    return Exact(value, BF16_ROUNDING * value.abs() + rounding)


def index_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> Exact:
    """``q [H, 128]``, ``k [n, 128]``, ``weights [H]`` to ``[n]``: sum over heads of relu(q . k) * w."""
    w = weights.double()
    value = w @ (q @ k.T).relu()
    terms = w.abs() @ (q.abs() @ k.abs().T)
    return Exact(value, BF16_ROUNDING * value.abs() + (128 + len(q) + 2) * FP32_UNIT * terms)


def attention(q: torch.Tensor, keys: torch.Tensor, sink: torch.Tensor) -> tuple[Exact, torch.Tensor]:
    """``q [h, 512]``, ``keys [n, 512]`` (values too), ``sink [h]`` to ``[h, 512]``, and the weights ``[h, n]``."""
    logits = q.double() @ keys.T * 512**-0.5
    joint = torch.cat([logits, sink.double()[:, None]], dim=1).softmax(dim=1)
    weights = joint[:, :-1]
    value = weights @ keys
    return Exact(value, BF16_ROUNDING * value.abs() + 1e-5 * keys.abs().max()), weights
