"""Results as text: Markdown tables that read well in a terminal too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def ratio(spread: dict[str, float], goal: float | None = None) -> str:
    """``2.05 (1.9..2.2)``, and behind it the goal where it was missed."""
    text = f"{spread['median']:.2f} ({spread['low']:.2f}..{spread['high']:.2f})"
    return text if goal is None or spread["median"] >= goal else f"{text}, goal {goal:g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "| " + " | ".join("-" * w for w in widths) + " |", *lines[1:]])


def case_table(cases: Sequence[dict[str, Any]]) -> str:
    """Per case: the operator's time, and how many times longer the others take."""
    kinds = ("eager", "inductor", "roof")
    rows = []
    for case in cases:
        cells = [ratio(case["ratios"][kind], case["goals"].get(kind)) for kind in kinds]
        rows.append([case["case"], str(case["threads"]), f"{case['seconds']['op'] * 1e3:.2f} ms", *cells])
    return table(["case", "threads", "operator", "eager", "inductor", "roof"], rows)


def asides(cases: Sequence[dict[str, Any]]) -> str:
    """What else was timed beside a case, one line each."""
    return "\n".join(
        f"{case['case']}, threads {case['threads']}: {name} takes {ratio(case['ratios'][name])} of the operator's time"
        for case in cases
        for name in case["asides"]
    )


def overhead_table(calls: Sequence[dict[str, Any]]) -> str:
    rows = []
    for call in calls:
        micro = [f"{call['seconds'][name] * 1e6:.1f}" for name in ("op", "empty", "python")]
        beyond = {key: value * 1e6 for key, value in call["beyond_empty"].items()}
        rows.append([call["call"], call["mode"], *micro, ratio(beyond)])
    return table(["call (us)", "mode", "operator", "empty operator", "Python function", "beyond empty"], rows)


def sweep_table(sweeps: Sequence[dict[str, Any]]) -> str:
    rows = [
        [sweep["sweep"], f"{point[sweep['axis']]} {sweep['axis']}", f"{point['seconds']['op'] * 1e3:.3f} ms"]
        + [ratio(point["ratios"][kind]) for kind in ("eager", "roof")]
        for sweep in sweeps
        for point in sweep["points"]
    ]
    return table(["sweep", "at", "operator", "eager", "roof"], rows)


def peak_table(peaks: dict[str, dict[str, dict[str, float]]]) -> str:
    rows = [
        [name, threads, ratio({key: value / 1e9 for key, value in spread.items()})]
        for threads, by_name in peaks.items()
        for name, spread in by_name.items()
    ]
    return table(["peak (GFLOP/s or GB/s)", "threads", "rate"], rows)


def machine_line(machine: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def load_line(load: dict[str, float]) -> str:
    return f"load average {load['start']:.1f} before, {load['end']:.1f} after"


SECTIONS = {
    "machine": lambda results: machine_line(results["machine"]),
    "load": lambda results: load_line(results["load_average"]),
    "cases": lambda results: case_table(results["cases"]) if results["cases"] else "",
    "asides": lambda results: asides(results["cases"]),
    "sweeps": lambda results: sweep_table(results["sweeps"]) if results["sweeps"] else "",
    "small calls": lambda results: overhead_table(results["overhead"]) if results["overhead"] else "",
    "peaks": lambda results: peak_table(results["peaks"]),
}
"""Everything there is to show, in the order it is printed. A page asks for one between ``<!-- NAME -->`` and
``<!-- end -->``."""


def text(results: dict[str, Any]) -> str:
    """Everything, as printed."""
    parts = ["Times of the others divided by the operator's: median (10th..90th percentile) over rounds."]
    parts += [section(results) for section in SECTIONS.values()]
    return "\n\n".join(part for part in parts if part)


def refresh(page: str, results: dict[str, Any]) -> str:
    """The page with its marked sections replaced by those of ``results``."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n{SECTIONS[match[1]](results)}\n<!-- end -->"

    return re.sub(r"<!-- (?!end)([a-z ]+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)
