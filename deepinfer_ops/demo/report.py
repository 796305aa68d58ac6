"""Progress, aligned tables, and the plot."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch


class Report:
    """Prints as it goes, and remembers which checks failed."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.failures: list[str] = []

    def stage(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:5.1f} s] {text}", flush=True)

    def check(self, ok: bool, failure: str) -> None:
        if not ok:
            self.failures.append(failure)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(f"\n{title}")
        for row in [header, *rows]:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            print("  " + "   ".join(cells))


def plot_scores(path: Path, scores: dict[str, torch.Tensor], needle: int, topk: int) -> bool:
    """One panel of index scores per format; False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 2.8 * len(scores)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(scores), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (name, row) in zip(axes, scores.items(), strict=True):
        values = row.float().tolist()
        threshold = float(row.float().topk(topk).values[-1])
        axis.scatter(range(len(values)), values, s=2, color="tab:gray", label="compressed keys")
        axis.axhline(threshold, linewidth=1, color="tab:blue", label=f"top-{topk} threshold")
        axis.scatter([needle], [values[needle]], s=40, color="tab:red", label=f"needle, key {needle}")
        axis.set_ylabel(f"index score, {name}")
        axis.legend(loc="upper right")
    axes[-1].set_xlabel("compressed key")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
