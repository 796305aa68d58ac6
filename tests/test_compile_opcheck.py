"""``torch.library.opcheck`` on every good call: schema, autograd registration, fake tensors, AOT dispatch."""

from __future__ import annotations

import pytest
import torch
from sample_calls import CALLS, Call

EVERY_CHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", CALLS)
def test_opcheck_passes(name):
    call = CALLS[name]()
    # test_schema compares arguments before and after with arithmetic that PyTorch lacks for float8; the test below
    # compares bytes instead.
    float8 = any(t.dtype == torch.float8_e4m3fn for t in call.tensors().values())
    checks = EVERY_CHECK[1:] if float8 else EVERY_CHECK
    results = torch.library.opcheck(call.overload, (), call.arguments, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


def test_float8_is_what_keeps_opcheck_from_testing_the_schema():
    call = CALLS["paged_mqa_logits: fp8 query, fp8 keys"]()
    with pytest.raises(Exception, match="not implemented for 'Float8_e4m3fn'"):
        torch.library.opcheck(call.overload, (), call.arguments, test_utils="test_schema")


def stored_bytes(call: Call) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(t.untyped_storage().tolist()) for name, t in call.tensors().items()}


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_is_written_and_the_result_shares_no_memory(name):
    call = CALLS[name]()
    before = stored_bytes(call)
    result = call.run()
    for argument, stored in stored_bytes(call).items():
        assert torch.equal(stored, before[argument]), f"{argument} was written"
    storages = {t.untyped_storage().data_ptr() for t in call.tensors().values() if t.numel()}
    assert result.numel() == 0 or result.untyped_storage().data_ptr() not in storages


@pytest.mark.parametrize("name", CALLS)
def test_positional_and_keyword_arguments_are_the_same_call(name):
    call = CALLS[name]()
    schema = call.overload._schema.arguments
    positional = [call.arguments[a.name] for a in schema if not a.kwarg_only]
    keywords = {a.name: call.arguments[a.name] for a in schema if a.kwarg_only and a.name in call.arguments}
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in positional]
    on_meta = {k: a.to("meta") if isinstance(a, torch.Tensor) else a for k, a in keywords.items()}
    assert torch.equal(call.overload(*positional, **keywords).nan_to_num(), call.run().nan_to_num())
    assert call.overload(*meta, **on_meta).shape == call.run().shape
