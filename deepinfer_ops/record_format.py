"""The quantized record formats as data: what one cached token looks like in bytes.

Every check, packer, decoder and route reads these tables, so a new format costs one entry here and one struct in
``csrc/record_format.h`` (``tests/test_record_format.py`` compares the two offset by offset).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ElementName = Literal["e4m3", "e2m1"]
ScaleName = Literal["ue8m0", "e4m3"]

LATENT_DIM = 512
"""Width of an MLA latent: it is key and value at once."""

INDEX_DIM = 128
"""Width of an indexer key or query."""


@dataclass(frozen=True)
class RecordFormat:
    """How ``dim`` numbers are stored: element bytes, then one scale byte per ``group`` consecutive elements.

    In a main cache the scales follow the elements inside each token's record. In an index page they follow the
    elements of *all* the page's tokens (:meth:`page_scale_offset`).
    """

    name: str
    dim: int
    element: ElementName
    scale: ScaleName
    group: int

    @property
    def elements_per_byte(self) -> int:
        """2 for packed e2m1 (even element in the low nibble), 1 for e4m3."""
        return 2 if self.element == "e2m1" else 1

    @property
    def data_bytes(self) -> int:
        """Element bytes of one token."""
        return self.dim // self.elements_per_byte

    @property
    def scale_bytes(self) -> int:
        """Scale bytes of one token."""
        return self.dim // self.group

    @property
    def bytes(self) -> int:
        """All bytes of one token: what identifies the format in a tensor's last dimension."""
        return self.data_bytes + self.scale_bytes

    def page_scale_offset(self, page: int) -> int:
        """Byte where the scales begin in an index page of ``page`` tokens."""
        return page * self.data_bytes


KV_FORMATS = {
    fmt.bytes: fmt
    for fmt in (
        RecordFormat("fp8", LATENT_DIM, "e4m3", "ue8m0", 32),
        RecordFormat("fp4", LATENT_DIM, "e2m1", "e4m3", 16),
    )
}
"""Formats of a main KV cache, by record size in bytes (528 and 288)."""

INDEX_FORMATS = {
    fmt.bytes: fmt
    for fmt in (
        RecordFormat("fp8", INDEX_DIM, "e4m3", "ue8m0", 32),
        RecordFormat("fp4", INDEX_DIM, "e2m1", "ue8m0", 32),
    )
}
"""Formats of an index K cache, by token size in bytes (132 and 68)."""


def by_name(formats: dict[int, RecordFormat], name: str) -> RecordFormat:
    """The format called ``name``; raises ``ValueError`` that lists the known ones."""
    for fmt in formats.values():
        if fmt.name == name:
            return fmt
    known = ", ".join(sorted(fmt.name for fmt in formats.values()))
    raise ValueError(f"unknown record format {name!r}: expected one of {known}")
