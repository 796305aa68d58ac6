"""Runs cases, sweeps and small calls, and gives plain dictionaries: what the JSON, the table and the plots hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from . import machine, overhead
from .cases import CASES, SWEEPS, THREADED, TINY, Case, Sweep
from .problems import Problem, check_same
from .timing import FULL, QUICK, SWEEP, Budget, Spread, Times, interleave, ratios

Result = dict[str, object]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def summary(problem: Problem, times: Times) -> Result:
    """Median seconds, ratios to the operator, and what the roofline needs."""
    return {
        "operator": problem.operator,
        "threads": torch.get_num_threads(),
        "seconds": {name: Spread.of(values).median for name, values in times.items()},
        "ratios": {name: vars(ratio) for name, ratio in ratios(times, "op").items()},
        "flops": problem.flops,
        "bytes": problem.bytes,
    }


def run_case(case: Case, budget: Budget, inductor: bool = True) -> Result:
    progress(f"{case.name}, {torch.get_num_threads()} threads")
    problem = case.build()
    candidates = {"op": problem.run, "eager": problem.compose, "roof": problem.roof}
    check_same(problem, problem.compose)
    if inductor:
        candidates["inductor"] = problem.compiled()
        check_same(problem, candidates["inductor"])
    result = summary(problem, interleave(candidates | problem.asides, budget))
    goals = {name: goal for name, goal in case.goals.items() if name in candidates}
    met = {name: result["ratios"][name]["median"] >= goal for name, goal in goals.items()}
    return {"case": case.name, **result, "asides": list(problem.asides), "goals": goals, "met": met}


def run_sweep(sweep: Sweep, values: Iterable[int], budget: Budget) -> Result:
    """Along one axis, without inductor: a compilation a point would take longer than everything else."""
    progress(f"{sweep.name}, over {sweep.axis}")
    points = []
    for value in values:
        problem = sweep.build(value)
        times = interleave({"op": problem.run, "eager": problem.compose, "roof": problem.roof}, budget)
        points.append({sweep.axis: value, **summary(problem, times)})
    return {"sweep": sweep.name, "axis": sweep.axis, "points": points}


def thread_sweep(case: Case, limit: int, budget: Budget) -> Result:
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < limit] + [limit]
    points = []
    for count in counts:
        torch.set_num_threads(count)
        points.append(run_case(case, budget, inductor=False))
    return {"sweep": case.name, "axis": "threads", "points": points}


@torch.no_grad()
def run(threads: Iterable[int], pattern: str = "", quick: bool = False) -> Result:
    """Everything whose name contains ``pattern``. Cases run on each of the thread counts, sweeps on the largest."""
    budget = QUICK if quick else FULL
    sweep_budget = QUICK if quick else SWEEP
    threads = sorted(set(threads))
    before = torch.get_num_threads()
    load = machine.load_average()
    results: Result = {"machine": machine.describe(), "peaks": {}, "cases": [], "sweeps": [], "overhead": []}
    try:
        for count in threads:
            torch.set_num_threads(count)
            progress(f"peaks, {count} threads")
            results["peaks"][str(count)] = machine.peaks(sweep_budget)
            results["cases"] += [run_case(case, budget) for case in CASES if pattern in case.name]
        for sweep in SWEEPS:
            if pattern in sweep.name:
                results["sweeps"].append(run_sweep(sweep, sweep.values[:2] if quick else sweep.values, sweep_budget))
        for case in THREADED:
            if pattern in case.name:
                results["sweeps"].append(thread_sweep(case, threads[-1], sweep_budget))
        results["overhead"] = [
            overhead.measure(name, build(), grad, budget)
            for name, build in TINY.items()
            for grad in (True, False)
            if pattern in name
        ]
    finally:
        torch.set_num_threads(before)
    results["load_average"] = {"start": load, "end": machine.load_average()}
    return results
