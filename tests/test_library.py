"""Loading: what an import costs and changes, alone, twice, in any order; and which kernels run."""

from __future__ import annotations

import shutil
from pathlib import Path

import cases
import numpy as np
import pytest
import torch
from compare import assert_matches, assert_same_bits
from pack import INDEX_FORMAT, KV_FORMAT
from strategies import token_bytes
from strategies_decode import DecodeProblem, Scope
from strategies_decode import build as build_decode
from strategies_logits import LogitsProblem
from strategies_logits import build as build_logits
from strategies_pool import PoolProblem
from strategies_pool import build as build_pool
from subprocesses import run_script

import deepinfer_ops
from deepinfer_ops import _C

PACKAGE = Path(deepinfer_ops.__file__).parent
CAPABILITIES = _C.cpu_capabilities()
OTHERS = CAPABILITIES[1:]


@pytest.fixture
def capability():
    """``_C.set_cpu_capability``, undone after the test."""
    before = _C.cpu_capability()
    yield _C.set_cpu_capability
    _C.set_cpu_capability(before)


def test_importing_the_package_alone_registers_everything():  # vllm 13608
    script = """
    import deepinfer_ops, sys
    torch = sys.modules["torch"]
    assert deepinfer_ops.HAS_CPU_KERNELS
    for op in ("flash_mla_decode", "paged_mqa_logits", "softmax_pool"):
        for key in ("CPU", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"deepinfer::{op}", key), (op, key)
        assert callable(getattr(deepinfer_ops, op))
    """
    run_script(script)


def test_the_import_brings_in_nothing_beyond_torch_and_itself():
    script = """
    import sys, torch
    before = set(sys.modules)
    import deepinfer_ops
    new = set(sys.modules) - before
    roots = {name.split(".")[0] for name in new}
    assert roots - set(sys.stdlib_module_names) <= {"deepinfer_ops", "torch"}, roots
    for heavy in ("torch._dynamo", "torch._inductor.compile_fx", "sympy", "nki", "torch_neuronx", "matplotlib"):
        assert heavy not in new, heavy
    print(sum(not name.startswith("deepinfer_ops") for name in new))
    """
    assert int(run_script(script)) <= 20  # modules of torch or of the standard library


def test_the_import_prints_and_warns_nothing():
    script = """
    import torch, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import deepinfer_ops
    assert not caught, [str(w.message) for w in caught]
    """
    assert run_script(script) == ""


def test_without_the_compiled_library_schemas_and_fakes_are_there_and_a_warning_says_what_is_missing(tmp_path):
    package = tmp_path / "deepinfer_ops"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "nki"))
    script = """
    import sys, warnings
    sys.path.insert(0, sys.argv[1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import deepinfer_ops, torch
    assert not deepinfer_ops.HAS_CPU_KERNELS and deepinfer_ops.__file__.startswith(sys.argv[1])
    (warning,) = [str(w.message) for w in caught]
    assert "libdeepinfer_ops.so is missing" in warning, warning
    rows = torch.zeros(2, 3, 5)
    assert deepinfer_ops.softmax_pool(rows.to("meta"), rows.to("meta")).shape == (2, 5)
    try:
        deepinfer_ops.softmax_pool(rows, rows)
    except NotImplementedError as error:
        assert "deepinfer::softmax_pool" in str(error)
    else:
        raise AssertionError("a CPU call worked without CPU kernels")
    """
    run_script(script, tmp_path)


def test_the_extension_module_alone_works_after_torch_and_names_what_is_missing_before():  # vllm 13608
    script = """
    import glob, importlib.util, sys
    (path,) = glob.glob(sys.argv[1] + "/_C.*.so")
    if sys.argv[2] == "torch first":
        import torch
    spec = importlib.util.spec_from_file_location("_C", path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        print(module.cpu_capability())
    except ImportError as error:
        print(error)
    """
    assert run_script(script, PACKAGE, "torch first").strip() in CAPABILITIES
    assert "libtorch_cpu.so" in run_script(script, PACKAGE, "alone")


def test_loading_the_library_again_is_nothing_or_a_python_error(tmp_path):  # kernel-builder 11
    script = """
    import importlib, shutil, sys, torch, deepinfer_ops
    from deepinfer_ops import library
    path = sys.argv[1] + "/libdeepinfer_ops.so"
    rows = torch.ones(2, 3, 5)
    def works():
        return torch.equal(torch.ops.deepinfer.softmax_pool(rows, rows), torch.ones(2, 5, dtype=torch.bfloat16))
    assert works()
    torch.ops.load_library(path)
    assert library.load_cpu_kernels() and works()
    importlib.reload(deepinfer_ops)
    assert works()
    def import_a_second_copy():
        for name in [name for name in sys.modules if name.startswith("deepinfer_ops")]:
            del sys.modules[name]
        importlib.import_module("deepinfer_ops")
    outcomes = []
    for again in (
        lambda: torch.ops.load_library(shutil.copy(path, sys.argv[2])),
        lambda: importlib.reload(sys.modules["deepinfer_ops.library"]),
        lambda: importlib.reload(sys.modules["deepinfer_ops.softmax_pool"]),
        import_a_second_copy,
    ):
        try:
            again()
            outcomes.append("nothing")
        except Exception as error:
            outcomes.append(type(error).__name__)
    print(*outcomes)
    """
    outcomes = run_script(script, PACKAGE, tmp_path / "libcopy.so").split()
    assert len(outcomes) == 4
    assert set(outcomes) <= {"nothing", "RuntimeError", "OSError", "ImportError"}


def test_the_python_library_object_outlives_a_failed_second_registration():
    """After a refused redefinition the operators that were there still work."""
    script = """
    import importlib, sys, torch, deepinfer_ops
    try:
        importlib.reload(sys.modules["deepinfer_ops.softmax_pool"])
    except RuntimeError as error:
        assert "softmax_pool" in str(error)
    rows = torch.ones(2, 3, 5)
    assert torch.ops.deepinfer.softmax_pool(rows, rows).sum() == 10
    """
    run_script(script)


def test_build_info_names_version_compiler_and_torch():
    info = _C.build_info()
    assert info["version"] == deepinfer_ops.__version__
    assert info["minimum_torch"] == "2.10"
    assert info["built_with_torch"].split("+")[0].count(".") == 2
    assert info["compiler"].split()[0] in ("GNU", "Clang", "AppleClang", "IntelLLVM")


def test_a_torch_older_than_the_binary_allows_is_refused_by_name():  # vllm 13608
    script = """
    import torch
    torch.__version__ = "2.9.1"
    try:
        import deepinfer_ops
    except ImportError as error:
        print(error)
    """
    message = run_script(script)
    assert "2.10" in message
    assert "2.9.1" in message


@pytest.mark.parametrize(("setting", "used"), [("", CAPABILITIES[0]), *((name, name) for name in CAPABILITIES)])
def test_the_environment_chooses_the_kernels(setting, used):
    script = "from deepinfer_ops import _C; print(_C.cpu_capability())"
    assert run_script(script, env={"DEEPINFER_CPU_CAPABILITY": setting}).strip() == used


def test_an_unknown_capability_in_the_environment_is_an_error_of_every_operator():
    script = """
    import sample_calls, torch, deepinfer_ops
    torch.set_num_threads(4)
    rows = torch.zeros(400, 4, 512)
    big = sample_calls.Call("softmax_pool", {"score_rows": rows, "latent_rows": rows})
    scope = sample_calls.Scope("fp8", 64, 16, 512)
    wide = sample_calls.decode(sample_calls.DecodeProblem(b=8, h_q=64, main=scope))
    for call in [*sample_calls.one_of_each(), big, wide] * 2:
        try:
            call.run()
        except RuntimeError as error:
            print(str(error).split(chr(10))[0])
    """
    lines = run_script(script, env={"DEEPINFER_CPU_CAPABILITY": "sse9"}).splitlines()
    assert len(lines) == 10
    for line in lines:
        assert line.startswith(f"DEEPINFER_CPU_CAPABILITY: expected one of {', '.join(CAPABILITIES)}, got sse9")


def test_an_unknown_capability_in_code_is_an_error_and_changes_nothing(capability):
    with pytest.raises(ValueError, match=r"expected one of .*generic.*, got avx1024"):
        capability("avx1024")
    assert _C.cpu_capability() in CAPABILITIES
    for name in CAPABILITIES:
        capability(name)
        assert _C.cpu_capability() == name


def test_generic_kernels_are_always_there():
    assert CAPABILITIES[-1] == "generic"
    assert len(CAPABILITIES) == len(set(CAPABILITIES))


@pytest.mark.parametrize("name", CAPABILITIES)
def test_every_capability_is_within_the_oracles_tolerance(capability, name):  # vllm 35599
    capability(name)
    main, extra = Scope("fp8", 16, 12, 150, content="codes"), Scope("fp4", 7, 9, 40)
    for inputs in (
        build_decode(DecodeProblem(b=2, s_q=2, h_q=33, main=main, extra=extra, sink="infinite", logit=30.0)),
        build_logits(LogitsProblem((130, 7), 17, page_kv=64, pages=5, width=3, max_context_len=150)),
        build_logits(LogitsProblem((130, 7), 8, "fp4", "fp4", page_kv=64, pages=5, width=3, max_context_len=150)),
        build_pool(PoolProblem(9, 5, 127, spread=20.0, scores=("-inf", "min"), latents=("nan",))),
    ):
        assert_matches(inputs.run(), inputs.exact(), name)


@pytest.mark.parametrize("fmt", KV_FORMAT)
@pytest.mark.parametrize("name", OTHERS)
def test_every_capability_decodes_records_bit_for_bit(capability, name, fmt):
    """q = 0 and one live key: the output is the decoded key. Any byte in any place."""
    rng = np.random.default_rng(1)
    cache = cases.kv_cache(
        {slot: np.concatenate(token_bytes(rng, KV_FORMAT[fmt], 1, "garbage", 448.0), axis=1)[0] for slot in range(300)},
        300,
        fmt=fmt,
    )
    inputs = cases.decode(cache, torch.arange(300, dtype=torch.int32).view(300, 1, 1), h_q=1)
    capability(CAPABILITIES[0])
    want = inputs.run()
    capability(name)
    assert_same_bits(inputs.run(), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("query", INDEX_FORMAT)
@pytest.mark.parametrize("keys", INDEX_FORMAT)
@pytest.mark.parametrize("name", OTHERS)
def test_every_capability_decodes_index_keys_bit_for_bit(capability, name, keys, query):
    """Two heads score with +e_d and -e_d, weights 1 and -1: the logit is element d of the key, exactly."""
    rng = np.random.default_rng(2)
    tokens = 256
    data, scales = token_bytes(rng, INDEX_FORMAT[keys], tokens, "garbage", 448.0)
    blocks = np.concatenate([data.reshape(4, -1), scales.reshape(4, -1)], axis=1).reshape(4, 64, -1)
    cache = torch.from_numpy(blocks)[:, :, None]
    one, minus_one = (0x38, 0xB8) if query == "fp8" else (0x2, 0xA)
    element = np.zeros((128, 2, 128), dtype=np.uint8)
    element[np.arange(128), :, np.arange(128)] = [one, minus_one]
    data_q = element if query == "fp8" else element[..., 0::2] | element[..., 1::2] << 4
    q_data = torch.from_numpy(data_q)[:, None]
    inputs = cases.logits(cache, [tokens] * 128, [[0, 1, 2, 3]] * 128, tokens, heads=2)._replace(
        q_data=q_data.view(torch.float8_e4m3fn) if query == "fp8" else q_data,
        weights=torch.tensor([[1.0, -1.0]] * 128, dtype=torch.bfloat16),
    )
    capability(CAPABILITIES[0])
    want = inputs.run()
    capability(name)
    assert_same_bits(inputs.run(), want)
    assert want.isfinite().all()


def test_floating_point_state_is_left_alone():  # llvm 57589
    """Subnormals survive import and calls, in every thread; flushing that the user chose stays chosen."""
    script = """
    import threading, numpy, torch
    tiny = torch.full((1 << 20,), 1e-40)
    def subnormals_survive():
        results = []
        def check():
            results.append(bool((tiny * 1 != 0).all()) and numpy.float32(1e-40) * numpy.float32(1) != 0)
        thread = threading.Thread(target=check)
        thread.start(), check(), thread.join()
        return results == [True, True]
    torch.set_num_threads(4)
    assert subnormals_survive()
    import deepinfer_ops, sample_calls
    assert subnormals_survive()
    rows = torch.randn(400, 4, 512)
    big = sample_calls.Call("softmax_pool", {"score_rows": rows, "latent_rows": rows})
    for call in [*sample_calls.one_of_each(), big]:
        call.run()
        assert subnormals_survive(), call.op
    if torch.set_flush_denormal(True):
        big.run()
        assert not (torch.full((4,), 1e-40) * 1).any()
        torch.set_flush_denormal(False)
    """
    run_script(script)
