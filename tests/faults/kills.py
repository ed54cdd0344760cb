"""Kills a small workflow at random moments and has the same command continue it.

Everything is real: gate, benchmarks, training, store and figure, each job in its own process.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import duckdb
import torch
import yaml

from tests.store import SQL
from tnp.store.files import build_database, read_table
from tnp.store.schemas import TABLES
from tnp.train.loop import load_state
from tnp.util.atomic_files import StoreError, parquet_files

ROOT = Path(__file__).parents[2]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
KILLS_A_RUN = 8
TIME_LIMIT_S = 3600  # limits a whole run, and each job, on a busy machine
ORPHANS_LIVE_S = 60  # on a busy machine; a job ends as soon as it notices

# Columns that say which row it is and how it ended; none of them depends on time.
IDENTITY = (
    "gate", "op", "implementation", "check", "config_id", "replicate", "pass", "stage", "run",
    "step", "status",
)  # fmt: skip
# Further columns that tell rows of one run apart; their number may depend on time.
WITHIN_A_RUN = ("sample", "kernel", "target", "dtype", "launch_config")


def configuration() -> dict:
    """The tests' tiny workflow with one gate, one step, and a training of some seconds."""
    config = yaml.safe_load((ROOT / "tests/workflow/config.yaml").read_text())
    config["gates"] = ["baseline"]
    config["steps"]["cpu"] |= {"variants": ["sdpa_flash"], "checkpoint": [False], "replicates": 1}
    config["ops"] = {}
    config["timing"]["timeout_s"] = TIME_LIMIT_S
    config["training"]["gp_tiny"] |= {"steps": 100, "eval_every": 5}
    return config


class Workflow:
    """The workflow in a folder of its own, with whatever processes it started."""

    def __init__(self, folder: Path, target: str) -> None:
        self.folder, self.target, self.mark = folder, target, f"{uuid.uuid4()}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(configuration()))

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", self.target, "--cores", "1"]
        with (self.folder / "output").open("w") as output:
            return subprocess.Popen(
                [*command, "--snakefile", str(ROOT / "Snakefile"), "--directory", str(self.folder)],
                cwd=ROOT,
                env=os.environ | {"TNP_FAULTS": self.mark, "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def finish(self) -> list[str]:
        """Runs to the end; what is wrong with how it ended."""
        process = self.start()
        try:
            process.wait(TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return [f"the run did not end within {TIME_LIMIT_S} s"]
        return [] if process.returncode == 0 else [f"the run failed: {self.output()}"]

    def output(self) -> str:
        return " / ".join((self.folder / "output").read_text().split("\n")[-12:])

    def orphans(self) -> list[str]:
        """Command lines of processes that outlive the workflow for too long."""
        deadline = time.monotonic() + ORPHANS_LIVE_S
        while (living := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return living

    def _processes(self) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"TNP_FAULTS={self.mark}".encode() in (process / "environ").read_bytes():
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{process.name} {command.decode(errors='replace')}")
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def torn(self) -> list[str]:
        """Returns a sentence for each file that a reader could not read whole."""
        found = []
        for file in self.folder.glob("data/**/*.parquet"):
            if not any(part.startswith(".") for part in file.relative_to(self.folder).parts):
                try:
                    read_table(file, file.parent.name)
                except StoreError as error:
                    found.append(str(error))
        database = self.folder / "data/results.duckdb"
        try:
            if database.exists():
                identities(database)
        except duckdb.Error as error:
            found.append(f"{database}: {error}")
        for page in self.folder.glob("figures/*.html"):
            if not page.read_text().rstrip().endswith("</html>"):
                found.append(f"{page} is not a whole page")
        return found

    def store(self) -> Path:
        """A database of all rows that were measured."""
        database = self.folder / "measured.duckdb"
        build_database(parquet_files(self.folder / "data/runs"), SQL, database)
        return database

    def weights(self) -> dict[str, torch.Tensor]:
        (path,) = self.folder.glob("data/runs/cpu/checkpoints/gp_tiny--*/final.pt")
        return load_state(path, "cpu")["model"]

    def left_over(self) -> list[str]:
        """Files that no finished run needs; the device's lock is shared and stays."""
        hidden = [
            file
            for name in ("data", "figures")
            for file in self.folder.joinpath(name).rglob("*")
            if file.name.startswith(".") or file.suffix in (".tmp", ".wal")
        ]
        # Torch keeps compiled code there for its next process. Snakemake makes an empty folder,
        # which stays where it is killed while it starts.
        temporary = [
            file
            for file in self.temporary.iterdir()
            if file.name.startswith(("tnp-", "snakemake"))
            and file.suffix != ".lock"
            and (file.is_file() or any(file.iterdir()))
        ]
        return [str(file.relative_to(self.folder)) for file in [*hidden, *temporary]]


def identities(database: Path) -> dict[str, list[tuple]]:
    """Which rows each table has, once each: what a kill met after it had measured is kept, and
    measured again.
    """
    with duckdb.connect(str(database), read_only=True) as store:
        found = {}
        for table, schema in TABLES.items():
            columns = [f'"{name}"' for name in IDENTITY if name in schema.names]
            query = f"select distinct {', '.join(columns) or 'origin'} from {table}"
            found[table] = store.sql(f"{query} order by all").fetchall()
        return found


def counted_twice(database: Path) -> list[str]:
    """Returns a sentence for rows that stand more than once in their run, or in two runs: a job
    that was measured is not measured again after a kill.
    """
    found = []
    with duckdb.connect(str(database), read_only=True) as store:
        for table, schema in TABLES.items():
            if "run_id" not in schema.names:
                continue
            names = [f'"{name}"' for name in IDENTITY + WITHIN_A_RUN if name in schema.names]
            of_a_job = bool({"gate", "config_id"}.intersection(schema.names))  # or of all that ran
            rows = store.sql(
                f"select {', '.join(names)}, count(*) as n_rows, count(distinct run_id) as n_runs "
                f"from {table} group by all "
                f"having n_rows != n_runs or ({of_a_job} and n_runs > 1) order by all limit 3"
            ).fetchall()
            found += [
                f"{table}: {n_rows} rows of {n_runs} runs: {row}" for *row, n_rows, n_runs in rows
            ]
    return found


def training(database: Path) -> list[tuple]:
    """Training's rows but for when they were measured, and where."""
    likelihoods = (name for name in TABLES["training"].names if "log_likelihood" in name)
    columns = ", ".join(("step", "learning_rate", "loss", *likelihoods))
    with duckdb.connect(str(database), read_only=True) as store:
        return store.sql(f"select distinct {columns} from training order by step").fetchall()


def killed(workflow: Workflow, wait: Callable, how: signal.Signals) -> tuple[bool, list[str]]:
    """Returns whether it ran until `wait(process)` had returned, and what its kill harmed."""
    process = workflow.start()
    wait(process)
    if process.poll() is not None:
        return False, [f"the run failed: {workflow.output()}"] if process.returncode else []
    # A terminal's Ctrl-C reaches every process of the group, `kill` the one that is named.
    (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
    found = []
    try:
        process.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        found.append(f"it was still running {TIME_LIMIT_S} s later")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found += [f"process {orphan} outlived its workflow" for orphan in workflow.orphans()]
    return True, found + workflow.torn()


def seconds(most: float) -> Callable[[subprocess.Popen], None]:
    """Returns a function that waits for some seconds or the end of a process."""

    def wait(process: subprocess.Popen) -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(most)

    return wait


def differences(workflow: Workflow, unbroken: Workflow) -> list[str]:
    """Returns what a run that was killed has otherwise than one that was not."""
    store, other = workflow.store(), unbroken.store()
    found = counted_twice(store)
    mine, theirs = identities(store), identities(other)
    for table in TABLES:
        if mine[table] != theirs[table]:
            lost = [row for row in theirs[table] if row not in mine[table]]
            added = [row for row in mine[table] if row not in theirs[table]]
            found.append(
                f"{table}: {len(mine[table])} rows, {len(theirs[table])} unbroken; "
                f"lost {lost[:3]}, added {added[:3]}"
            )
    results = workflow.folder / "data/results.duckdb"
    if results.exists():
        found += counted_twice(results)
        if identities(results) != mine:
            found.append("the database has other rows than were measured")
    if training(store) != training(other):
        found.append("the rows of the training differ")
    mine, theirs = workflow.weights(), unbroken.weights()
    if mine.keys() != theirs.keys() or not all(torch.equal(mine[k], theirs[k]) for k in mine):
        found.append("the trained weights differ")
    return found + [f"{file} was left over" for file in workflow.left_over()]


def run(n: int, folder: Path, random: Random) -> list[str]:
    """Kills `n` times, at most `KILLS_A_RUN` times in one run; what was lost, false or left."""
    unbroken = Workflow(folder / "unbroken", "all")
    start = time.monotonic()
    if found := unbroken.finish():
        return found
    duration_s = time.monotonic() - start
    n_killed = n_runs = 0  # sums over all runs
    while n_killed < n:
        n_runs += 1
        workflow = Workflow(folder / f"run{n_runs}", "all")
        for _ in range(min(KILLS_A_RUN, n - n_killed)):
            # A kill comes within half a run: most kills fall into another job than the last kill.
            after_s, how = random.uniform(0.1, duration_s / 2), random.choice(SIGNALS)
            was_killed, harm = killed(workflow, seconds(after_s), how)
            found += [f"run {n_runs}, {how.name} after {after_s:.2f} s: {what}" for what in harm]
            n_killed += was_killed
            if not was_killed:
                break
        harm = workflow.finish() or differences(workflow, unbroken)
        found += [f"run {n_runs}: {what}" for what in harm]
    return found
