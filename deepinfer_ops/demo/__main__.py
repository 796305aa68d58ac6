"""The demo's command line and its course: build, run and check per format, compile, time, plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from .. import HAS_CPU_KERNELS, __version__
from .checks import judge, pooling_error, show
from .report import Report, plot_scores
from .scene import INDEX_HEADS, RATIO, TOPK, WINDOW, make_caches, make_context, pool_context
from .step import OURS, decode_step
from .timing import compile_step, step_arguments, time_operators

FORMATS = ("fp8", "fp4")


def bounded(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer in low..high."""

    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected {low}..{high}, got {value}")
        return value

    return parse


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m deepinfer_ops.demo",
        description="One decode step of a DeepSeek-V4-Flash attention layer on this CPU: pool, quantize, score, take "
        "the top-k, attend; with a needle planted in the context, a float64 reference and timings.",
        epilog="Exit status 0: the needle was found and everything agrees with the reference; 1: not; 2: not built.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--context", type=bounded(256, 131072), default=16384, metavar="TOKENS", help="context length")
    parser.add_argument("--heads", type=bounded(1, 1024), default=64, help="attention heads")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers, the needle's place included")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (saves its compile time)")
    parser.add_argument("--seconds", type=float, default=0.8, help="time spent on each line of the timing table")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), metavar="DIR", help="where the plot goes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if not HAS_CPU_KERNELS:
        print("the CPU kernels are not built: pip install --no-build-isolation -e .", file=sys.stderr)
        return 2
    print(f"deepinfer_ops {__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"One decode step over {options.context} tokens: {options.context // RATIO} compressed keys (ratio {RATIO}),")
    print(f"sliding window {WINDOW}, {options.heads} heads x 512, index {INDEX_HEADS} heads x 128, top-{TOPK}.\n")
    report = Report()
    with torch.inference_mode():
        run(report, options)
    print()
    for failure in report.failures:
        print(f"FAILED: {failure}")
    if not report.failures:
        print("Needle found, results agree.")
    return 1 if report.failures else 0


def run(report: Report, options: argparse.Namespace) -> None:
    report.stage("writing the context and planting the needle")
    context = make_context(options.context, options.heads, options.seed)
    report.stage(f"softmax_pool: {context.compressed} windows of {2 * RATIO} rows, latents and index keys")
    latents, index_keys = pool_context(context)
    caches, results = {}, {}
    for name in FORMATS:
        report.stage(f"{name}: quantizing into paged caches, scoring, top-k, attention")
        caches[name] = make_caches(context, latents, index_keys, name, options.seed)
        results[name] = decode_step(OURS, caches[name], *step_arguments(context))
    report.stage("the same in float64")
    verdicts = {name: judge(context, latents, caches[name], results[name]) for name in FORMATS}
    pooling = pooling_error(context)
    compiled, same = None, None
    if not options.no_compile:
        report.stage("torch.compile(fullgraph=True): one graph with the three operators, per format")
        compiled, same = compile_step(context, caches, results)
    report.stage("timing, interleaved with the same composed from torch operators")
    times = time_operators(context, caches, results, compiled, options.seconds)
    report.stage("done")

    show(report, context, verdicts, pooling, same)
    report.table("Time, medians of interleaved runs", ["", "this package", "torch composition", "ratio"], times)
    path = options.out / "index_scores.png"
    scores = {name: result.scores[0] for name, result in results.items()}
    if plot_scores(path, scores, context.needle, min(TOPK, context.compressed)):
        print(f"\nPlot of the index scores: {path}")
    else:
        print("\nNo plot: matplotlib is not installed (pip install matplotlib).")


if __name__ == "__main__":
    sys.exit(main())
