"""How tests run: in two processes that leave each other alone, and without an NVIDIA GPU in
Triton's interpreter.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tnp.bench.provenance import device_slug

N_PROCESSES = 2
CORES = len(os.sched_getaffinity(0))

if device_slug() == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# Read when torch, numpy and pyarrow are imported, and inherited by child processes.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = CORES // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))


def pytest_xdist_auto_num_workers() -> int:
    """Two processes where there are two cores. `pytest -n 0` runs the tests in this one."""
    return min(N_PROCESSES, CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test starts first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The lock of a device lies in the folder for temporary files, so each process has its own."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _builtins_are_listed_once() -> Iterator[None]:
    """Triton's interpreter lists the members of its language at every call of a helper.

    That took 40 % of the time of a kernel of attention, and finds the same names every time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    @cache
    def names(package: object) -> list[str]:
        return [name for name in dir(package) if core.is_builtin(getattr(package, name))]

    def patch_builtin(package: object, *rest: object) -> None:
        for name in names(package):
            if core.is_builtin(member := getattr(package, name)):  # not patched already
                interpreter._patch_attr(package, name, member, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


@pytest.fixture
def users_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tuned tables of a user's own are written; there are none yet."""
    from tnp import choice

    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    choice.refresh()
    yield tmp_path / "tnp/tuned"
    choice.refresh()
