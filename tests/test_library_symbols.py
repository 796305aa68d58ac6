"""What the compiled library asks of others and shows to them: torch's stable C interface, and no C++ of torch's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepinfer_ops

PACKAGE = Path(deepinfer_ops.__file__).parent
ROOT = PACKAGE.parent
CSRC = ROOT / "csrc"
LIBRARY = PACKAGE / "libdeepinfer_ops.so"
EXTENSION = next(PACKAGE.glob("_C.*.so"))
ISA_SOURCES = sorted((CSRC / "isa").glob("*.cpp"))

STANDARD_CXX = re.compile(r"_Z(T[ISVT])?(N?K?S[aosti]|NKS|St|n[wa]|d[la]|T[ISV]N10__cxxabiv1)")
"""Mangled names of namespace std, of operator new and delete, and of the C++ runtime's type information."""


def names(*arguments: object) -> list[str]:
    """Symbol names as ``nm`` prints them (part of binutils, which every compiler needs)."""
    output = subprocess.run(["nm", *map(str, arguments)], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in output.splitlines() if line]


def needed(library: Path) -> set[str]:
    output = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", output))


def shim_functions() -> set[str]:
    """Every function torch 2.10 offers as its stable C interface, after the preprocessor took newer ones out."""
    include = Path(torch.__file__).parent / "include"
    header = "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\n#include <torch/csrc/stable/c/shim.h>\n"
    command = ["c++", "-E", "-P", "-x", "c++", "-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{include}", "-"]
    text = subprocess.run(command, input=header, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", text))


def test_of_torch_only_the_stable_c_interface_of_2_10_is_used():
    undefined = [name.split("@")[0] for name in names("-D", "--undefined-only", LIBRARY)]
    from_torch = {name for name in undefined if re.match(r"(aoti_)?torch_", name)}
    assert {"torch_call_dispatcher", "torch_library_impl", "torch_parallel_for"} <= from_torch
    assert from_torch <= shim_functions()


@pytest.mark.parametrize("library", [LIBRARY, EXTENSION], ids=["library", "extension"])
def test_no_undefined_symbol_is_cxx_of_torch_or_of_anyone_but_the_standard_library(library):
    undefined = names("-D", "--undefined-only", library)
    assert len(undefined) > 20
    for name in undefined:
        assert not re.search("2at|3c10|5torch|8pybind11|6caffe2", name), name
        ours = library == EXTENSION and name.startswith("_ZN9deepinfer")
        python = library == EXTENSION and re.match("_?Py", name)
        shim = library == LIBRARY and re.match(r"(aoti_)?torch_", name)
        weak_hooks = name in ("_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__gmon_start__")
        system = "@GLIBC" in name or "@GCC" in name or "@CXXABI" in name
        assert ours or python or shim or weak_hooks or system or STANDARD_CXX.match(name), name


def test_the_library_exports_what_the_python_module_calls_and_nothing_else():
    exported = names("-D", "--defined-only", LIBRARY)
    linker = {"__bss_start", "_edata", "_end", "_init", "_fini"}
    templates = {name for name in exported if "deepinfer" not in name} - linker
    functions = {re.sub(r"^_ZN9deepinfer\d+([a-z_]+)E.*", r"\1", name) for name in set(exported) - templates - linker}
    assert functions == {"kernels", "capabilities", "set_capability"}
    # instances of the standard library's own templates, which its headers export from every C++ library
    assert all(re.match(r"_ZZ?(T[ISV])?NK?S|_ZT[ISV]S|_ZZ?NSt", name) for name in templates), templates


def test_the_extension_exports_its_init_function_only():
    exported = names("-D", "--defined-only", EXTENSION)
    assert "PyInit__C" in exported
    assert not [name for name in exported if re.search("deepinfer|8pybind11.*detail.*get_internals", name)]


def test_libraries_needed_are_torchs_and_the_compilers():  # pytorch extension-cpp 26
    system = re.compile(r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|ld-linux.*)\.so(\.\d+)*")
    assert {name for name in needed(LIBRARY) if not system.fullmatch(name)} == {"libtorch_cpu.so"}
    assert {name for name in needed(EXTENSION) if not system.fullmatch(name)} == {"libdeepinfer_ops.so"}


def includes(path: Path, seen: set[Path]) -> set[str]:
    """Names of all system headers that a file reaches through the project's own headers."""
    if path in seen:
        return set()
    seen.add(path)
    text = path.read_text()
    own = [path.parent / name for name in re.findall(r'#include "(.+)"', text)]
    system = set(re.findall(r"#include <(.+)>", text))
    return system.union(*(includes(header.resolve(), seen) for header in own))


@pytest.mark.parametrize("source", ISA_SOURCES, ids=lambda path: path.stem)
def test_instruction_set_objects_include_cstdint_and_intrinsics_and_nothing_else_of_the_system(source):
    """Intrinsics are always inlined: like <cstdint> they leave no shared copy for the linker to pick."""
    reached: set[Path] = set()
    assert {"cstdint"} <= includes(source, reached) <= {"cstdint", "immintrin.h"}
    assert len(reached) > 5


@pytest.mark.parametrize("isa", [path.stem for path in ISA_SOURCES])
def test_an_instruction_set_object_defines_one_global_symbol_its_table(isa):
    folder = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    built = folder / "CMakeFiles/deepinfer_kernels.dir/csrc/isa" / f"{isa}.cpp.o"
    if not built.exists():
        pytest.skip(f"no object of {isa} here: installed from a wheel, not built by default, or another architecture")
    assert names("--defined-only", "--extern-only", built) == [f"_ZN9deepinfer{len(isa)}{isa}5tableE"]
    used = set(names("--undefined-only", built))
    assert used <= {"memcpy", "memset", "memmove", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}, used


BUILD_FILES = ["CMakeLists.txt", "setup.py", "Makefile", "pyproject.toml", ".ci/run", "csrc/**/*"]


def test_no_build_file_asks_for_the_builders_cpu_or_for_fast_math():
    files = [path for pattern in BUILD_FILES for path in ROOT.glob(pattern) if path.is_file()]
    assert len(files) > 20
    forbidden = re.compile(r"-march=|-mtune=|-mcpu=|-ffast-math|-Ofast|-funsafe-math|-ffinite-math|fast-math.*pragma")
    for path in files:
        assert not forbidden.search(path.read_text()), path


def test_the_library_holds_no_path_of_the_builder():
    assert b"RPATH" not in subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, check=True).stdout
    run_path = subprocess.run(["readelf", "-d", EXTENSION], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"R(?:UN)?PATH.*\[(.*)\]", run_path) == ["$ORIGIN"]
