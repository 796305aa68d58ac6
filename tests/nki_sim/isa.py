"""The contents of nki.isa: the instructions of Trn2 that this simulator knows, and those it refuses as trn3 only."""

from .enums import engine, nc_version
from .machine import current

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


for _name in ("activate2", "exponential", "nc_matmul_mx", "quantize_mx", "rand2"):
    globals()[_name] = _refused(_name, "available on trn3 (NeuronCore-v4) only")
