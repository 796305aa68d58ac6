"""What a route may look at: sizes, strides, dtypes and hints of one call, as plain numbers.

Reading a size here turns a symbolic one into a number, which specializes a dynamic graph on it: the device's programs
have static shapes (SPEC section 7, rule 7).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..flash_mla_decode import DecodeFormats
from ..paged_mqa_logits import LogitsFormats
from ..record_format import RecordFormat

INT32_MAX = 2**31 - 1

MIN_ROW_BYTES = 4
"""Records on a finer grid than this are copied before they are gathered: per-byte gathers crash the compiler."""


def power_of_two(count: int) -> int:
    """The smallest power of two >= ``count`` (>= 1). Other row and block counts fail on the device, or worse: 6 rows
    fail ISA validation on one path and give wrong attention on another.
    """
    return 1 << max(count - 1, 0).bit_length()


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple >= ``count``."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class CacheShape:
    """A paged cache in bytes. ``token_stride`` leads to a block's next record, ``offset`` to block 0 in the storage."""

    fmt: RecordFormat
    blocks: int
    page: int
    block_stride: int
    token_stride: int
    offset: int

    @classmethod
    def of(cls, cache: torch.Tensor, fmt: RecordFormat) -> CacheShape:
        blocks, page = int(cache.shape[0]), int(cache.shape[1])
        token = int(cache.stride(1)) if page > 1 else fmt.bytes
        block = int(cache.stride(0)) if blocks > 1 else page * token
        return cls(fmt, blocks, page, block, token, int(cache.storage_offset()))

    @property
    def slots(self) -> int:
        return self.blocks * self.page

    @property
    def last_slot(self) -> int:
        """The largest slot an int32 index can name, -1 without any."""
        return min(self.slots - 1, INT32_MAX)

    @property
    def packed(self) -> bool:
        """Records of a block are adjacent."""
        return self.token_stride == self.fmt.bytes

    @property
    def even(self) -> bool:
        """Records of all blocks are equally far apart, so blocks can be cut elsewhere without moving a slot."""
        return self.block_stride == self.page * self.token_stride

    @property
    def grid(self) -> int:
        """g of rule 2: the largest row of bytes that tiles records, strides and base alike."""
        return math.gcd(self.fmt.bytes, self.token_stride, self.offset, self.block_stride)

    @property
    def must_copy(self) -> bool:
        return self.grid < MIN_ROW_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes that one gathered row moves; a copied cache has its own grid."""
        return self.fmt.bytes if self.must_copy else self.grid

    def in_blocks_of(self, page: int) -> CacheShape:
        """The same slots in blocks of ``page``; only for ``even`` caches whose page is a multiple of it."""
        blocks = self.blocks * (self.page // page)
        return replace(self, blocks=blocks, page=page, block_stride=page * self.token_stride)


@dataclass(frozen=True)
class ScopeShape:
    """One cache and the width of its index lists."""

    name: str
    cache: CacheShape
    topk: int


@dataclass(frozen=True)
class DecodeShape:
    """One call of ``flash_mla_decode``; ``scopes``: main, then extra. ``chunk_blocks`` is None without ``chunk_*``."""

    b: int
    s_q: int
    heads: int
    scopes: tuple[ScopeShape, ...]
    max_requests: int | None = None
    max_context: int | None = None
    chunk_blocks: int | None = None

    @property
    def rows(self) -> int:
        return self.b * self.s_q

    @classmethod
    def of(
        cls,
        formats: DecodeFormats,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        extra_k_cache: torch.Tensor | None,
        extra_indices: torch.Tensor | None,
        max_requests: int | torch.SymInt | None,
        max_context: int | torch.SymInt | None,
        chunk_blocks: int | torch.SymInt | None,
    ) -> DecodeShape:
        scopes = [ScopeShape("main", CacheShape.of(k_cache, formats.main), int(indices.shape[2]))]
        if extra_k_cache is not None and extra_indices is not None and formats.extra is not None:
            extra = CacheShape.of(extra_k_cache, formats.extra)
            scopes.append(ScopeShape("extra", extra, int(extra_indices.shape[2])))
        b, s_q, heads = (int(size) for size in q.shape[:3])
        hints = (None if hint is None else int(hint) for hint in (max_requests, max_context, chunk_blocks))
        return cls(b, s_q, heads, tuple(scopes), *hints)


@dataclass(frozen=True)
class LogitsShape:
    """One call of ``paged_mqa_logits``; ``width`` is that of the block table."""

    query: RecordFormat
    cache: CacheShape
    tokens: int
    heads: int
    width: int
    max_context_len: int
    one_sequence: bool

    @classmethod
    def of(
        cls,
        formats: LogitsFormats,
        q_data: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        max_context_len: int | torch.SymInt,
        one_sequence: bool,
    ) -> LogitsShape:
        tokens, heads = int(q_data.shape[0]), int(q_data.shape[2])
        cache = CacheShape.of(kv_cache, formats.keys)
        return cls(
            formats.query, cache, tokens, heads, int(block_table.shape[1]), int(max_context_len), bool(one_sequence)
        )


@dataclass(frozen=True)
class PoolShape:
    """One call of ``softmax_pool``."""

    n: int
    r: int
    d: int

    @classmethod
    def of(cls, score_rows: torch.Tensor) -> PoolShape:
        return cls(*(int(size) for size in score_rows.shape))
