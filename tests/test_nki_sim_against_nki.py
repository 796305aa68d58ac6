"""The simulator against AWS's own, where the real package is installed; and how the modules are put in place."""

import importlib.util
import pathlib
import sys

import nki_sim
import numpy as np
import pytest

BACKEND = nki_sim.install()
FILES = ("test_nki_sim_examples_compute", "test_nki_sim_examples_vector", "test_nki_sim_examples_memory")


def fresh(name, monkeypatch):
    """The example file, imported anew against whatever `nki` is in place now (it imports its siblings too)."""
    for sibling in FILES:
        monkeypatch.delitem(sys.modules, sibling, raising=False)
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(BACKEND != "nki", reason="the real nki package is not importable: there is nothing to compare with")
@pytest.mark.parametrize("name", FILES)
def test_both_simulators_give_the_same_results(name, monkeypatch):
    with nki_sim.standing_in():
        ours = fresh(name, monkeypatch).EXAMPLES.cases
    theirs = fresh(name, monkeypatch).EXAMPLES.cases
    for mine, real in zip(ours, theirs, strict=True):
        for (a, _, rtol), (b, _, _) in zip(mine.values[0](), real.values[0](), strict=True):
            wide = np.asarray(a, np.float64), np.asarray(b, np.float64)
            np.testing.assert_allclose(*wide, rtol=max(rtol, 1e-6), err_msg=mine.id)


def test_install_reports_what_is_in_use_and_is_idempotent():
    import nki

    assert nki_sim.install() == nki_sim.install() == BACKEND
    assert hasattr(nki, "jit")
    assert sys.modules["nki.language"] is importlib.import_module("nki.language")
    assert BACKEND == "nki" or sys.modules["nki.isa"] is nki_sim.isa


def test_a_folder_named_nki_does_not_count_as_the_real_package(monkeypatch, tmp_path):
    """This repository has such a folder: without __init__.py it is importable as an empty namespace package."""
    (tmp_path / "nki").mkdir()
    (tmp_path / "nki" / "a_kernel.py").write_text("import nki.language as nl\nNAME = nl.float32\n")
    for name in [n for n in sys.modules if n == "nki" or n.startswith("nki.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not (pathlib.Path(p) / "nki").is_dir())])
    importlib.invalidate_caches()
    if BACKEND == "nki":
        pytest.skip("the real package is installed and is found first")
    assert nki_sim.install() == "simulator"
    assert importlib.import_module("nki.a_kernel").NAME == "float32"


def test_standing_in_restores_what_was_imported():
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nki"}
    with nki_sim.standing_in():
        assert sys.modules["nki.isa"] is nki_sim.isa
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "nki"}
    assert after == before
