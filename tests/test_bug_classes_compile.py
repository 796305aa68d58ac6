"""Classes H (CPU runtime), I (build and import) and J (library, compile, export): what no other test pins already.

Elsewhere: test_compile*.py and test_export.py (vllm 9234, pytorch 141013), test_compile_modes.py (pytorch 65151),
test_library*.py (vllm 13608, kernel-builder 11, extension-cpp 26, llvm 57589), test_process.py (llama.cpp 26954).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cases
import pytest
import sample_calls
import strategies_decode
import strategies_logits
import torch
from compare import assert_equal, assert_same_bits
from neuron_sim import compile_fullgraph
from sample_calls import CALLS
from strategies_decode import DecodeProblem, Scope
from strategies_logits import LogitsProblem
from strategies_pool import PoolProblem
from subprocesses import run_script
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer_ops import _C

CSRC = Path(__file__).parent.parent / "csrc"
OPS = torch.ops.deepinfer


def compiler(*names: str) -> str:
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip(f"none of {', '.join(names)} is installed")
    return found


@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "sapphirerapids"])
@pytest.mark.parametrize("source", ["generic", "avx2"])
@pytest.mark.parametrize("name", [("g++", "c++"), ("clang++",)], ids=lambda names: names[0])
def test_kernels_compile_where_the_builders_flags_ask_for_more(name, source, level):  # vllm 35599
    """CXXFLAGS=-march=native, as distributions set it: the flags may offer more than a source's own vector width."""
    flags = re.search(
        rf'isa/{source}\.cpp PROPERTIES COMPILE_OPTIONS\s+"(.+)"', (CSRC.parent / "CMakeLists.txt").read_text()
    )
    own = flags[1].split(";") if flags else []
    options = ["-std=c++17", f"-march={level}", *own, "-fsyntax-only", "-Wall"]
    done = subprocess.run([compiler(*name), *options, CSRC / f"isa/{source}.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_portable_kernels_compile_for_aarch64():  # vllm 35599
    command = [compiler("aarch64-linux-gnu-g++"), "-std=c++17", "-fsyntax-only", "-Wall", CSRC / "isa/generic.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_dispatch_compiles_without_x86_kernels(tmp_path):  # vllm 35599: another architecture has generic alone
    command = [compiler("g++", "c++"), "-std=c++17", "-c", CSRC / "dispatch.cpp", "-o", tmp_path / "dispatch.o"]
    assert subprocess.run(command, capture_output=True, text=True).returncode == 0
    symbols = subprocess.run(["nm", "-u", tmp_path / "dispatch.o"], capture_output=True, text=True).stdout
    assert "generic5table" in symbols
    assert "avx" not in symbols


@pytest.mark.parametrize("count", [1, 2, 7, 16])
def test_fifty_repeats_give_the_same_bits(threads, count):  # vllm 49896
    problem = LogitsProblem((200, 190, 0, 64) * 4, 8, page_kv=64, pages=9, width=4, max_context_len=256)
    decode = DecodeProblem(b=16, h_q=8, main=Scope("fp8", 16, 20, 90), extra=Scope("fp4", 7, 9, 40), sink="finite")
    calls = [sample_calls.logits(problem), sample_calls.decode(decode), sample_calls.pool(PoolProblem(99, 5, 129))]
    threads(1)
    want = [call.run() for call in calls]
    threads(count)
    for _ in range(50):
        for call, wanted in zip(calls, want, strict=True):
            assert_same_bits(call.run(), wanted)


def test_one_openmp_runtime_and_no_cuda_library_in_the_process():  # pytorch extension-cpp 26
    script = """
    import re, sample_calls, deepinfer_ops
    for call in sample_calls.one_of_each():
        call.run()
    maps = open("/proc/self/maps").read()
    libraries = set(re.findall(r"/([^/ ]+\\.so[.\\d]*)$", maps, re.MULTILINE))
    assert "libdeepinfer_ops.so" in libraries
    print(*sorted(l for l in libraries if re.match(r"lib(g?omp|iomp5)\\b|libgomp", l)))
    import torch
    if torch.version.cuda is None:
        assert not [l for l in libraries if re.match("libcu(da|dart|blas)", l)]
    """
    assert len(run_script(script).split()) <= 1


def described(t: torch.Tensor) -> tuple[object, ...]:
    return t.shape, t.stride(), t.dtype, t.storage_offset(), t.layout, t.requires_grad


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("columns", [0, 1, 255, 256, 257])
def test_fake_and_real_logits_agree_in_every_property(tokens, columns):  # pytorch 143579
    inputs = strategies_logits.build(LogitsProblem((3,) * tokens, heads=2, max_context_len=columns))
    real = inputs.run()
    with FakeTensorMode() as mode:
        fake = OPS.paged_mqa_logits(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in inputs[:7]])
    assert described(fake) == described(real)
    assert real.stride() == (-(-columns // 256) * 256, 1)


@pytest.mark.parametrize("place", ["contiguous", "swapped", "gapped", "sliced"])
def test_decode_of_a_strided_query_is_contiguous_in_fake_and_real(place):  # pytorch 143579
    inputs = strategies_decode.build(DecodeProblem(b=2, s_q=3, h_q=5, main=Scope(topk=3), q_place=place))
    with FakeTensorMode() as mode:
        fake = OPS.flash_mla_decode(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in inputs])
    assert described(fake) == described(inputs.run())
    assert fake.is_contiguous()


@pytest.mark.parametrize("name", CALLS)
def test_compiled_arithmetic_on_a_result_and_its_strides_equals_eager(name):  # pytorch 143579
    call = CALLS[name]()

    def function(arguments):
        out = call.overload(**arguments)
        return out + 1, out.stride(), out.t().contiguous() if out.dim() == 2 else out.permute(3, 2, 1, 0) * 2

    compiled = compile_fullgraph(function)
    for mine, wanted in zip(compiled(call.arguments), function(call.arguments), strict=True):
        if isinstance(wanted, torch.Tensor):
            assert mine.stride() == wanted.stride()
            assert_same_bits(mine, wanted)
        else:
            assert mine == wanted


def test_strides_of_a_cache_view_made_inside_the_graph_reach_the_kernel():  # pytorch 143579
    """Inductor keeps a needs_exact_strides operator's input layouts: a layer's blocks in a pool stay where they are."""
    pool = torch.full((4, 2, 3 * 528), 0x7E, dtype=torch.uint8)
    mine = cases.kv_cache(dict.fromkeys(range(12), 2.0), 12, page=3)
    pool[:, 1] = mine.reshape(4, -1)
    inputs = cases.decode(mine, [[[0, 5, 11, -1]]])

    def attend(pool, q, indices):
        cache = pool[:, 1].view(4, 3, 1, 528)
        return OPS.flash_mla_decode(q + 0, cache, indices + 0, None, None, None, None, None, 1.0)

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        assert_equal(torch.compile(attend, backend=backend, fullgraph=True)(pool, inputs.q, inputs.indices), 2.0)


def test_empty_batches_pass_through_one_dynamic_graph():  # flash-attention 1159
    def function(decode, logits, pool):
        return OPS.flash_mla_decode(*decode) + 1, OPS.paged_mqa_logits(*logits) + 1, OPS.softmax_pool(*pool) + 1

    for b in (0, 3):
        decode = strategies_decode.build(DecodeProblem(b=b, h_q=4, main=Scope(topk=8, lengths=(8,) * b)))
        logits = strategies_logits.build(LogitsProblem((3,) * b, max_context_len=300))[:7]
        arguments = (tuple(decode), tuple(logits), (torch.randn(b, 4, 6), torch.randn(b, 4, 6)))
        compiled = compile_fullgraph(function, dynamic=True)
        for mine, wanted in zip(compiled(*arguments), function(*arguments), strict=True):
            assert_same_bits(mine, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_results_carry_no_gradient_history(mode):  # pytorch 65151
    with mode():
        scores = torch.randn(2, 3, 5, requires_grad=True)
        out = OPS.softmax_pool(scores, scores)
    assert not out.requires_grad
    assert out.grad_fn is None


@pytest.mark.parametrize("order", ["before the device", "after the device", "no device"])
def test_the_package_loads_in_any_order_with_the_neuron_device(order):  # pytorch 144325
    script = """
    import sys
    if sys.argv[1] == "after the device":
        import neuron_sim
        neuron_sim.install()
    import torch, deepinfer_ops
    if sys.argv[1] == "before the device":
        import neuron_sim
        neuron_sim.install()
    rows = torch.ones(2, 3, 5)
    assert torch.ops.deepinfer.softmax_pool(rows, rows).sum() == 10
    keys = ("CPU", "Meta", "PrivateUse1")
    print(*[torch._C._dispatch_has_kernel_for_dispatch_key("deepinfer::softmax_pool", key) for key in keys])
    if torch._C._dispatch_has_kernel_for_dispatch_key("deepinfer::softmax_pool", "PrivateUse1"):
        if sys.argv[1] != "no device":
            on_device = torch.ops.deepinfer.softmax_pool(rows.to("neuron"), rows.to("neuron"))
            assert on_device.device.type == "neuron" and on_device.cpu().sum() == 10
    """
    assert run_script(script, order).split()[:2] == ["True", "True"]


def test_the_capability_list_names_what_this_machine_was_asked_for():  # llama.cpp 26954
    """The operating system's part counts too: /proc/cpuinfo lists a flag only if the kernel saves its registers."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("no /proc/cpuinfo here")
    flags = set(cpuinfo.read_text().split("flags", 1)[-1].split("\n", 1)[0].split())
    wanted = {"avx2": {"avx2", "fma", "bmi2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    for name, needed in wanted.items():
        assert (name in _C.cpu_capabilities()) <= (needed <= flags), name
