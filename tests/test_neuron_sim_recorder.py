"""The recorder sees every operator, index, integer and kernel; the 32-bit mode changes exactly what overflows."""

from __future__ import annotations

import neuron_sim
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(neuron_sim.install() != "simulated", reason="the real torch_neuronx is in use")

BIG = 2**31 - 1


def on_neuron(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("neuron")


def test_every_operator_is_recorded_with_shapes_and_dtypes():
    x = torch.ones(2, 3, device="neuron")
    with neuron_sim.record() as seen:
        (x.bfloat16() @ x.T.bfloat16()).float().add_(1)
    names = [call.name for call in seen.ops]
    assert names.index("mm") < names.index("add")
    product = next(call for call in seen.ops if call.name == "mm")
    assert [info.shape for info in product.inputs][:2] == [(2, 3), (3, 2)]
    assert {info.dtype for info in product.outputs} == {torch.bfloat16}
    assert {info.shape for info in product.outputs} == {(2, 2)}


def test_nothing_is_recorded_outside_the_block_and_blocks_nest():
    x = torch.ones(2, device="neuron")
    with neuron_sim.record() as outer:
        x.exp()
        with neuron_sim.record() as inner:
            x.sin()
    x.cos()
    assert {"exp", "sin"} <= outer.names()
    assert "sin" in inner.names()
    assert not {"exp", "cos"} & inner.names()
    assert "cos" not in outer.names()


@pytest.mark.parametrize(
    ("call", "tables"),
    [
        (lambda t, i: t[i], [5]),
        (lambda t, i: t[:, i], [7]),
        (lambda t, i: t[i[:, None], i], [5, 7]),
        (lambda t, i: t.index_select(1, i), [7]),
        (lambda t, i: torch.nn.functional.embedding(i, t), [5]),
        (lambda t, i: t.gather(-1, i[:, None]), [7]),
        (lambda t, i: t.scatter(0, i[None].expand(3, 3), 0.0), [5]),
        (lambda t, i: t.scatter_add_(1, i[:, None], torch.ones(3, 1, device="neuron")), [7]),
        (lambda t, i: t.index_add(0, i, t[:3]), [5]),
        (lambda t, i: t.index_copy(0, i, t[:3]), [5]),
        (lambda t, i: t.index_put_((i,), t[:3].clone()), [5]),
        (lambda t, i: t.take(i), [35]),
        (lambda t, i: torch.take_along_dim(t, i[:, None], 0), [5]),
    ],
)
def test_every_index_is_recorded_with_the_size_of_its_table(call, tables):
    table = torch.ones(5, 7, device="neuron")
    index = on_neuron(2, 0, 1)
    with neuron_sim.record() as seen:
        call(table, index)
    assert [use.table for use in seen.indices()] == tables
    assert all({0, 1, 2} == set(use.values.flatten().tolist()) for use in seen.indices())
    assert not seen.out_of_range()


def test_a_compiled_graph_is_recorded_when_it_runs():
    table = torch.ones(5, 7, device="neuron")
    compiled = neuron_sim.compile_fullgraph(lambda t, i: t[i.clamp(0, 4)] * 2)
    compiled(table, on_neuron(1))
    with neuron_sim.record() as seen:
        compiled(table, on_neuron(9))
    assert [use.values.tolist() for use in seen.indices()] == [[4]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * 2,
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x - (-1),
        lambda x: -(x + 1 - 1) - 2,
        lambda x: x.cumsum(0, dtype=x.dtype),
        lambda x: x.sum(dtype=x.dtype),
        lambda x: x << 1,
        lambda x: torch.add(x, x, alpha=3),
        lambda x: x.scatter_add(0, torch.zeros(2, dtype=torch.int64, device="neuron"), x),
        lambda x: x[:, None].index_add(0, torch.zeros(2, dtype=torch.int32, device="neuron"), x[:, None]),
    ],
)
def test_an_integer_that_leaves_32_bits_is_seen_in_either_width(call, dtype):
    big, small = on_neuron(BIG, BIG, dtype=dtype), on_neuron(3, 4, dtype=dtype)
    with neuron_sim.record() as seen:
        call(big)
    assert seen.overflows()
    assert seen.largest_integer() > BIG
    with neuron_sim.record() as seen:
        call(small)
    assert not seen.overflows()
    assert seen.largest_integer() <= 24


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=8), st.integers(-(2**33), 2**33))
def test_the_32_bit_mode_computes_as_int32_does(values, factor):
    def function(x):
        return (x * factor + 7).cumsum(0) - x.amax()

    def narrow(x):
        return x.to(torch.int32).to(torch.int64)

    x = torch.tensor(values)
    with neuron_sim.int32_only():
        result = function(x.to("neuron"))
        back = x.to("neuron").cpu()
    assert torch.equal(back, narrow(x))
    step = narrow(narrow(narrow(x) * factor) + 7)
    assert torch.equal(result.cpu(), narrow(narrow(step.cumsum(0)) - narrow(x).amax()))


def test_the_32_bit_mode_leaves_views_and_small_values_alone():
    x = on_neuron(1, -2, BIG, -BIG - 1)
    with neuron_sim.int32_only():
        assert x.expand(3, 4).tolist() == [[1, -2, BIG, -BIG - 1]] * 3
        assert x.view(2, 2).t().add(0).tolist() == [[1, BIG], [-2, -BIG - 1]]
        wide = torch.full((1,), 2**31, dtype=torch.int64, device="neuron")
    assert wide.item() == -(2**31)
    assert (on_neuron(BIG) + 1).item() == 2**31


def test_a_kernel_call_is_recorded_and_a_nan_is_traced_to_its_argument():
    from torch_neuronx.nki_hop import wrap_nki

    @neuron_sim.define("recorded")
    def recorded(a, b, scale):
        return a * scale

    kernel = wrap_nki(recorded)
    a, b = torch.ones(4, device="neuron").bfloat16(), torch.ones(2, 2, device="neuron")
    with neuron_sim.record() as seen:
        kernel(a, b, scale=3.0)
        kernel(a, b * float("nan"), scale=3.0)
        kernel(a, b, scale=float("nan"))
    assert [call.name for call in seen.kernels] == ["recorded"] * 3
    first = seen.kernels[0]
    assert {name: (info.shape, info.dtype) for name, info in first.tensors.items()} == {
        "a": ((4,), torch.bfloat16),
        "b": ((2, 2), torch.float32),
    }
    assert first.constants == {"scale": 3.0}
    assert [call.nan for call in seen.kernels] == [(), ("b",), ("result 0",)]
    assert seen.nan_kernels() == seen.kernels[1:]
