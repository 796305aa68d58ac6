"""``python -m benchmarks``: all cases, sweeps and small calls; table on stdout, JSON, plots and tables into docs/."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from . import plots, report, suite

DOCS = Path(__file__).parents[1] / "docs"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds and short sweeps: does it run, not how fast")
    parser.add_argument("--case", default="", metavar="TEXT", help="only what has this in its name, e.g. 'logits fp4'")
    everything = sorted({1, torch.get_num_threads()})
    parser.add_argument("--threads", type=int, nargs="+", default=everything, help="default: 1 and all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: docs/performance.json for a full run")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="default: docs for a full run")
    options = parser.parse_args(arguments)
    if not options.quick and not options.case:  # a partial run never replaces the published numbers
        options.json = options.json or DOCS / "performance.json"
        options.plots = options.plots or DOCS
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.manual_seed(0)
    results = suite.run(options.threads, options.case, options.quick)
    print(report.text(results))
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")
    if options.json == DOCS / "performance.json":
        page = DOCS / "performance.md"
        page.write_text(report.refresh(page.read_text(), results))
    if options.plots:
        print("\n".join(f"wrote {path.name}" for path in plots.write(results, options.plots)))


if __name__ == "__main__":
    main()
