"""What kernels of several files share."""

import nki.isa as nisa
import nki.language as nl


def position(row, tile, tiles):
    """row * tiles + tile, both registers of nested device loops, as a 1 x 1 index.

    A view takes one run-time index, and registers know no arithmetic, so the two meet in SBUF. VectorE computes in
    fp32: exact below 2^24, which is why callers count in tiles of 128 and not in elements.
    """
    row_number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(row_number, row)
    tile_number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.register_store(tile_number, tile)
    where = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=where, data=row_number, op0=nl.multiply, operand0=float(tiles), op1=nl.add, operand1=tile_number
    )
    return where
