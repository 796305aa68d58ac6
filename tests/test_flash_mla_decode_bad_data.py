"""Indices and lengths outside their range raise on CPU, naming position and value; what is never read never raises."""

from __future__ import annotations

import re

import cases
import pytest
import torch
from compare import assert_equal
from strategies_decode import DecodeInputs

SLOTS = 8


def call(scope: str, b: int = 2, s_q: int = 2, topk: int = 5) -> DecodeInputs:
    """A right call whose main and extra scopes have 8 slots each; ``scope`` names the one to spoil."""
    cache = cases.kv_cache(dict.fromkeys(range(SLOTS), 2.0), SLOTS)
    lists = torch.arange(b * s_q * topk, dtype=torch.int32).reshape(b, s_q, topk) % SLOTS
    lengths = torch.full((b,), topk, dtype=torch.int32)
    inputs = cases.decode(cache, lists, topk_length=lengths)
    if scope == "extra_":
        inputs = inputs._replace(extra_k_cache=cache, extra_indices=lists.clone(), extra_topk_length=lengths.clone())
    return inputs


def expect(inputs: DecodeInputs, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"deepinfer::flash_mla_decode: {message}")):
        inputs.run()


@pytest.mark.parametrize("scope", ["", "extra_"])
@pytest.mark.parametrize("value", [SLOTS, SLOTS + 1, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", [(0, 0, 0), (0, 1, 3), (1, 1, 4)])
def test_an_index_outside_the_cache_is_named(scope, value, at):
    inputs = call(scope)
    getattr(inputs, f"{scope}indices")[at] = value
    place = ", ".join(map(str, at))
    expect(inputs, f"{scope}indices: expected -1 or a slot below {SLOTS}, got {value} at [{place}]")


@pytest.mark.parametrize("scope", ["", "extra_"])
@pytest.mark.parametrize("value", [6, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("at", [0, 1])
def test_a_length_outside_the_list_is_named(scope, value, at):
    inputs = call(scope)
    getattr(inputs, f"{scope}topk_length")[at] = value
    expect(inputs, f"{scope}topk_length: expected a length in 0..5, got {value} at [{at}]")


def test_the_first_of_many_bad_indices_is_named_for_any_number_of_threads(threads):
    inputs = call("", b=6, s_q=3, topk=200)
    inputs.indices[1, 2, 77:] = 99
    inputs.indices[2:] = -5
    for count in (1, 2, 5):
        threads(count)
        expect(inputs, f"indices: expected -1 or a slot below {SLOTS}, got 99 at [1, 2, 77]")


def test_bad_indices_are_found_in_strided_lists():
    inputs = call("")
    wide = torch.full((2, 2, 11), 2**31 - 1, dtype=torch.int32)
    wide[:, :, 1::2] = inputs.indices
    assert_equal(inputs._replace(indices=wide[:, :, 1::2]).run(), 2.0)
    wide[1, 0, 5] = 8
    expect(inputs._replace(indices=wide[:, :, 1::2]), "indices: expected -1 or a slot below 8, got 8 at [1, 0, 2]")


@pytest.mark.parametrize("value", [SLOTS, -2, 2**31 - 1])
def test_what_stands_beyond_the_length_never_raises(value):
    inputs = call("extra_")
    for scope in ("", "extra_"):
        getattr(inputs, f"{scope}topk_length").copy_(cases.int32([3, 0]))
        getattr(inputs, f"{scope}indices")[0, :, 3:] = value
        getattr(inputs, f"{scope}indices")[1] = value
    assert_equal(inputs.run(), [[[[2.0]]], [[[0.0]]]])


def test_the_operator_works_after_an_error():
    inputs = call("")
    bad = inputs._replace(indices=torch.full_like(inputs.indices, 77))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            bad.run()
        assert_equal(inputs.run(), 2.0)
