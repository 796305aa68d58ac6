"""The state of one running kernel: live memory, engine registers, device loops, and the trace being filled.

Exactly one machine runs at a time in a thread; `current()` finds it, and every instruction reports to it.
"""

import threading
import weakref

import numpy as np

from .enums import PARTITIONS, PSUM, PSUM_BANK_BYTES, PSUM_BANKS, SBUF, SBUF_BYTES
from .errors import NkiValidationError

_local = threading.local()


def current():
    machine = getattr(_local, "machine", None)
    if machine is None:
        raise NkiValidationError("nki: instructions and tensors exist only inside a kernel run by nki.simulate")
    return machine


def running():
    return getattr(_local, "machine", None) is not None


class Machine:
    def __init__(self, trace):
        self.trace = trace
        self.instruction = "nki"  # the prefix of error messages
        self.live = {SBUF: 0, PSUM: 0}  # bytes per partition; whole banks
        self.storages = weakref.WeakSet()
        self.loops = []  # one token for each open trip of a device loop
        self.program = True  # False while a device loop repeats code that is already counted
        self.script = None  # instructions of the current trip, compared from trip to trip
        self.ordered = 0  # open nl.no_reorder() blocks
        self.identities = {}
        # Registers keep their values between instructions: the reduce registers of ScalarE (fp32 sums), and the
        # accumulators VectorE shares between its reducing instructions. None until something resets them.
        self.scalar_sums = None
        self.vector_accumulator = None

    def __enter__(self):
        if running():
            raise NkiValidationError("nki.simulate: a kernel is already running (nested @nki.jit kernels are refused)")
        _local.machine = self
        self._quiet = np.errstate(all="ignore")
        self._quiet.__enter__()
        return self

    def __exit__(self, *exc):
        self._quiet.__exit__(*exc)
        _local.machine = None

    def fail(self, message):
        raise NkiValidationError(f"{self.instruction}: {message}")

    def occupy(self, storage):
        """Count a new on-chip tensor against the capacity; it stays counted while Python holds a reference."""
        region, size = storage.buffer, storage.partition_bytes
        if region is PSUM:
            size = -(-size // PSUM_BANK_BYTES) * PSUM_BANK_BYTES
        limit = SBUF_BYTES if region is SBUF else PSUM_BANKS * PSUM_BANK_BYTES
        if self.live[region] + size > limit:
            holders = sorted((s.partition_bytes, s.name) for s in self.storages if s.buffer is region)
            listed = ", ".join(f"{name} {held}" for held, name in reversed(holders[-8:]))
            unit = "bytes" if region is SBUF else f"bytes ({PSUM_BANKS} banks of {PSUM_BANK_BYTES})"
            self.fail(
                f"{storage.name}: {region.value} capacity per partition: {self.live[region]} bytes live and {size} "
                f"more exceed {limit} {unit}; live: {listed}"
            )
        self.live[region] += size
        self.trace.peak(region, self.live[region])
        self.storages.add(storage)
        weakref.finalize(storage, _release, self.live, region, size)

    def partitions_of(self, values):
        """fp32 registers of all lanes with `values` in the first ones."""
        lanes = np.full((PARTITIONS, 1), np.nan, np.float32)
        lanes[: len(values)] = values
        return lanes


def _release(live, region, size):
    live[region] -= size
