"""Checks of the main process before the first job: nothing has been changed when one fails."""

import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from workflow import sources
from workflow.jobs import WORKFLOW_PID
from workflow.summary import DATABASE


def prepare_environment(checkout: str) -> None:
    """Tells the jobs where to import `tnp` and `workflow` from, and with whose end they end."""
    path = [checkout, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    os.environ[WORKFLOW_PID] = str(os.getpid())


def take_lock(path: Path) -> int:
    """Holds `path` for the life of this process, a kill included; ValueError if another does.

    Returns the descriptor; Python lets no job inherit it, so that none outlives the workflow with
    the lock in its hands.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode().strip() or "unknown"
        os.close(descriptor)
        raise ValueError(
            f"another workflow (process {holder}) is running in {Path.cwd()}: "
            "wait until it has ended; nothing was changed"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def check_no_file_for_folder(folders: Iterable[str]) -> None:
    """Raises ValueError naming a file in the way of one of `folders`; Snakemake would not say."""
    for folder in map(Path, folders):
        for place in (folder, *folder.parents):
            if place.exists() and not place.is_dir():
                raise ValueError(f"cannot write to {folder}/: {place} is no folder, move it away")


def check_folders(folders: Iterable[str]) -> None:
    """Raises ValueError naming the first of `folders` that cannot be created or written to."""
    for folder in folders:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"cannot write to {folder}/ ({error.strerror}): make it a writable folder"
            ) from None


def check_new(results: Iterable[str]) -> None:
    """Raises ValueError naming a result that is there already; Snakemake would delete it."""
    for file in filter(os.path.exists, results):
        raise ValueError(
            f"{file} is measured, and no result is overwritten: measure it once more with "
            "`snakemake again --config again=NAME`"
        )


def check_device(slug: str) -> None:
    """Raises ValueError if the device `slug`, on which jobs are to run here, is not here."""
    from tnp.bench.child import require_visible
    from tnp.bench.process import DeviceMissing

    try:
        require_visible(slug)
    except DeviceMissing as error:
        raise ValueError(
            f"config.yaml: {error}; set it to 'auto', or run it on a cluster with "
            "--workflow-profile profiles/slurm"
        ) from None


def check_tables() -> None:
    """Raises ValueError naming the first Parquet file that the store could not load.

    Files that the database was built from need no second look.
    """
    # Slow to import, and only a real run needs it.
    from tnp.store.files import StoreError, all_files, is_current, read_tables

    try:
        files, views = all_files(), sources.views()
        if not is_current(Path(DATABASE), files, Path(views[0]).parent):
            read_tables(files)
    except StoreError as error:
        raise ValueError(str(error)) from None
