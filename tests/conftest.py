"""Hypothesis profiles and markers. ``HYPOTHESIS_PROFILE=ci`` draws more problems than the default ``quick``."""

from __future__ import annotations

import os

# The oracle's small matrices gain nothing from threads that spin; under xdist they cost minutes. Read when numpy loads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Several workers share the cores: idle OpenMP threads sleep instead of spinning. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

import deepinfer_ops  # noqa: F401  (registers torch.ops.deepinfer)

COMMON = {
    "deadline": None,  # a shared machine stalls now and then
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
}
hypothesis.settings.register_profile("quick", max_examples=40, **COMMON)
hypothesis.settings.register_profile("ci", max_examples=120, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "large: keeps more than 1 GiB of memory resident")


@pytest.fixture
def threads():
    """``torch.set_num_threads``, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
