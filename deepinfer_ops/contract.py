"""The one vocabulary of input checks, and the one form of their messages.

A contract is read by fake functions (symbolic sizes) and by the Neuron composition. ``csrc/checks.h`` speaks the same
vocabulary next to the CPU kernels; ``tests/test_contract.py`` demands the same verdict and the same words from all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from .record_format import RecordFormat

Size: TypeAlias = int | torch.SymInt
Dim: TypeAlias = int | str
"""A literal size, or the name of a size: bound where it first appears, compared from then on."""


class Checker:
    """Checks the arguments of one call of one operator.

    Every failure raises ``RuntimeError("deepinfer::<op>: <argument>: expected <what>, got <what>")``, as the compiled
    operator does.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._sizes: dict[str, Size] = {}
        self._device: torch.device | None = None

    def require(self, ok: bool | torch.SymBool, argument: str, expected: str, got: Callable[[], object]) -> None:
        """Raise unless ``ok``. ``got`` is only called to build the message."""
        torch._check(ok, lambda: f"deepinfer::{self._op}: {argument}: expected {expected}, got {got()}")

    def no_grad(self, **tensors: torch.Tensor | None) -> None:
        """There is no backward: refuse to return a result that silently has no gradient."""
        for argument, tensor in tensors.items():
            wanted = tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
            self.require(
                not wanted,
                argument,
                "a tensor that does not require grad (there is no backward)",
                lambda: "requires_grad=True",
            )

    def tensor(self, argument: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[Dim]) -> None:
        """Device (that of the first tensor checked), dtype and shape, in this order."""
        self._device = self._device or tensor.device
        self.require(tensor.device == self._device, argument, f"a tensor on {self._device}", lambda: tensor.device)
        self.require(
            tensor.dtype in dtypes,
            argument,
            f"dtype {either([_dtype_name(d) for d in dtypes])}",
            lambda: _dtype_name(tensor.dtype),
        )
        wanted = [self._sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape]
        expected = f"shape {_list_text(wanted)}"
        self.require(tensor.dim() == len(wanted), argument, expected, lambda: _list_text(tensor.shape))
        for dim, size in zip(wanted, tensor.shape, strict=True):
            if isinstance(dim, str):
                self._sizes[dim] = size
            else:
                self.require(size == dim, argument, expected, lambda: _list_text(tensor.shape))

    def size(self, name: str) -> Size:
        """A size bound by :meth:`tensor`."""
        return self._sizes[name]

    def at_least(self, argument: str, name: str, value: Size, minimum: Size) -> None:
        """``value`` (called ``name`` in the message) reaches ``minimum``."""
        self.require(value >= minimum, argument, f"{name} >= {minimum}", lambda: value)

    def together(self, argument: str, value: object, partner: str, partner_value: object) -> None:
        """``argument`` comes exactly when ``partner`` does."""
        if partner_value is None:
            self.require(value is None, argument, f"None without {partner}", lambda: "a value")
        else:
            self.require(value is not None, argument, f"a value with {partner}", lambda: None)


def paged_cache(
    check: Checker,
    argument: str,
    cache: torch.Tensor,
    formats: dict[int, RecordFormat],
    names: tuple[str, str, str],
    *,
    planar: bool,
) -> RecordFormat:
    """The format of a paged uint8 cache of shape ``[blocks, page, 1, bytes]``, its dims called ``names`` + 1.

    ``planar``: the page is one run of bytes (index caches), so stride(1) is exactly ``bytes``; otherwise a record may
    be followed by padding. Sizes of 1 have no stride worth checking.
    """
    blocks, page, size = names
    check.tensor(argument, cache, [torch.uint8], [blocks, page, 1, size])
    record = int(cache.shape[3])  # a format's size is never dynamic
    known = either([f"{fmt.bytes} ({fmt.name})" for fmt in formats.values()])
    check.require(record in formats, argument, f"{size} {known}", lambda: record)
    check.at_least(argument, page, cache.shape[1], 1)
    check.require(cache.stride(3) == 1, argument, "stride(3) 1", lambda: cache.stride(3))
    token = record
    if cache.shape[1] > 1:
        token = cache.stride(1)
        adjacent = token == record if planar else token >= record
        wanted = f"stride(1) {'' if planar else '>= '}{record}"
        check.require(adjacent, argument, wanted, lambda: token)
    if cache.shape[0] > 1:
        # Blocks follow each other, or (records of many blocks in turn) tokens do.
        block = cache.stride(0)
        apart = block >= (cache.shape[1] - 1) * token + record or (
            block >= record and token >= (cache.shape[0] - 1) * block + record
        )
        wanted = "blocks that do not overlap"
        check.require(apart, argument, wanted, lambda: f"stride(0) {block}, stride(1) {token}")
    return formats[record]


def either(words: Sequence[str]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _list_text(sizes: Sequence[object]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"
