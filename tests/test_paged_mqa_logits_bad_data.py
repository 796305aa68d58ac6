"""Pages and contexts outside their range raise on CPU, naming position and value; stale entries never do."""

from __future__ import annotations

import re

import cases
import pytest
from compare import assert_equal
from strategies_logits import LogitsInputs

PAGES = 3


def call(contexts: list[int], columns: int = 12, **flags: object) -> LogitsInputs:
    """Keys of 1 in 3 pages of 4; every token's table is [2, 0, 1]."""
    cache = cases.index_cache([0x38] * 4 * PAGES, 4)
    return cases.logits(cache, contexts, [[2, 0, 1]] * len(contexts), columns, **flags)


def expect(inputs: LogitsInputs, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"deepinfer::paged_mqa_logits: {message}")):
        inputs.run()


@pytest.mark.parametrize("value", [PAGES, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize(("token", "column", "context"), [(0, 0, 1), (1, 1, 5), (1, 2, 12), (2, 2, 9)])
def test_a_live_page_outside_the_cache_is_named(value, token, column, context):
    contexts = [4, 4, 4]
    contexts[token] = context
    inputs = call(contexts)
    inputs.block_table[token, column] = value
    expect(inputs, f"block_table: expected a page below {PAGES}, got {value} at [{token}, {column}]")


@pytest.mark.parametrize("value", [-1, -(2**31)])
@pytest.mark.parametrize("token", [0, 2])
def test_a_negative_context_is_named(value, token):
    contexts = [4, 4, 4]
    contexts[token] = value
    expect(call(contexts), f"context_lens: expected a length >= 0, got {value} at [{token}, 0]")


def test_one_sequence_reads_the_first_table_up_to_the_longest_context():
    inputs = call([1, 12, 4], one_sequence=True)
    inputs.block_table[:, 2] = 77
    expect(inputs, "block_table: expected a page below 3, got 77 at [0, 2]")


def test_the_first_of_many_bad_pages_is_named_for_any_number_of_threads(threads):
    inputs = call([12] * 9)
    inputs.block_table[3:, 1:] = 50
    inputs.block_table[5:] = -7
    for count in (1, 2, 5):
        threads(count)
        expect(inputs, "block_table: expected a page below 3, got 50 at [3, 1]")


@pytest.mark.parametrize("value", [PAGES, -1, 2**31 - 1])
def test_stale_pages_never_raise(value):
    inputs = call([4, 0, 1, 12], columns=8)
    inputs.block_table[0, 1:] = value
    inputs.block_table[1] = value
    inputs.block_table[2, 1:] = value
    inputs.block_table[3, 2] = value  # inside the context, past the last column asked for
    live = [[1] * 4 + [0] * 4, [0] * 8, [1] + [0] * 7, [1] * 8]
    assert_equal(inputs.run(), [[128.0 if on else -float("inf") for on in row] for row in live])
