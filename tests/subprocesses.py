"""Run a script in a fresh interpreter, so that a crash or a hang is a failed test and not the end of the run."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TESTS = Path(__file__).parent
HANG = 300
"""Seconds after which a script counts as hanging; no test waits for them."""


def run_script(script: str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """The script's standard output; fails with everything it wrote if it crashes, hangs or returns an error.

    The script imports the tests' modules and the package as the tests do. Of the settings it inherits only which build
    of the library is tested.
    """
    settings = {name for name in os.environ if name.startswith("DEEPINFER_") and name != "DEEPINFER_LIBRARY"}
    inherited = {name: value for name, value in os.environ.items() if name not in settings}
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    try:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            env=inherited | {"PYTHONPATH": paths} | (env or {}),
            capture_output=True,
            text=True,
            timeout=HANG,
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"the script hangs; it wrote:\n{late.stdout}\n{late.stderr}") from None
    if done.returncode != 0:
        raise AssertionError(f"the script ended with {done.returncode}; it wrote:\n{done.stdout}\n{done.stderr}")
    return done.stdout
