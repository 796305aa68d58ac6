"""The demo: it finds its needle, its float64 reference is right, and it fails when something is wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import oracle
import pytest
import torch

from deepinfer_ops.demo import __main__ as demo
from deepinfer_ops.demo import exact, scene, step


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the demo on a small context; gives its exit status and output."""

    def run(*arguments: str) -> tuple[int, str]:
        small = ["--context", "1023", "--heads", "5", "--seconds", "0", "--out", str(tmp_path / "new")]
        status = demo.main([*small, *arguments])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_the_needle_is_found_in_both_formats(run, tmp_path, seed):
    pytest.importorskip("matplotlib")
    status, text = run("--no-compile", "--seed", seed)
    assert status == 0, text
    assert "Needle found, results agree." in text
    assert text.count("1 of 255") == 2
    assert (tmp_path / "new" / "index_scores.png").read_bytes().startswith(b"\x89PNG")


def test_the_compiled_step_is_the_eager_one(run):
    status, text = run()
    assert status == 0, text
    (line,) = [line for line in text.splitlines() if "compiled step = eager step" in line]
    assert line.split()[-2:] == ["yes", "yes"]
    assert "whole step fp4, compiled" in text


def test_a_needle_that_is_elsewhere_is_not_found(run, monkeypatch):
    def misplaced(*arguments: int) -> scene.Context:
        context = scene.make_context(*arguments)
        return dataclasses.replace(context, needle=context.needle // 2 + 1)

    monkeypatch.setattr(demo, "make_context", misplaced)
    status, text = run("--no-compile")
    assert status == 1
    assert "FAILED: fp8: the needle was not found" in text


@pytest.mark.parametrize("operator", ["softmax_pool", "paged_mqa_logits", "flash_mla_decode"])
def test_an_operator_that_is_off_by_two_percent_fails(run, monkeypatch, operator):
    def off(*arguments: object) -> torch.Tensor:
        return getattr(step.OURS, operator)(*arguments) * 1.02

    monkeypatch.setattr(demo, "OURS", step.OURS._replace(**{operator: off}))
    monkeypatch.setattr(
        "deepinfer_ops.demo.checks.softmax_pool", off if operator == "softmax_pool" else scene.softmax_pool
    )
    status, text = run("--no-compile")
    assert status == 1
    assert f"FAILED: fp4: {operator}: " in text


def test_without_matplotlib_it_says_so_and_succeeds(run, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    status, text = run("--no-compile")
    assert status == 0
    assert "No plot: matplotlib is not installed" in text


@pytest.mark.parametrize("arguments", [["--context", "255"], ["--heads", "0"], ["--context", "many"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_it_is_a_module_with_help():
    shown = subprocess.run([sys.executable, "-m", "deepinfer_ops.demo", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0
    for option in ("--context", "--heads", "--seed", "--no-compile", "--out"):
        assert option in shown.stdout


@pytest.mark.parametrize("size", [528, 288])
def test_its_float64_decode_is_the_oracles(size):
    fmt = oracle.KV[size]
    records = np.random.default_rng(0).integers(0, 256, (300, size), dtype=np.uint8)
    nan = (records & 0x7F == 0x7F) | (records == 0xFF)
    records = np.where(nan, 0x7E, records)  # the caches of the demo hold no NaN
    want = oracle.decode_products(records[:, : fmt.data_bytes], records[:, fmt.data_bytes :], fmt)
    finite = np.isfinite(want)
    got = exact.latents(torch.from_numpy(records)).numpy()
    assert np.array_equal(oracle.round_to_bf16(got)[finite], want[finite])


def test_windows_hold_the_four_rows_before_and_the_four_own():
    rows = torch.arange(14.0)[:, None, None] + torch.tensor([[[100.0], [200.0]]])
    got = scene.windows(rows, -1.0)[..., 0]
    assert got.tolist() == [
        [-1.0, -1.0, -1.0, -1.0, 200.0, 201.0, 202.0, 203.0],
        [100.0, 101.0, 102.0, 103.0, 204.0, 205.0, 206.0, 207.0],
        [104.0, 105.0, 106.0, 107.0, 208.0, 209.0, 210.0, 211.0],
    ]
