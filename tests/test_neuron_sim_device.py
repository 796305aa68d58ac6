"""The simulated device is a device: its tensors go through the dispatcher and nobody takes them for CPU tensors."""

from __future__ import annotations

import copy
import gc
import weakref

import neuron_sim
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(neuron_sim.install() != "simulated", reason="the real torch_neuronx is in use")

DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.int8),
    *(torch.int16, torch.int32, torch.int64, torch.bool),
]


def neuron(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel()).reshape(size).to(dtype).to("neuron")


def test_a_neuron_tensor_is_no_cpu_tensor_and_no_subclass():
    t = neuron(2, 3)
    assert t.device == torch.device("neuron", 0)
    assert not t.is_cpu
    assert t.is_neuron
    assert type(t) is torch.Tensor
    keys = torch._C._dispatch_keys(t)
    assert keys.has("PrivateUse1")
    assert not keys.has("CPU")
    assert not keys.has("Python")
    assert t.untyped_storage().device.type == "neuron"
    assert t.untyped_storage().nbytes() == 24


def test_its_memory_cannot_be_read_from_the_host():
    t = neuron(2, 3)
    assert t.data_ptr() == 0
    with pytest.raises(TypeError, match="can't convert neuron"):
        t.numpy()
    with pytest.raises((ValueError, BufferError, RuntimeError)):
        torch.from_dlpack(t)


@pytest.mark.parametrize(
    "call",
    [
        lambda c, n: torch.add(c, n),
        lambda c, n: torch.add(n, c),
        lambda c, n: n @ c.T,
        lambda c, n: torch.cat([n, c]),
        lambda c, n: n.add_(c),
        lambda c, n: c.add_(n),
        lambda c, n: n[torch.tensor([0])],
        lambda c, n: torch.where(c > 0, n, n),
        lambda c, n: torch.index_select(n, 0, torch.tensor([0])),
        lambda c, n: torch.add(n, n, out=c),
    ],
)
def test_mixing_it_with_a_cpu_tensor_raises(call):
    with pytest.raises(RuntimeError, match=r"same device|device type|neuron"):
        call(torch.ones(2, 3), neuron(2, 3))


def test_an_operator_without_a_kernel_for_it_raises_even_if_it_has_a_cpu_kernel():
    lib = torch.library.Library("simtest_cpu_only", "FRAGMENT")
    lib.define("op(Tensor x) -> Tensor")
    lib.impl("op", lambda x: x.clone(), "CPU")
    assert torch.ops.simtest_cpu_only.op(torch.ones(1)).item() == 1
    with pytest.raises(NotImplementedError, match=r"simtest_cpu_only::op.*neuron"):
        torch.ops.simtest_cpu_only.op(neuron(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_survive_the_way_there_and_back(dtype):
    raw = torch.arange(256, dtype=torch.uint8).repeat(8)
    data = raw % 2 == 1 if dtype == torch.bool else raw.view(dtype)
    back = data.to("neuron").clone().cpu()
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), data.view(torch.uint8))


def test_fresh_memory_is_poisoned():
    assert torch.empty(3, device="neuron").isnan().all().item()
    assert torch.empty_strided((2, 2), (2, 1), dtype=torch.bfloat16, device="neuron").isnan().all().item()
    assert torch.empty(3, dtype=torch.int32, device="neuron").tolist() == [-1, -1, -1]


def test_views_share_memory_in_both_directions():
    base = neuron(4, 6)
    view = base[1:3, ::2].t()
    view.mul_(10)
    base[0, 0] = -1
    want = torch.arange(24.0).reshape(4, 6)
    want[1:3, ::2] *= 10
    want[0, 0] = -1
    assert torch.equal(base.cpu(), want)
    strided = base.as_strided((2, 2), (7, 2), 1)
    assert torch.equal(strided.cpu(), want.as_strided((2, 2), (7, 2), 1))
    strided.zero_()
    assert base[0, 1].item() == 0


def test_a_dtype_view_is_the_same_bytes():
    t = torch.tensor([[1.0, -2.0]], device="neuron")
    words = t.view(torch.int32)
    assert words.tolist() == [[0x3F800000, -0x40000000]]
    words[0, 1] = 0x40400000
    assert t.tolist() == [[1.0, 3.0]]
    codes = torch.tensor([0x38, 0xC0], dtype=torch.uint8, device="neuron").view(torch.float8_e4m3fn)
    assert codes.to(torch.bfloat16).tolist() == [1.0, -2.0]


def test_in_place_out_and_resize_return_and_change_the_tensor_itself():
    t = neuron(2, 3)
    assert t.add_(1) is t
    out = torch.empty(0, device="neuron")
    assert torch.add(t, t, out=out) is out
    assert out.shape == (2, 3)
    assert out.sum().item() == 42
    grown = neuron(2).resize_(5)
    assert grown.shape == (5,)
    assert grown.untyped_storage().nbytes() >= 20
    assert grown[:2].tolist() == [0, 1]


def test_copies_convert_and_go_both_ways():
    host = torch.tensor([[1.5, -2.5, 3.25]])
    device = torch.zeros(1, 3, dtype=torch.bfloat16, device="neuron").copy_(host)
    assert device.tolist() == host.tolist()
    assert torch.zeros(1, 3, dtype=torch.int32).copy_(device).tolist() == [[1, -2, 3]]
    transposed = torch.zeros(3, 1, device="neuron").t().copy_(device)
    assert transposed.tolist() == host.tolist()
    assert host.to("neuron", torch.float8_e4m3fn).cpu().dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_conversion_from_e4m3_reads_the_code_as_trn2_does(compiled):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).float()
    want[0x78], want[0xF8] = torch.inf, -torch.inf
    want[0x79:0x80] = want[0xF9:] = torch.nan

    def convert(codes):
        return codes.view(torch.float8_e4m3fn).to(torch.bfloat16)

    convert = neuron_sim.compile_fullgraph(convert) if compiled else convert
    assert torch.equal(convert(codes.to("neuron")).cpu().float().nan_to_num(777), want.nan_to_num(777))
    assert codes.to("neuron").view(torch.float8_e4m3fn).cpu().float()[0x7E] == 448  # a copy to the host keeps the code


def test_printing_item_and_deepcopy_work():
    t = neuron(2, 3)
    assert "device='neuron:0'" in repr(t)
    assert "[3., 4., 5.]" in repr(t)
    assert t[1, 2].item() == 5
    twin = copy.deepcopy(t[:, 1])
    twin.zero_()
    assert twin.device.type == "neuron"
    assert t.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_memory_is_freed_with_the_last_view():
    t = torch.empty(1000, device="neuron")
    host = weakref.ref(t.untyped_storage()._neuron_sim_host)
    view = t[10:]
    del t
    gc.collect()
    assert host() is not None
    del view
    gc.collect()
    assert host() is None


def test_autograd_works_on_it():
    x = neuron(2, 3).requires_grad_()
    (x * x).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * x.detach().cpu())


def test_an_index_outside_its_table_is_refused():
    table = neuron(4, 2)
    for bad in (-1, 4, 2**31 - 1):
        index = torch.tensor([0, bad], device="neuron")
        for call in (
            lambda i: table[i],
            lambda i: table.index_select(0, i),
            lambda i: torch.nn.functional.embedding(i, table),
            lambda i: table.gather(0, i[:, None].expand(2, 2)),
            lambda i: table.clone().scatter_(0, i[:, None].expand(2, 2), 1.0),
            lambda i: table.clone().index_add_(0, i, table[:2]),
            lambda i: table.clone().index_put_((i,), table[:2]),
        ):
            with pytest.raises(IndexError, match=rf"index {bad} reaches a table of 4 rows"):
                call(index)


_STEPS = {
    "add": lambda x: x + 1.5,
    "mul_": lambda x: x.clone().mul_(-2),
    "transpose": lambda x: x.transpose(0, -1),
    "slice": lambda x: x[..., ::2],
    "reshape": lambda x: x.reshape(-1, x.shape[-1]),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "contiguous": lambda x: x.contiguous(),
    "softmax": lambda x: x.float().softmax(-1),
    "bf16": lambda x: x.bfloat16(),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "cat": lambda x: torch.cat([x, x], 0),
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "where": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "write": lambda x: x.clone().index_fill_(0, torch.zeros(1, dtype=torch.int64, device=x.device), 7),
    "matmul": lambda x: x.reshape(-1, x.shape[-1]) @ x.reshape(-1, x.shape[-1]).mT,
    "int": lambda x: x.clamp(-100, 100).int() % 5,
}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.lists(st.sampled_from(sorted(_STEPS)), max_size=6))
def test_any_chain_of_operators_gives_the_bits_and_strides_of_the_cpu(size, steps):
    host = torch.arange(torch.Size(size).numel()).reshape(size).float() - 4
    device = host.to("neuron")
    for step in steps:
        if host.numel() < 5000:
            host, device = _STEPS[step](host), _STEPS[step](device)
    assert device.device.type == "neuron"
    assert (device.dtype, device.shape, device.stride()) == (host.dtype, host.shape, host.stride())
    torch.testing.assert_close(device.cpu(), host, rtol=0, atol=0, equal_nan=True)
