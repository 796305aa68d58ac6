"""What a route decided, and what it costs: small frozen records that compositions execute and ``explain`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..record_format import INDEX_DIM, LATENT_DIM, RecordFormat
from .shapes import CacheShape

BF16_ROW_BYTES = 2 * LATENT_DIM


class Read(Enum):
    """How a scope's records leave their cache."""

    RECORDS = "each row's records gathered"
    WHOLE = "whole cache decoded in place"
    USED = "used blocks gathered"
    SHARED = "longest list gathered once"
    RING = "one ring gathered"
    LISTED = "chunk blocks gathered"


@dataclass(frozen=True)
class ScopePlan:
    """One scope. ``cache`` is the cache as it is read (sub-blocks show here); ``blocks`` counts gathered blocks with
    their padding, 0 where records are gathered or none is; ``decoded`` counts decoded records.
    """

    name: str
    cache: CacheShape
    topk: int
    read: Read
    blocks: int
    decoded: int

    @property
    def bytes_gathered(self) -> int:
        if self.read is Read.WHOLE:
            return 0
        return (self.blocks * self.cache.page if self.blocks else self.decoded) * self.cache.fmt.bytes

    def __str__(self) -> str:
        blocks = f", {self.blocks} of {self.cache.blocks} blocks" if self.blocks else ""
        copied = ", cache copied first" if self.cache.must_copy and self.read is not Read.WHOLE else ""
        rows = f" in rows of {self.cache.row_bytes} bytes" if self.read in (Read.RECORDS, Read.SHARED) else ""
        cache = f"{self.cache.fmt.name}, page {self.cache.page}"
        return f"{cache}: {self.read.value}{blocks}, {self.decoded} records{rows}{copied}"


@dataclass(frozen=True)
class Plan:
    """What all plans tell. ``kernel`` is None where plain torch operators compute; ``reason`` says why this route."""

    route: str
    reason: str
    kernel: str | None
    kernel_calls: int

    @property
    def bytes_gathered(self) -> int:
        """Bytes that gathers move out of the caches."""
        return 0

    @property
    def kernel_bytes_gathered(self) -> int:
        """Bytes that a kernel gathers by itself."""
        return 0

    @property
    def decoded_elements(self) -> int:
        return 0

    @property
    def matmul_flops(self) -> int:
        return 0

    def sizes(self) -> list[tuple[str, object]]:
        """Further lines of :meth:`__str__`."""
        return []

    def __str__(self) -> str:
        kernel = f"{self.kernel} x {self.kernel_calls}" if self.kernel else "none (plain torch operators)"
        lines: list[tuple[str, object]] = [
            ("route", self.route),
            ("why", self.reason),
            ("kernel", kernel),
            *self.sizes(),
        ]
        lines += [
            ("bytes gathered", f"{self.bytes_gathered:,}"),
            ("gathered in kernel", f"{self.kernel_bytes_gathered:,}"),
            ("decoded elements", f"{self.decoded_elements:,}"),
            ("matmul FLOPs", f"{self.matmul_flops:,}"),
        ]
        return "\n".join(f"{label:<20}{value}" for label, value in lines)


@dataclass(frozen=True)
class DecodePlan(Plan):
    """A route of ``flash_mla_decode``. ``keys`` is how many key columns every row meets, padding included;
    ``table_rows`` the height of the decoded table, 0 without one; ``checked`` the gathered plan of the CHECK mode.
    """

    rows: int
    padded_rows: int
    heads: int
    keys: int
    scopes: tuple[ScopePlan, ...]
    table_rows: int = 0
    checked: DecodePlan | None = None

    @property
    def bytes_gathered(self) -> int:
        return sum(scope.bytes_gathered for scope in self.scopes)

    @property
    def kernel_bytes_gathered(self) -> int:
        in_kernel = self.kernel == "gathered_attn_idx"
        return self.padded_rows * self.keys * BF16_ROW_BYTES if in_kernel else 0

    @property
    def decoded_elements(self) -> int:
        return sum(scope.decoded for scope in self.scopes) * LATENT_DIM

    @property
    def matmul_flops(self) -> int:
        return 2 * 2 * self.padded_rows * self.heads * self.keys * LATENT_DIM

    def sizes(self) -> list[tuple[str, object]]:
        table = [("table rows", self.table_rows)] if self.table_rows else []
        checked = [("checked against", self.checked.route)] if self.checked else []
        return [
            ("rows", f"{self.rows}, padded to {self.padded_rows}, of {self.heads} heads"),
            ("keys of a row", self.keys),
            *table,
            *((f"{scope.name} cache", scope) for scope in self.scopes),
            *checked,
        ]


@dataclass(frozen=True)
class LogitsPlan(Plan):
    """A route of ``paged_mqa_logits``. ``pages`` of each of ``tables`` block tables are read, ``positions`` scored of
    them (a multiple of 128), for ``kernel_tokens`` tokens in a call.
    """

    query: RecordFormat
    cache: CacheShape
    tokens: int
    heads: int
    tables: int
    pages: int
    positions: int
    kernel_tokens: int

    @property
    def bytes_gathered(self) -> int:
        return self.tables * self.pages * self.cache.page * self.cache.fmt.bytes

    @property
    def decoded_elements(self) -> int:
        return self.tables * self.pages * self.cache.page * INDEX_DIM

    @property
    def matmul_flops(self) -> int:
        calls = self.tokens if self.kernel_tokens == 1 else 1
        return 2 * calls * self.kernel_tokens * self.heads * self.positions * (INDEX_DIM + 1)

    def sizes(self) -> list[tuple[str, object]]:
        return [
            ("tokens", f"{self.tokens} of {self.heads} heads, {self.kernel_tokens} in a call"),
            ("pages", f"{self.tables} x {self.pages} of {self.cache.page} tokens, {self.cache.fmt.name}"),
            ("positions", self.positions),
        ]


@dataclass(frozen=True)
class PoolPlan(Plan):
    """A route of ``softmax_pool``."""

    n: int
    r: int
    d: int

    def sizes(self) -> list[tuple[str, object]]:
        return [("rows", f"{self.n} of {self.r} x {self.d}")]
