"""Tests that module names of release 0.2 still work, and each says once where the module is now."""

import importlib
import subprocess
import sys

import pytest

from tnp import _moved


@pytest.mark.parametrize("old, new", _moved._NEW.items())
def test_an_old_name_gives_the_module_of_the_new_one(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new)
    assert found.__spec__.name == new  # what the old name replaced for a moment


@pytest.mark.parametrize("old, homes", _moved._NAMES.items())
def test_a_module_that_became_a_package_still_has_its_names(old: str, homes: dict) -> None:
    package = importlib.import_module(old)
    for home, names in homes.items():
        for name in names:
            with pytest.warns(DeprecationWarning, match=f"{old}.{name} is now {home}.{name}"):
                assert getattr(package, name) is getattr(importlib.import_module(home), name)
    assert not hasattr(package, "no_such_name")


def test_a_name_that_never_was_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"tnp\.trainer"):
        importlib.import_module("tnp.trainer")


def test_an_old_command_still_runs() -> None:
    command = [sys.executable, "-W", "always", "-m", "tnp.tune", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "usage: python -m tnp.tuning" in done.stdout
    assert "tnp.tune is now" in done.stderr


def test_the_package_offers_its_names_without_importing_torch() -> None:
    code = """
import sys, tnp
assert {"TransformerNP", "TNPConfig", "Variant", "TrainingStep", "fit", "Task"} <= set(dir(tnp))
tnp.TNPConfig(), tnp.Variant.named("fused")
assert "torch" not in sys.modules
from tnp import *
assert TransformerNP.__module__ == "tnp.model.transformer_np"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
