"""The NKI kernels for tests: loaded from the top-level folder, run on the simulator, judged against float64.

The folder has no __init__.py (with one it would shadow the installed `nki`), so a package object is made for it here;
a mutated copy of the folder loads the same way under another name.
"""

import importlib
import itertools
import sys
import types
from pathlib import Path
from typing import NamedTuple

import compare
import ml_dtypes
import nki_sim
import numpy as np

BACKEND = nki_sim.install()
import nki  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "nki"
BF16 = np.dtype(ml_dtypes.bfloat16)
_serial = itertools.count()


def load(stem, folder=FOLDER):
    """The module `stem` of a folder of kernels, in a package of its own."""
    package = types.ModuleType(f"nki_kernels_{next(_serial)}", "A folder of kernels.")
    package.__path__ = [str(folder)]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{stem}")


def run(kernel, *arguments):
    """The kernel's result; its inputs must come back unchanged."""
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    result = nki.simulate(kernel)(*arguments)
    for given, kept in zip(arguments, before, strict=True):
        if isinstance(given, np.ndarray):
            np.testing.assert_array_equal(given.view(np.uint8), kept.view(np.uint8), "a kernel changed its input")
    return result


class Exact(NamedTuple):
    value: np.ndarray
    tolerance: np.ndarray


def assert_close(got, exact, what="out"):
    """Every element within its tolerance; NaN exactly where the exact result has one."""
    assert got.shape == exact.value.shape, f"{what}: shape {got.shape}, not {exact.value.shape}"
    actual = got.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(actual - exact.value)
        right = (error <= exact.tolerance) | (np.isnan(actual) & np.isnan(exact.value))
        excess = np.where(right, 0.0, np.nan_to_num(error / exact.tolerance, nan=np.inf, posinf=np.inf))
    compare.report(what, right, excess, actual, exact.value, lambda at: f"tolerance {exact.tolerance[at]:.6g}")


def attention(q, keys, mask_bias, sink, scale):
    """gathered_attn in float64; a sink beyond +-1e30 counts as that.

    Tolerance: weights and output are each rounded to bf16 (2^-8 relative), logits carry fp32 accumulation error.
    """
    rows, k = mask_bias.shape
    q, keys = q.astype(np.float64).reshape(rows, -1, 512), keys.astype(np.float64).reshape(rows, k, 512)
    logits = scale * (q @ keys.swapaxes(1, 2)) + mask_bias.astype(np.float64)[:, None]
    reach = abs(scale) * (np.abs(q) @ np.abs(keys).swapaxes(1, 2)).max(axis=2, keepdims=True)
    sink = np.clip(sink.astype(np.float64), -1e30, 1e30)[None]
    top = np.maximum(logits.max(axis=2, keepdims=True), sink)
    weights = np.exp(logits - top)
    weights[np.broadcast_to((mask_bias < -1e29)[:, None], weights.shape)] = 0.0  # also in rows without a live key
    share = weights / (weights.sum(axis=2, keepdims=True) + np.exp(sink - top))
    value = share @ keys
    spread = share @ np.abs(keys)
    tolerance = 2.0**-8 * np.abs(value) + (2.0**-8 + 2.0**-20 * (reach + 1)) * spread
    return Exact(value.reshape(-1, 512), tolerance.reshape(-1, 512))


def scores(q, k, weights):
    """weighted_scores in float64. Tolerance: relu(q.k) and the weight are each rounded to bf16 (2^-8)."""
    heads, tokens = weights.shape
    q, k, weights = (a.astype(np.float64) for a in (q.reshape(tokens, heads, 128), k, weights))
    active = np.maximum(q @ k.T, 0.0)
    value = np.einsum("thj,ht->tj", active, weights)
    spread = np.einsum("thj,ht->tj", active, np.abs(weights))
    reach = np.einsum("thd,ht->td", np.abs(q), np.abs(weights)) @ np.abs(k).T
    return Exact(value, 2.0**-7 * spread + 2.0**-20 * reach)


def pooled(latent, score):
    """softmax_pool in float64: fp32 throughout, so the tolerance is a few fp32 roundings of what was added up."""
    score, latent = score.astype(np.float64), latent.astype(np.float64)
    masked = np.isneginf(score)
    with np.errstate(invalid="ignore"):
        top = np.maximum(score.max(axis=1, keepdims=True), np.finfo(np.float32).min)
        weights = np.exp(score - top)
        total = weights.sum(axis=1, keepdims=True)
        share = weights / np.where(total == 0, 1.0, total)
        used = np.where(masked, 0.0, latent)
        value = (share * used).sum(axis=1)
        spread = (share * np.abs(used)).sum(axis=1)
    return Exact(value, 2.0**-19 * spread + 1e-37)


class AttentionProblem(NamedTuple):
    q: np.ndarray
    keys: np.ndarray
    mask_bias: np.ndarray
    sink: np.ndarray
    scale: float

    @property
    def exact(self):
        return attention(*self)

    def as_table(self, rng):
        """(table, idx) giving these keys: rows shuffled, some never used, duplicates stored once."""
        first = {}  # a key's bytes -> its number
        number = np.array([first.setdefault(key.tobytes(), len(first)) for key in self.keys])
        place = rng.permutation(len(first) + 3)
        table = rng.standard_normal((len(place), 512)).astype(BF16)
        idx = place[number]
        table[idx] = self.keys
        return table, idx.reshape(self.mask_bias.shape).astype(np.int32)


def attention_problem(seed, rows, heads, k, scale=512**-0.5, largest=8.0, live=0.7, sink=None, repeats=False):
    """A problem whose largest live logit is `largest` in magnitude. Dead keys are 0, as the composition makes them."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, 512))
    keys = rng.standard_normal((rows, k, 512)) * np.exp(rng.standard_normal((rows, k, 1)) / 2)
    if repeats:  # few distinct keys, named over and over
        keys = keys.reshape(-1, 512)[rng.integers(0, max(1, rows * k // 16), (rows, k))]
    dead = rng.random((rows, k)) >= live
    keys[dead] = 0.0
    logits = np.abs(q @ keys.swapaxes(1, 2)).max()
    if scale and logits:
        q *= largest / (abs(scale) * logits)
    if sink is None:
        sink = rng.uniform(-largest, largest, heads)
    sink = np.broadcast_to(np.float32(sink), (heads,)).reshape(heads, 1).copy()
    mask_bias = np.where(dead, np.float32(-1e30), np.float32(0))
    return AttentionProblem(q.reshape(-1, 512).astype(BF16), keys.reshape(-1, 512).astype(BF16), mask_bias, sink, scale)


def score_problem(seed, tokens, heads, n):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((tokens * heads, 128)).astype(BF16)
    k = rng.standard_normal((n, 128)).astype(BF16)
    return q, k, rng.standard_normal((heads, tokens)).astype(np.float32)


def pool_problem(seed, count, r, d, spread=3.0, masked=0.2):
    """Scores with some -inf, whose latents are NaN or infinite."""
    rng = np.random.default_rng(seed)
    latent = rng.standard_normal((count, r, d)).astype(np.float32)
    score = (spread * rng.standard_normal((count, r, d))).astype(np.float32)
    dead = rng.random(score.shape) < masked
    score[dead] = -np.inf
    latent[dead] = rng.choice(np.float32([np.nan, np.inf, -np.inf, 3e38]), dead.sum())
    return latent, score
