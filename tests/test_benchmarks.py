"""The benchmark suite runs and reports what it measured. Nothing here looks at how long anything took."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, plots, problems, report, suite, timing

ROOT = Path(__file__).parents[1]
TINY_BUDGET = timing.Budget(rounds=2, turn_seconds=1e-5)


@pytest.fixture
def results(threads) -> dict:
    """Results of the suite's own steps on small problems, without inductor's compiler."""
    threads(1)
    small = cases.Case("decode, 2 heads", lambda: problems.decode(2, 1, 4, 4, "fp4"), {"eager": 0.0, "roof": 1e9})
    with torch.no_grad():
        case = suite.run_case(small, TINY_BUDGET, inductor=False)
        sweep = suite.run_sweep(cases.Sweep("pool", "N", (1, 2), lambda n: problems.pool(n, 2, 8)), (1, 2), TINY_BUDGET)
    case["ratios"]["inductor"] = case["ratios"]["eager"]
    peak = {"median": 1e10, "low": 9e9, "high": 2e10}
    return {
        "machine": {"cpu": "a CPU", "deepinfer_capability": "generic"},
        "peaks": {"1": {"gemm": peak, "copy, from memory": peak, "copy, in cache": peak}},
        "cases": [case],
        "sweeps": [sweep],
        "overhead": [],
        "load_average": {"start": 0.0, "end": 0.0},
    }


def test_candidates_take_turns_and_every_round_gives_one_time_each():
    order: list[str] = []
    times = timing.interleave({name: lambda name=name: order.append(name) for name in "abc"}, timing.Budget(3, 0.0))
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    measured = order[-3 * 3 * 2 :]  # an untimed call and a timed one a turn
    assert measured == ["a", "a", "b", "b", "c", "c"] * 3


def test_a_turn_that_another_process_disturbed_is_measured_again(monkeypatch):
    # two turns to find the number of calls, then a disturbed one, then a good one
    disturbed = iter([0, 0, 0, 0, 0, 1, 1, 1])
    monkeypatch.setattr(timing, "preemptions", lambda: next(disturbed))
    runs: list[None] = []
    times = timing.interleave(
        {"a": lambda: runs.append(None)}, timing.Budget(rounds=1, turn_seconds=0.0, patience=60.0)
    )
    assert len(times["a"]) == 1
    assert len(runs) == 1 + 4 * 2


def test_ratios_are_taken_round_by_round():
    times = {"op": [1.0, 10.0, 100.0], "other": [3.0, 20.0, 500.0]}  # medians apart would say 2
    assert timing.ratios(times, "op") == {"other": timing.Spread.of([3.0, 2.0, 5.0])}
    assert timing.ratios(times, "op")["other"].median == 3.0
    assert timing.excess(times, "other", "op").median == 10.0


def test_a_case_is_refused_when_its_composition_computes_something_else():
    problem = problems.pool(1, 2, 8)
    problems.check_same(problem, problem.compose)
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        problems.check_same(problem, lambda: problem.compose() + 1)


@pytest.mark.parametrize(
    "problem",
    [
        lambda: problems.decode(3, 2, 5, 7),
        lambda: problems.decode(3, 2, 5, 7, "fp4"),
        lambda: problems.logits("fp8", 3, 128, 2),
        lambda: problems.logits("fp4", 3, 128, 2),
        lambda: problems.pool(3, 4, 20),
    ],
)
def test_operator_composition_and_roof_of_every_kind_of_problem_run(problem):
    built = problem()
    problems.check_same(built, built.compose)
    built.roof()
    assert built.flops > 0
    assert built.bytes >= built.run().nbytes


def test_a_decode_without_live_keys_computes_nothing():
    assert problems.decode(2, 1, 8, dead=True).run().count_nonzero() == 0


def test_results_survive_json_and_become_a_table(results):
    again = json.loads(json.dumps(results))
    assert again == results
    printed = report.text(again)
    (line,) = [line for line in printed.splitlines() if line.startswith("| decode, 2 heads")]
    assert re.search(r"goal 1e\+09", line), "a missed goal stands beside its ratio"
    assert line.count("goal") == 1, "a met one does not"
    assert results["cases"][0]["met"] == {"eager": True, "roof": False}
    widths = {len(line) for line in report.case_table(results["cases"]).splitlines()}
    assert len(widths) == 1, "columns are aligned"


def test_three_plots_are_written(results, tmp_path):
    pytest.importorskip("matplotlib")
    paths = plots.write(results, tmp_path)
    assert [path.name for path in paths] == [f"performance-{name}.png" for name in ("ratios", "scaling", "roofline")]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000


def test_partial_runs_leave_the_published_results_alone():
    assert command.parse(["--quick"]).json is None
    assert command.parse(["--case", "pool"]).plots is None
    assert command.parse([]).json == ROOT / "docs" / "performance.json"


def test_goals_are_those_of_the_issue():
    goals = {case.name: case.goals for case in cases.CASES}
    assert goals["decode, 64 heads, 128 + 512 fp8 keys, 1 row"] == {"eager": 4.0, "inductor": 3.0, "roof": 1.0}
    assert goals["logits fp4, 64 heads, 16K positions"] == {"eager": 8.0, "inductor": 6.0, "roof": 2.0}
    assert cases.OVERHEAD_GOAL == 10e-6


def test_the_command_measures_one_case_with_inductor_and_small_calls(tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "results.json"
    arguments = ["--quick", "--case", "pool", "--threads", "1", "--json", str(output), "--plots", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert [case["case"] for case in results["cases"]] == ["pool, 512 x 8 x 512"]
    assert set(results["cases"][0]["ratios"]) == {"eager", "inductor", "roof", "torch.exp of the scores"}
    assert [(call["call"], call["mode"]) for call in results["overhead"]] == [
        ("pool, 1 x 8 x 128", "grad"),
        ("pool, 1 x 8 x 128", "no_grad"),
    ]
    assert results["cases"][0]["threads"] == 1
    assert "| pool, 512 x 8 x 512 |" in done.stdout


def test_the_published_page_shows_the_published_results():
    results = json.loads((ROOT / "docs" / "performance.json").read_text())
    page = (ROOT / "docs" / "performance.md").read_text()
    assert report.case_table(results["cases"]) in page
    assert report.overhead_table(results["overhead"]) in page
    assert report.refresh(page, results) == page


def test_a_page_gets_new_tables_and_keeps_its_text(results):
    page = "before\n<!-- cases -->\n{}\n<!-- end -->\nafter\n"
    assert report.refresh(page.format("stale"), results) == page.format(report.case_table(results["cases"]))
