"""Runs CMake and packs what it built. Sources, flags and options are in CMakeLists.txt."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def tool(name: str) -> str:
    """A build tool from this Python's environment or the PATH; a clear end otherwise."""
    beside_python = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside_python or shutil.which(name)
    if found is None:
        sys.exit(f"deepinfer_ops needs {name} to build: pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Configures once per build folder, so a rebuild after one changed file takes seconds."""

    def run(self) -> None:
        if os.environ.get("CXX") is None and not any(map(shutil.which, ("c++", "g++", "clang++"))):
            sys.exit("deepinfer_ops needs a C++17 compiler to build (apt install g++, or set CXX)")
        target = Path(self.get_ext_fullpath("deepinfer_ops._C")).parent.resolve()
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        # DEEPINFER_CMAKE_ARGS passes options such as -DDEEPINFER_SANITIZE=address,undefined through pip.
        extra = os.environ.get("DEEPINFER_CMAKE_ARGS", "").split()
        configure = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}"]
        run([tool("cmake"), "-S", str(ROOT), "-B", str(build), *configure, *extra])
        run([tool("cmake"), "--build", str(build)])
        run([tool("cmake"), "--install", str(build), "--prefix", str(target)])


def run(command: list[str]) -> None:
    """Run a build step; its own output says what went wrong."""
    if subprocess.run(command).returncode:
        sys.exit(f"deepinfer_ops: build step failed: {' '.join(command)}")


def version() -> str:
    """The version, from the one line that holds it."""
    text = (ROOT / "deepinfer_ops" / "version.py").read_text()
    return re.search(r'__version__ = "(.+)"', text)[1]


setup(
    version=version(),
    packages=[*find_packages(include=["deepinfer_ops*"]), "deepinfer_ops.nki"],
    # The kernels' folder stands at the top, without __init__.py: with one it would shadow the installed `nki`.
    package_dir={"deepinfer_ops": "deepinfer_ops", "deepinfer_ops.nki": "nki"},
    package_data={"deepinfer_ops": ["py.typed"]},
    ext_modules=[Extension("deepinfer_ops._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
