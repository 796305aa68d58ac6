"""The compiled step against the eager one, and every operator's time beside its composition."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from .scene import Caches, Context, newest_window, to_slots, windows
from .step import OURS, TORCH, Operators, StepResult, attend, decode_step, score

CompiledStep = Callable[..., StepResult]


def step_arguments(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of :func:`decode_step`, after the operators and the caches."""
    return *newest_window(context), context.query, context.sink, context.index_weights


def compile_step(
    context: Context, caches: Mapping[str, Caches], results: Mapping[str, StepResult]
) -> tuple[CompiledStep, dict[str, bool]]:
    """The step as one graph, and whether its results are the eager ones bit for bit, per format.

    They must be: on CPU the operators are opaque nodes that call the same kernels.
    """
    compiled: CompiledStep = torch.compile(decode_step, fullgraph=True)
    same = {}
    for name, result in results.items():
        again = compiled(OURS, caches[name], *step_arguments(context))
        same[name] = all(torch.equal(eager, other) for eager, other in zip(result, again, strict=True))
    return compiled, same


def time_operators(
    context: Context,
    caches: Mapping[str, Caches],
    results: Mapping[str, StepResult],
    compiled: CompiledStep | None,
    seconds: float,
) -> list[list[str]]:
    """Rows of a table: case, this package, composition, ratio. ``seconds`` are spent on each."""

    def both(call: Callable[[Operators], object]) -> list[float]:
        return interleaved([partial(call, OURS), partial(call, TORCH)], seconds)

    scores, latents = windows(context.latent_scores, -torch.inf), windows(context.latent_rows, 0.0)
    rows = [_row(f"softmax_pool {list(scores.shape)}", *both(lambda ops: ops.softmax_pool(scores, latents)))]
    step = step_arguments(context)
    for name, cache in caches.items():
        slots = to_slots(results[name].chosen[0], cache.block_table[0])[None, None]
        keys = slots.numel() + cache.swa_slots.numel()
        scoring = partial(score, index_weights=context.index_weights, caches=cache)
        attending = partial(attend, query=context.query, sink=context.sink, slots=slots, caches=cache)
        rows.append(_row(f"paged_mqa_logits {name}, {cache.keys} keys", *both(scoring)))
        rows.append(_row(f"flash_mla_decode {name}, {keys} keys", *both(attending)))
        calls = [partial(decode_step, operators, cache, *step) for operators in (OURS, TORCH)]
        if compiled is not None:
            calls.append(partial(compiled, OURS, cache, *step))
        ours, composed, *compiled_times = interleaved(calls, seconds)
        rows.append(_row(f"whole step {name}", ours, composed))
        rows += [_row(f"whole step {name}, compiled", taken, composed) for taken in compiled_times]
    return rows


def _row(case: str, ours: float, composed: float) -> list[str]:
    return [case, f"{ours:.3f} ms", f"{composed:.3f} ms", f"{composed / ours:.1f}x"]


def interleaved(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median milliseconds of each call. They take turns, so that a busy machine slows all of them alike."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) for taken in times]
