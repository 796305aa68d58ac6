"""The enumerations of nki.isa, and the hardware constants of Trn2 (NeuronCore-v3)."""

from enum import Enum

from .errors import NkiValidationError

PARTITIONS = 128
PSUM_BANKS = 8
PSUM_BANK_BYTES = 2048
STATIONARY_MAX = 128
MOVING_MAX = 512
# Per partition: 224 KiB less the scratch of dynamic DMA (16 KiB) and what the compiler keeps. nki-library subtracts
# 8 + 256 in one file and 8 + 520 in another; the smaller result is used.
SBUF_BYTES = 224 * 1024 - 16384 - 8 - 520


class MemoryRegion(Enum):
    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
ON_CHIP = (SBUF, PSUM)
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


class engine(Enum):
    tensor = 1
    vector = 5
    scalar = 2
    gpsimd = 3
    dma = 4
    sync = 6
    unknown = 0


class reduce_cmd(Enum):
    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):
    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):
    error = 0
    skip = 1


class matmul_perf_mode(Enum):
    none = "none"
    double_row = "double_row"


class nc_version(Enum):
    gen2 = 2
    gen3 = 3
    gen4 = 4


class TileSize:
    """nl.tile_size: attributes as documented, values of Trn2."""

    pmax = PARTITIONS
    psum_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax = PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = PSUM_BANK_BYTES
    psum_num_banks = PSUM_BANKS
    gemm_stationary_fmax = STATIONARY_MAX
    gemm_moving_fmax = MOVING_MAX
    bn_stats_fmax = 512
    sbuf_fmax = SBUF_BYTES // 4
    sbuf_fmax_bytes = SBUF_BYTES
    total_available_sbuf_size = SBUF_BYTES
    sbuf_size_bytes = PARTITIONS * 224 * 1024


def member(value, kind, what):
    """`value` if it is a member of enumeration `kind`; integers and strings are refused (rule since NKI 0.3)."""
    if not isinstance(value, kind):
        raise NkiValidationError(f"{what}: expected a member of nisa.{kind.__name__}, got {value!r}")
    return value
