"""Settings: read once, typed, frozen, overridable, and said clearly where they are wrong."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_ops import config

DEFAULTS = {
    "NKI_ATTN": "1",
    "PREFILL_BUCKET": "0",
    "FAST_E4M3": "1",
    "ATTN_TABLE_SLOTS": "32768",
    "SWA_SUBBLOCK": "1",
    "DENSE_ATTN_MAX_KV": "4096",
    "DENSE_ATTN_MIN_ROWS": "65",
    "PREFILL_DENSE": "1",
    "PREFILL_DENSE_CHECK": "0",
}
"""The variables without their prefix, and what they stand at."""


@pytest.fixture
def fresh(monkeypatch):
    """Settings as in a process that has not read its environment yet; undone afterwards."""
    tag = torch.compiler.config.cache_key_tag
    for name in DEFAULTS:
        monkeypatch.delenv(f"DEEPINFER_NEURON_{name}", raising=False)
    monkeypatch.setattr(config, "_active", None)
    monkeypatch.setattr(config, "fingerprint", "")
    yield monkeypatch
    torch.compiler.config.cache_key_tag = tag


def as_text(settings):
    return {name: str(int(getattr(settings, name.lower()))) for name in DEFAULTS}


def test_defaults_are_the_documented_ones(fresh):
    assert as_text(config.current()) == DEFAULTS
    assert {field.name.upper() for field in dataclasses.fields(config.Settings)} == set(DEFAULTS)


def test_every_variable_reaches_its_setting(fresh):
    wanted = {
        name: "7" if int(value) > 1 or name == "PREFILL_BUCKET" else str(1 - int(value))
        for name, value in DEFAULTS.items()
    }
    for name, value in wanted.items():
        fresh.setenv(f"DEEPINFER_NEURON_{name}", value)
    assert as_text(config.current()) == wanted


def test_the_environment_is_read_once(fresh):
    first = config.current()
    fresh.setenv("DEEPINFER_NEURON_PREFILL_BUCKET", "512")
    assert config.current() is first


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("NKI_ATTN", "yes", "0 or 1"),
        ("FAST_E4M3", "2", "0 or 1"),
        ("PREFILL_DENSE", "", "0 or 1"),
        ("ATTN_TABLE_SLOTS", "-1", "an integer >= 0"),
        ("DENSE_ATTN_MIN_ROWS", "6.5", "an integer >= 0"),
    ],
)
def test_a_bad_variable_is_named_with_what_it_should_be(fresh, name, value, expected):
    fresh.setenv(f"DEEPINFER_NEURON_{name}", value)
    message = f"DEEPINFER_NEURON_{name}: expected {expected}, got {value!r}"
    for _ in range(2):  # nothing half-read is kept
        with pytest.raises(ValueError, match="^" + message.replace("(", r"\(") + "$"):
            config.current()


def test_settings_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.current().prefill_bucket = 1


@given(st.fixed_dictionaries({}, optional={"nki_attn": st.booleans(), "prefill_bucket": st.integers(0, 2**31)}))
def test_override_replaces_what_it_names_and_restores_everything(changes):
    before, fingerprint = config.current(), config.fingerprint
    with config.override(**changes) as inside:
        assert inside is config.current()
        assert inside == dataclasses.replace(before, **changes)
    assert config.current() is before
    assert config.fingerprint == fingerprint


def test_override_restores_after_an_error_and_nests():
    def fails():
        with config.override(prefill_bucket=8):
            with config.override(nki_attn=0):
                assert (config.current().prefill_bucket, config.current().nki_attn) == (8, False)
            assert config.current().nki_attn is before.nki_attn
            raise KeyError

    before = config.current()
    with pytest.raises(KeyError):
        fails()
    assert config.current() is before


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"table_slots": 1}, TypeError, "table_slots: expected one of nki_attn, prefill_bucket"),
        ({"nki_attn": 2}, ValueError, "nki_attn: expected 0 or 1, got 2"),
        ({"nki_attn": "1"}, ValueError, "nki_attn: expected 0 or 1, got '1'"),
        ({"prefill_bucket": -1}, ValueError, "prefill_bucket: expected an integer >= 0, got -1"),
        ({"prefill_bucket": 1.0}, ValueError, "prefill_bucket: expected an integer >= 0, got 1.0"),
        ({"prefill_bucket": True}, ValueError, "prefill_bucket: expected an integer >= 0, got True"),
    ],
)
def test_a_bad_override_is_named_and_changes_nothing(changes, error, message):
    before = config.current()
    with pytest.raises(error, match=message), config.override(fast_e4m3=False, **changes):
        pass
    assert config.current() is before


def test_equal_settings_have_equal_fingerprints_and_different_ones_differ():
    seen = {}
    for changes in ({}, {"nki_attn": 0}, {"prefill_bucket": 1}, {"nki_attn": 0, "prefill_bucket": 1}):
        with config.override(**changes):
            seen[config.current()] = config.fingerprint
    assert len(set(seen.values())) == 4
    with config.override(prefill_bucket=1, nki_attn=0):
        assert config.fingerprint == seen[config.current()]
    with config.override(prefill_bucket=0, nki_attn=1):
        assert config.fingerprint == ""


def test_compile_caches_on_disk_are_told_about_other_settings_and_keep_the_users_tag():
    before = torch.compiler.config.cache_key_tag
    try:
        torch.compiler.config.cache_key_tag = "mine"
        with config.override(nki_attn=0):
            assert torch.compiler.config.cache_key_tag == "mine;deepinfer:nki_attn=0"
            with config.override(prefill_bucket=2):
                assert torch.compiler.config.cache_key_tag == "mine;deepinfer:nki_attn=0,prefill_bucket=2"
        assert torch.compiler.config.cache_key_tag == "mine"
    finally:
        torch.compiler.config.cache_key_tag = before


def test_importing_the_package_reads_no_variable():
    """A bad variable must not keep a CPU user from importing the package."""
    script = "import os; os.environ['DEEPINFER_NEURON_NKI_ATTN'] = 'x'; from deepinfer_ops import config, neuron"
    subprocess.run([sys.executable, "-c", script], check=True)
