"""Settings of the Neuron composition: typed, read from the environment once, overridable in code.

``config.current()`` is the frozen record in force; ``with config.override(prefill_bucket=512): ...`` replaces fields of
it for the whole process. Nothing here changes what an operator computes, only how.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.compiler.config as compiler_config

ENV_PREFIX = "DEEPINFER_NEURON_"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One field per variable ``DEEPINFER_NEURON_<FIELD IN CAPITALS>``; switches are 0 or 1 there."""

    nki_attn: bool = True
    """Attention by the NKI kernels; off: plain torch operators on the device."""
    prefill_bucket: int = 0
    """Row count that means "one request's prompt chunk whose long lists are prefixes of the longest"; 0: none does."""
    fast_e4m3: bool = True
    """Decode by hardware conversion and float arithmetic; off: by integer operations."""
    attn_table_slots: int = 32768
    """Largest number of slots that is decoded as one table (1 KiB of bf16 each: 32 MiB)."""
    swa_subblock: bool = True
    """Read a long sliding-window ring as blocks of 64 slots."""
    dense_attn_max_kv: int = 4096
    """Largest table attended to by dense matmuls instead of gathers."""
    dense_attn_min_rows: int = 65
    """Fewest padded rows for which dense matmuls over the table pay."""
    prefill_dense: bool = True
    """Take the dense chunk route where ``chunk_*`` is given."""
    prefill_dense_check: bool = False
    """Also run the gathered route there, log the largest difference and return the gathered result."""


DEFAULTS = Settings()
_FIELDS = {field.name: type(getattr(DEFAULTS, field.name)) for field in dataclasses.fields(Settings)}

fingerprint = ""
"""Names the settings in force; what guards of compiled graphs compare (neuron/settings_guard.py). Not to be written."""

_active: Settings | None = None


def current() -> Settings:
    """The settings in force. The first call reads the environment; a bad variable raises ``ValueError``."""
    return _activate(_from_environment()) if _active is None else _active


@contextlib.contextmanager
def override(**changes: bool | int) -> Iterator[Settings]:
    """Replace settings inside a ``with`` block, for all threads; the former ones return at its end.

    A graph compiled under other settings is compiled again, not reused. Inside a compiled function an override could
    not reach the trace, so it raises there.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("deepinfer_ops.config.override: expected a call outside compiled code, got one inside")
    before = current()
    checked: dict[str, Any] = {name: _checked(name, value) for name, value in changes.items()}
    _activate(dataclasses.replace(before, **checked))
    try:
        yield current()
    finally:
        _activate(before)


def _activate(settings: Settings) -> Settings:
    global _active, fingerprint
    changed = [name for name in _FIELDS if getattr(settings, name) != getattr(DEFAULTS, name)]
    text = ",".join(f"{name}={int(getattr(settings, name))}" for name in changed)
    # Dynamo's guards do not cover AOTAutograd's on-disk cache, whose key knows the operator call but not its route.
    others = compiler_config.cache_key_tag.removesuffix(_cache_tag(fingerprint))
    compiler_config.cache_key_tag = others + _cache_tag(text)
    _active, fingerprint = settings, text
    return settings


def _cache_tag(text: str) -> str:
    return f";deepinfer:{text}" if text else ""


def _from_environment() -> Settings:
    values: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        variable = ENV_PREFIX + name.upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            number = int(text)
        except ValueError:
            number = -1
        if number < 0 or (kind is bool and number > 1):
            raise ValueError(f"{variable}: expected {_expected(kind)}, got {text!r}")
        values[name] = kind(number)
    return Settings(**values)


def _checked(name: str, value: object) -> bool | int:
    """``value`` as the field's type; raises ``TypeError`` for an unknown name, ``ValueError`` for a bad value."""
    where = f"deepinfer_ops.config.override: {name}"
    if name not in _FIELDS:
        raise TypeError(f"{where}: expected one of {', '.join(_FIELDS)}")
    kind = _FIELDS[name]
    if kind is bool and value in (False, True):
        return bool(value)
    if kind is int and type(value) is int and value >= 0:
        return value
    raise ValueError(f"{where}: expected {_expected(kind)}, got {value!r}")


def _expected(kind: type) -> str:
    return "0 or 1" if kind is bool else "an integer >= 0"
