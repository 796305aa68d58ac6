"""What the NKI kernels cost by the simulator's model of Trn2, engine by engine, beside the bound of the work itself.

    python benchmarks/nki_cost.py             every engine of every case
    python benchmarks/nki_cost.py --markdown  one line a case, the table of docs/nki-kernels.md

Busy times of engines that never wait, from documented rates; nothing here was measured on a device.
"""

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import nki_kernels  # noqa: E402
import nki_sim  # noqa: E402
import numpy as np  # noqa: E402
from nki_kernels import BF16  # noqa: E402

import nki  # noqa: E402


class Case(NamedTuple):
    model: str
    kernel: str
    size: str
    stem: str
    arguments: tuple
    flops: int  # of the two matmuls, without transposes or masks
    hbm_bytes: int  # every input and output once; a gathered key as often as it is named
    gathered_rows: int = 0

    def trace(self):
        kernel = getattr(nki_kernels.load(self.stem), self.kernel)
        with nki_sim.trace() as trace:
            nki.simulate(kernel)(*self.arguments)
        return trace

    def bound(self, trace):
        return trace.bound(flops=self.flops, hbm_bytes=self.hbm_bytes, gathered_rows=self.gathered_rows)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def attention(model, rows, heads, k, gathers):
    q = zeros(rows * heads, 512, dtype=BF16)
    rest = (zeros(rows, k), zeros(heads, 1), 512**-0.5)
    flops = 4 * rows * heads * k * 512
    moved = 2 * q.nbytes + rows * k * 1024 + rest[0].nbytes + rest[1].nbytes
    size = f"{rows} rows, {heads} heads, {k} keys"
    if not gathers:
        keys = zeros(rows * k, 512, dtype=BF16)
        return Case(model, "gathered_attn", size, "sparse_attn", (q, keys, *rest), flops, moved)
    idx = zeros(rows, k, dtype=np.int32)
    arguments = (q, zeros(4096, 512, dtype=BF16), idx, *rest)
    return Case(model, "gathered_attn_idx", size, "sparse_attn", arguments, flops, moved + idx.nbytes, rows * k)


def scores(model, tokens, heads, n):
    arguments = (zeros(tokens * heads, 128, dtype=BF16), zeros(n, 128, dtype=BF16), zeros(heads, tokens))
    moved = sum(a.nbytes for a in arguments) + 4 * tokens * n
    size = f"{tokens} tokens, {heads} heads, {n} keys"
    return Case(model, "weighted_scores", size, "index_score", arguments, 2 * tokens * heads * n * 129, moved)


def pool(model, count, r, d):
    arguments = (zeros(count, r, d), zeros(count, r, d))
    moved = sum(a.nbytes for a in arguments) + 4 * count * d
    return Case(model, "softmax_pool", f"N = {count}, R = {r}, D = {d}", "compress_pool", arguments, 0, moved)


def cases():
    """Eight rows of attention and of the indexer. Pooling: 512 prompt tokens by the two compressors, 4:1 (overlapping,
    R = 8) and 128:1, which both models have; and the 4:1 compressor at 8 requests' decode step."""
    return [
        attention("V4-Flash", 8, 64, 640, False),
        attention("V4-Flash", 8, 64, 640, True),
        scores("V4-Flash", 8, 64, 4096),
        attention("V4-Pro", 8, 128, 1152, False),
        attention("V4-Pro", 8, 128, 1152, True),
        scores("V4-Pro", 8, 64, 8192),
        pool("both", 128, 8, 512),
        pool("both", 4, 128, 512),
        pool("both", 8, 8, 512),
    ]


ENGINES = {"tensor": "TensorE", "vector": "VectorE", "scalar": "ScalarE", "gpsimd": "GpSimd", "dma": "DMA"}


def report(case):
    trace = case.trace()
    bound = case.bound(trace)
    ratio = trace.slowest_ns / bound.ns
    title = f"{case.model} {case.kernel}: {case.size}"
    limit = f"{ENGINES[trace.slowest]} limits, {ratio:.2f} x the bound of {bound.name}"
    return f"{title}\n{trace.table(bound)}\n{limit}\n"


def markdown():
    lines = [
        "| model | kernel | size | bound, us | TensorE | VectorE | ScalarE | GpSimd | DMA | instructions | limit |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in cases():
        trace = case.trace()
        bound = case.bound(trace)
        busy = " | ".join(f"{trace.engines[name].ns / 1e3:.1f}" for name in ENGINES)
        issued = sum(e.issued for e in trace.engines.values())
        lines.append(
            f"| {case.model} | `{case.kernel}` | {case.size} | {bound.ns / 1e3:.1f} ({bound.name}) | {busy} | "
            f"{trace.program_size} / {issued} | {ENGINES[trace.slowest]}, {trace.slowest_ns / bound.ns:.2f} x |"
        )
    return "\n".join(lines)


def main():
    if nki_kernels.BACKEND != "simulator":
        sys.exit("the cost model belongs to tests/nki_sim; it does not run where the real nki package is installed")
    print(markdown() if "--markdown" in sys.argv[1:] else "\n".join(report(case) for case in cases()))


if __name__ == "__main__":
    main()
