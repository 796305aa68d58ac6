"""Small problems written by hand, with exact numbers for answers.

Keys are constant (all elements decode to one number), queries are 0 or constant. With q = 0 every logit is 0, so the
attention is ``sum(keys) / (n + exp(sink))``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pack
import torch
from pack import INDEX_FORMAT, KV_FORMAT, constant_record
from strategies_decode import DecodeInputs
from strategies_logits import LogitsInputs

E4M3 = {0.0: 0x00, 1.0: 0x38, 2.0: 0x40, 3.0: 0x44, 4.0: 0x48, 6.0: 0x4C, 96.0: 0x6C, 104.0: 0x6D, 448.0: 0x7E}
"""Element bytes of the constants the cases use (scale 1); -1.0 is 0xB8."""


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kv_cache(
    keys: Mapping[int, float | np.ndarray],
    slots: int,
    page: int = 4,
    fmt: str = "fp8",
    fill: int = 0xFF,
    **where: object,
) -> torch.Tensor:
    """A main cache: ``keys`` maps slots to a constant (fp8 only) or to a whole record; other records are ``fill``."""
    rows = np.full((slots, KV_FORMAT[fmt].bytes), fill, dtype=np.uint8)
    for slot, key in keys.items():
        rows[slot] = key if isinstance(key, np.ndarray) else constant_record(KV_FORMAT[fmt], E4M3[key])
    return pack.cache_of(rows, page, **where)


def decode(k_cache: torch.Tensor, indices: object, *, q: float = 0.0, h_q: int = 2, **others: object) -> DecodeInputs:
    """A decode call with a constant query; ``indices`` nested lists ``[b][s_q][topk]`` or a tensor."""
    lists = indices if isinstance(indices, torch.Tensor) else int32(indices)
    query = torch.full((*lists.shape[:2], h_q, 512), q, dtype=torch.bfloat16)
    return DecodeInputs(query, k_cache, lists, **others)


def index_cache(
    data: object, page_kv: int, fmt: str = "fp8", scales: object = 127, pages: int | None = None, **where: object
) -> torch.Tensor:
    """Index pages of constant tokens: ``data`` one element byte per token, ``scales`` one byte per token or for all.

    ``pages`` beyond the tokens' own hold 0xFF.
    """
    width = INDEX_FORMAT[fmt].data_bytes
    tokens = np.asarray(data, dtype=np.uint8)
    elements = np.repeat(tokens[:, None], width, axis=1)
    exponents = np.repeat(np.broadcast_to(np.asarray(scales, dtype=np.uint8), tokens.shape)[:, None], 4, axis=1)
    missing = 0 if pages is None else pages * page_kv - len(tokens)
    elements, exponents = (np.pad(a, ((0, missing), (0, 0)), constant_values=0xFF) for a in (elements, exponents))
    return pack.index_cache_of(elements, exponents, page_kv, **where)


def logits(
    kv: torch.Tensor,
    contexts: Sequence[int],
    table: object,
    max_context_len: int,
    *,
    heads: int = 1,
    q: int = 0x38,
    one_sequence: bool = False,
) -> LogitsInputs:
    """A scoring call whose fp8 queries are all the element byte ``q``, scales and weights 1."""
    tokens = len(contexts)
    data = torch.full((tokens, 1, heads, 128), q, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return LogitsInputs(
        q_data=data,
        q_sf=torch.full((tokens, 1, heads, 4), 127, dtype=torch.uint8),
        kv_cache=kv,
        weights=torch.ones(tokens, heads, dtype=torch.bfloat16),
        context_lens=int32(contexts).reshape(-1, 1),
        block_table=int32(table).reshape(tokens, -1) if tokens else int32([]).reshape(0, 1),
        max_context_len=max_context_len,
        one_sequence=one_sequence,
    )
