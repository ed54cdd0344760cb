"""How tests run: in two processes that leave each other alone, and without an NVIDIA GPU in
Triton's interpreter.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from getpass import getuser
from pathlib import Path

import pytest

from tnp.bench.provenance import device_slug

N_PROCESSES = 2
CORES = len(os.sched_getaffinity(0))

if device_slug() == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# torch, numpy and pyarrow read these at import, and child processes inherit them. The tensors of
# tests are small, and threads that wait for each other on busy cores take three times the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Inductor compiles for a CPU without vectors: it would try out each kind of them with a program of
# its own, which takes as long as a test.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"


def pytest_xdist_auto_num_workers() -> int:
    """Two processes where there are two cores. `pytest -n 0` runs the tests in this one."""
    return min(N_PROCESSES, CORES)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test starts first, so that no process is left alone with it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The lock of a device lies in the folder for temporary files, so each process has its own.

    Processes share what Inductor compiles, because its header is slow to compile.
    """
    folder = str(tmp_path_factory.mktemp("tmp"))
    inductor = made_once(tmp_path_factory, "inductor", lambda _: None)
    Path(folder, f"torchinductor_{getuser()}").symlink_to(inductor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def _the_interpreter_prepares_once() -> None:
    from tnp.dispatch.private import prepare_interpreter_once

    prepare_interpreter_once()


def made_once(
    tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]
) -> Path:
    """Returns folder `name` that `make` fills, once for all processes of the tests."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # each process has a folder of its own in it
    folder, done = shared / name, shared / f"{name}.done"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def recorded_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a database of the recorded rows alone. No test writes to it."""
    from tnp.figures import report
    from tnp.store.files import build_database
    from tnp.util.atomic_files import parquet_files

    def build(folder: Path) -> None:
        database = folder / "results.duckdb"
        build_database(parquet_files(report.RECORDED), report.VIEWS, database)

    return made_once(tmp_path_factory, "recorded", build) / "results.duckdb"


@pytest.fixture
def users_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tuned tables of a user's own are written; there are none yet."""
    from tnp.dispatch import tuned_tables

    monkeypatch.delenv(tuned_tables.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuned_tables.refresh()
    yield tmp_path / "tnp/tuned"
    tuned_tables.refresh()
