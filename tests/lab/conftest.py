"""Shares a fixture among tests of the lab."""

import pytest

from tests.lab import emulation
from tnp_lab import launch, nvrtc


@pytest.fixture
def here(monkeypatch):
    """Pretends that a compiler is here. Kernels then run on this CPU."""
    nvrtc.missing.cache_clear()
    monkeypatch.setattr(nvrtc, "_is_installed", lambda module: True)
    monkeypatch.setattr(nvrtc, "_nvrtc_is_here", lambda: True)
    monkeypatch.setattr(launch, "loaded", emulation.loaded)
    yield
    nvrtc.missing.cache_clear()
