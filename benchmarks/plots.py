"""Three figures from the results: ratios per case, scaling curves, and the machine's roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {"eager": "#c44e52", "inductor": "#dd8452", "roof": "#4c72b0", "op": "#333333"}
LABELS = {"eager": "eager composition", "inductor": "inductor", "roof": "roof (fp32 GEMM; copy)", "op": "operator"}


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes ``performance-*.png`` into ``folder``; returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in (("ratios", ratios), ("scaling", scaling), ("roofline", roofline)):
        figure = draw(pyplot, results)
        paths.append(folder / f"performance-{name}.png")
        figure.savefig(paths[-1], dpi=110, bbox_inches="tight")
        pyplot.close(figure)
    return paths


def ratios(pyplot: Any, results: dict[str, Any]) -> Any:
    """Grouped bars with the 10..90 percentile as whiskers; above 1 the operator is faster."""
    cases = results["cases"]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.62 * len(cases)))
    for offset, kind in enumerate(("eager", "inductor", "roof")):
        spreads = [case["ratios"][kind] for case in cases]
        medians = [s["median"] for s in spreads]
        reach = [[s["median"] - s["low"] for s in spreads], [s["high"] - s["median"] for s in spreads]]
        places = [i + (offset - 1) * 0.26 for i in range(len(cases))]
        axes.barh(places, medians, 0.24, xerr=reach, color=COLOURS[kind], label=LABELS[kind], error_kw={"lw": 0.8})
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_yticks(range(len(cases)), [f"{case['case']} ({case['threads']} thr.)" for case in cases], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time / operator's time")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def scaling(pyplot: Any, results: dict[str, Any]) -> Any:
    """One panel a sweep: milliseconds over the size, both logarithmic."""
    sweeps = results["sweeps"]
    columns = 3
    lines = max(1, -(-len(sweeps) // columns))
    figure, grid = pyplot.subplots(lines, columns, figsize=(12, 3.1 * lines), squeeze=False)
    for panel in grid.flat[len(sweeps) :]:
        panel.set_axis_off()
    for panel, sweep in zip(grid.flat, sweeps, strict=False):
        sizes = [point[sweep["axis"]] for point in sweep["points"]]
        for kind in ("eager", "roof", "op"):
            times = [point["seconds"][kind] * 1e3 for point in sweep["points"]]
            panel.loglog(sizes, times, "o-", ms=3, color=COLOURS[kind], label=LABELS[kind])
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7)
        panel.minorticks_off()
        panel.set_title(sweep["sweep"], fontsize=9)
        panel.set_xlabel(sweep["axis"], fontsize=8)
        panel.set_ylabel("ms", fontsize=8)
    if sweeps:
        grid.flat[0].legend(fontsize=7)
    figure.tight_layout()
    return figure


def roofline(pyplot: Any, results: dict[str, Any]) -> Any:
    """Achieved operations per second over operations per compulsory byte, below the measured peaks."""
    threads = max(results["peaks"], key=int)
    peaks = {name: spread["median"] for name, spread in results["peaks"][threads].items()}
    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [2.0**i for i in range(-3, 12)]
    for name, style in (("copy, from memory", "-"), ("copy, in cache", "--")):
        roof = [min(peaks["gemm"], peaks[name] * x) / 1e9 for x in intensities]
        axes.loglog(intensities, roof, style, color="black", lw=1, label=f"{name}: {peaks[name] / 1e9:.0f} GB/s")
    axes.axhline(
        peaks["gemm"] / 1e9, color=COLOURS["roof"], lw=1, label=f"fp32 GEMM: {peaks['gemm'] / 1e9:.0f} GFLOP/s"
    )
    markers = iter("osD^v<>ph*XP")
    for case in results["cases"]:
        if str(case["threads"]) == threads:
            rate = case["flops"] / case["seconds"]["op"] / 1e9
            axes.loglog(case["flops"] / case["bytes"], rate, next(markers), ms=7, label=case["case"])
    axes.set_xlabel("operations per compulsory byte")
    axes.set_ylabel("GFLOP/s (fp4 logits: integer products counted as such)")
    axes.set_title(f"{threads} threads, {results['machine']['deepinfer_capability']}", fontsize=9)
    axes.legend(fontsize=7, loc="lower right")
    return figure
