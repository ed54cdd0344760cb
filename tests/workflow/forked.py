"""Snakemake in forked processes: to import it takes half a second, and most runs take one.

Nothing of this checkout is imported here, because a run imports the code of the folder it is in.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing import util
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_S = 600  # of a busy machine; a run that takes longer is killed
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["snakemake.cli", "pydantic", "pyarrow.parquet"])
util.get_temp_dir()  # now, not inside of the tests' folder, which is gone when this process ends


class Run:
    """`python -m snakemake ARGUMENTS` in `folder`. Its output is read from `stdout`."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        reads, writes = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_snakemake, args=(str(folder), arguments, dict(environment), writes)
        )
        self._process.start()
        writes.close()
        self.stdout = os.fdopen(os.dup(reads.fileno()))
        self.kill = self._process.kill

    def end(self) -> tuple[int, str]:
        """Returns the exit status, and what is printed from here on."""
        timer = threading.Timer(LONGEST_S, self.kill)
        timer.start()
        with self.stdout:
            text = self.stdout.read()
        timer.cancel()
        self._process.join()
        return self._process.exitcode, text


def _snakemake(
    folder: str, arguments: tuple[str, ...], environment: dict[str, str], output: Connection
) -> None:
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    output.close()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the next call reads TMPDIR again
    sys.dont_write_bytecode = False  # later processes of this folder read it
    ours = {ROOT, ROOT / "peers", ROOT / "lab"}
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).absolute() not in ours)]
    sys.argv = ["snakemake", *arguments]

    from snakemake.cli import main

    main(list(arguments))
