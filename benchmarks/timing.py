"""Interleaved timing. A shared machine drifts by tens of percent within seconds, so nothing here compares two times
taken apart: candidates take turns, A B C A B C, every round gives one ratio, and the median of the ratios counts."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Candidate = Callable[[], object]
Times = dict[str, list[float]]
"""Seconds per call of every candidate, one entry a round."""


@dataclass(frozen=True)
class Budget:
    """How long a measurement may take."""

    rounds: int
    turn_seconds: float
    """A turn repeats its call for about this long: neither the clock's own cost nor cold caches count."""
    patience: float = 0.0
    """Seconds that measuring disturbed turns again may take, in total."""


FULL = Budget(rounds=40, turn_seconds=2e-3, patience=10.0)
SWEEP = Budget(rounds=15, turn_seconds=2e-3, patience=10.0)
QUICK = Budget(rounds=5, turn_seconds=2e-4)


@dataclass(frozen=True)
class Spread:
    """A median, and the 10th and 90th percentile around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        low, median, high = torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist()
        return Spread(median, low, high)


def clock() -> Callable[[], float]:
    """With one thread its CPU time, which leaves out what other processes take; with several, wall time."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def preemptions() -> int:
    """How often the system took the processor from one of this process's threads."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def interleave(candidates: Mapping[str, Candidate], budget: Budget) -> Times:
    """Time the candidates in turns.

    A turn starts with one untimed call, which brings its data into the caches. A turn during which another process
    took a processor is measured again while ``budget.patience`` lasts: one preempted thread stalls all the others.
    """
    now = clock()
    patience = budget.patience

    def turn(run: Candidate, calls: int) -> float:
        nonlocal patience
        while True:
            begin = time.perf_counter()
            run()
            before, start = preemptions(), now()
            for _ in range(calls):
                run()
            taken = (now() - start) / calls
            if preemptions() == before or patience <= 0:
                return taken
            patience -= time.perf_counter() - begin

    calls = {}
    for name, run in candidates.items():
        run()  # first calls compile, allocate and start threads
        calls[name] = max(1, round(budget.turn_seconds / max(min(turn(run, 1), turn(run, 1)), 1e-7)))
    times: Times = {name: [] for name in candidates}
    for _ in range(budget.rounds):
        for name, run in candidates.items():
            times[name].append(turn(run, calls[name]))
    return times


def ratios(times: Times, base: str) -> dict[str, Spread]:
    """How many times longer than ``base`` each other candidate takes, round by round."""
    return {
        name: Spread.of([t / b for t, b in zip(values, times[base], strict=True)])
        for name, values in times.items()
        if name != base
    }


def excess(times: Times, name: str, base: str) -> Spread:
    """Seconds that ``name`` takes beyond ``base``, round by round."""
    return Spread.of([t - b for t, b in zip(times[name], times[base], strict=True)])
