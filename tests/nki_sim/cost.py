"""Cost model: what a kernel issues on each engine, and a time for it from documented rates.

Every constant is from the public Neuron documentation of Trn2 or derived from it in one step; none was measured.
Times are busy times of an engine that never waits, so the kernel's time lies between the largest of them (perfectly
overlapped) and their sum. DMA start latency (about 1.3 us when something waits for it) and the descriptor work of
gathers on GpSimd are not included: no document gives the latter.
"""

from dataclasses import dataclass, field
from math import prod

from . import dtypes, layout
from .enums import HBM, PSUM, SBUF

TENSOR_GHZ, VECTOR_GHZ, SCALAR_GHZ, GPSIMD_GHZ = 2.4, 0.96, 1.2, 1.2
MIN_CYCLES = 64  # smallest interval between two instructions of an engine
READ_OUT_CYCLES = 64  # ScalarE: extra instruction that reads the reduce registers
RECIPROCAL_FACTOR = 8  # VectorE: cycles per element
DMA_ENGINES = 16
DMA_ROW_NS = 107.0  # one descriptor on one engine, read off the documented throughput curve below 2 KiB
DMA_BYTES_PER_NS = 22.5  # one engine
BF16_FLOPS_PER_NS = 78643.2  # 128 x 128 multiply-adds x 2.4 GHz
HBM_BYTES_PER_NS = 362.0  # one core's share of 2.9 TB/s on a chip of 8 cores


@dataclass
class Engine:
    program: int = 0  # instructions of the compiled program: a device loop's body counts once
    issued: int = 0  # instructions executed
    elements: int = 0  # elements per partition, summed over executed instructions
    ns: float = 0.0


@dataclass
class Bound:
    """The least time the work itself needs, whatever the kernel: the largest of three."""

    flops_ns: float
    hbm_ns: float
    rows_ns: float
    name: str = field(init=False)
    ns: float = field(init=False)

    def __post_init__(self):
        choices = {"matmul FLOPs": self.flops_ns, "HBM bytes": self.hbm_ns, "gathered rows": self.rows_ns}
        self.name = max(choices, key=choices.get)
        self.ns = choices[self.name]


class Trace:
    """Counters of every kernel simulated while it was open (`with nki_sim.trace() as t`)."""

    NAMES = ("tensor", "vector", "scalar", "gpsimd", "dma")

    def __init__(self):
        self.engines = {name: Engine() for name in self.NAMES}
        self.by_instruction = {}  # (engine, instruction) -> Engine
        self.matmul_flops = 0  # without transposes
        self.hbm_read_bytes = 0
        self.hbm_write_bytes = 0
        self.dma_rows = 0  # descriptors: contiguous pieces
        self.gathered_rows = 0  # of them, rows of vector_offset accesses
        self.peak_bytes = {SBUF: 0, PSUM: 0}  # per partition

    hbm_bytes = property(lambda self: self.hbm_read_bytes + self.hbm_write_bytes)
    program_size = property(lambda self: sum(e.program for e in self.engines.values()))
    slowest = property(lambda self: max(self.NAMES, key=lambda name: self.engines[name].ns))
    slowest_ns = property(lambda self: self.engines[self.slowest].ns)

    def add(self, engine_name, instruction, elements, ns, in_program):
        for entry in (
            self.engines[engine_name],
            self.by_instruction.setdefault((engine_name, instruction), Engine()),
        ):
            entry.program += in_program
            entry.issued += 1
            entry.elements += elements
            entry.ns += ns

    def peak(self, region, size):
        self.peak_bytes[region] = max(self.peak_bytes[region], size)

    def bound(self, flops=None, hbm_bytes=None, gathered_rows=None):
        """The bound of this trace's own work, or of the work given."""
        flops = self.matmul_flops if flops is None else flops
        hbm_bytes = self.hbm_bytes if hbm_bytes is None else hbm_bytes
        rows = self.gathered_rows if gathered_rows is None else gathered_rows
        return Bound(flops / BF16_FLOPS_PER_NS, hbm_bytes / HBM_BYTES_PER_NS, rows * DMA_ROW_NS / DMA_ENGINES)

    def table(self, bound=None):
        """The engines as text: instructions, elements, busy time, and busy time over the bound."""
        bound = bound or self.bound()
        lines = [f"{'engine':8}{'program':>9}{'issued':>9}{'elements':>12}{'busy us':>10}{'x bound':>9}"]
        for name in self.NAMES:
            e = self.engines[name]
            ratio = e.ns / bound.ns if bound.ns else float("nan")
            lines.append(f"{name:8}{e.program:9}{e.issued:9}{e.elements:12}{e.ns / 1e3:10.2f}{ratio:9.2f}")
        lines.append(
            f"bound {bound.ns / 1e3:.2f} us ({bound.name}); matmul {self.matmul_flops / 1e6:.1f} MFLOP, "
            f"HBM {self.hbm_bytes / 1e6:.3f} MB, {self.dma_rows} DMA rows ({self.gathered_rows} gathered), "
            f"peak {self.peak_bytes[SBUF]} B SBUF and {self.peak_bytes[PSUM]} B PSUM per partition"
        )
        return "\n".join(lines)


def _emit(machine, engine_name, elements, ns):
    instruction = machine.instruction.removeprefix("nisa.")
    machine.trace.add(engine_name, instruction, elements, ns, machine.program)


def tensor_engine(machine, columns, slowdown=1):
    """One pass of `columns` moving columns; loading the stationary operand runs in the background."""
    _emit(machine, "tensor", columns, max(columns, MIN_CYCLES) * slowdown / TENSOR_GHZ)


def _free(tensor):
    return prod(tensor.shape[1:])


def _fast(*tensors):
    """Whether the two-byte fast modes apply, and how many times they are faster (1, 2 or 4)."""
    if any(t.dtype not in dtypes.HALVES for t in tensors):
        return 1
    easy = all(t.buffer is SBUF and t.is_contiguous() for t in tensors)
    return 4 if easy else 2


def _stretched(*tensors):
    """An innermost step of more than 16 bytes halves the access rate."""
    steps = [layout.merged(t.shape[1:], t.strides[1:]) for t in tensors]
    return 2 if any(s and s[-1][1] * t.itemsize > 16 for s, t in zip(steps, tensors, strict=True)) else 1


def vector_engine(machine, dst, *inputs, factor=None, fast=False):
    """One VectorE instruction over the larger of its operands; `fast`: tensor_copy and tensor_scalar."""
    count = max(_free(t) for t in (dst, *inputs))
    if factor is None:
        factor = max(1, len(inputs))
        if fast:
            factor /= _fast(dst, *inputs)
        elif len(inputs) == 2 and all(t.dtype in dtypes.HALVES for t in (dst, *inputs)):
            factor = 1 if all(t.buffer is SBUF for t in inputs) else 2
    _emit(machine, "vector", count, max(MIN_CYCLES, count * factor * _stretched(dst, *inputs)) / VECTOR_GHZ)


def scalar_engine(machine, dst, data, read_out=False):
    count = max(_free(dst), _free(data))
    cycles = max(MIN_CYCLES, count) + READ_OUT_CYCLES * read_out
    _emit(machine, "scalar", count, cycles / SCALAR_GHZ)


def gpsimd_engine(machine, dst, *inputs):
    """No figure is published: 128 lanes of one element per cycle is a best case."""
    count = max(_free(t) for t in (dst, *inputs))
    _emit(machine, "gpsimd", count, max(MIN_CYCLES, count) / GPSIMD_GHZ)


def dma(machine, dst, src, efficiency=1.0):
    """One DMA: rows over the engines its partitions reach, each row a descriptor or its bytes, whichever is longer."""
    rows, size = max(_pieces(dst), _pieces(src)), max(dst.itemsize, src.itemsize) * src.size
    lanes = [t.shape[0] for t in (dst, src) if t.on_chip]
    # One engine serves about 8 partitions; HBM to HBM pieces are cut for all 16.
    engines = min(DMA_ENGINES, max(1, -(-min(lanes) // 8))) if lanes else DMA_ENGINES
    rows = max(rows, min(engines, -(-size // 512)))
    ns = rows / engines * max(DMA_ROW_NS, size / rows / (DMA_BYTES_PER_NS * efficiency))
    trace = machine.trace
    trace.dma_rows += rows
    trace.gathered_rows += sum(t.shape[0] for t in (dst, src) if t.is_vector)
    trace.hbm_read_bytes += src.size * src.itemsize if src.buffer in HBM else 0
    trace.hbm_write_bytes += dst.size * dst.itemsize if dst.buffer in HBM else 0
    _emit(machine, "dma", src.size, ns)


def _pieces(tensor):
    """Contiguous pieces of an access; a partition always starts a new one, and so does every gathered row."""
    outer = tensor.shape[0] if tensor.on_chip or tensor.is_vector else 1
    inner = slice(1, None) if tensor.on_chip or tensor.is_vector else slice(0, None)
    runs = layout.merged(tensor.shape[inner], tensor.strides[inner])
    contiguous = runs[-1][0] if runs and runs[-1][1] == 1 else 1
    return outer * prod(size for size, _ in runs) // contiguous
