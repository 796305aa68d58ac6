"""The contents of nki.isa: the instructions of Trn2 that this simulator knows, and those it refuses as trn3 only."""

from .checks import NkiInstruction
from .enums import dge_mode, engine, matmul_perf_mode, nc_version, oob_mode, reduce_cmd
from .errors import NkiValidationError
from .isa_dma import dma_compute, dma_copy, dma_transpose
from .isa_gpsimd import affine_select, iota, nc_n_gather, tensor_partition_reduce
from .isa_registers import register_alloc, register_load, register_move, register_store
from .isa_scalar import activation, activation_reduce
from .isa_search import max8, nc_find_index8, nc_match_replace8, nc_stream_shuffle
from .isa_select import (
    range_select,
    select_reduce,
    tensor_copy_predicated,
    tensor_scalar_cumulative,
    tensor_scalar_reduce,
    tensor_tensor_scan,
)
from .isa_tensor import nc_matmul, nc_transpose
from .isa_vector import (
    memset,
    reciprocal,
    scalar_tensor_tensor,
    tensor_copy,
    tensor_reduce,
    tensor_scalar,
    tensor_tensor,
)
from .machine import current
from .registers import VirtualRegister

tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown


def get_nc_version():
    return nc_version.gen3


def get_nc_sub_version():
    return 0


def _refused(name, reason):
    def refuse(*args, **kwargs):
        machine = current()
        machine.instruction = f"nisa.{name}"
        machine.fail(reason)

    refuse.__name__ = name
    return refuse


_TRN3 = "available on trn3 (NeuronCore-v4) only"
activate2 = _refused("activate2", _TRN3)
exponential = _refused("exponential", _TRN3)
nc_matmul_mx = _refused("nc_matmul_mx", _TRN3)
quantize_mx = _refused("quantize_mx", _TRN3)
rand2 = _refused("rand2", _TRN3)


def __getattr__(name):
    raise AttributeError(f"nisa.{name}: not part of this simulator (documented names it lacks: see nki_sim)")


__all__ = [
    "NkiInstruction",
    "NkiValidationError",
    "VirtualRegister",
    "activate2",
    "activation",
    "activation_reduce",
    "affine_select",
    "dge_mode",
    "dma_compute",
    "dma_copy",
    "dma_transpose",
    "engine",
    "exponential",
    "get_nc_sub_version",
    "get_nc_version",
    "gpsimd_engine",
    "iota",
    "matmul_perf_mode",
    "max8",
    "memset",
    "nc_find_index8",
    "nc_match_replace8",
    "nc_matmul",
    "nc_matmul_mx",
    "nc_n_gather",
    "nc_stream_shuffle",
    "nc_transpose",
    "nc_version",
    "oob_mode",
    "quantize_mx",
    "rand2",
    "range_select",
    "reciprocal",
    "reduce_cmd",
    "register_alloc",
    "register_load",
    "register_move",
    "register_store",
    "scalar_engine",
    "scalar_tensor_tensor",
    "select_reduce",
    "tensor_copy",
    "tensor_copy_predicated",
    "tensor_engine",
    "tensor_partition_reduce",
    "tensor_reduce",
    "tensor_scalar",
    "tensor_scalar_cumulative",
    "tensor_scalar_reduce",
    "tensor_tensor",
    "tensor_tensor_scan",
    "unknown_engine",
    "vector_engine",
]
