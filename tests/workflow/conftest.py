"""A copy of the checkout in which measuring takes no time, and everything else is real."""

import ast
import copy
import os
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from tests.conftest import made_once
from tests.workflow.forked import Run

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent

# Replaces the four functions that compute; what they were asked for goes to the file `calls`.
FAKE_BENCHMARK = """
def run_isolated(kind, parameters, timeout_s):
    import os
    with open("calls", "a") as calls:
        print("measured", parameters["config_id"], parameters["replicate"], file=calls)
    ended = parameters["config_id"] in os.environ.get("FAKE_KILLED", "").split(",")
    tables = failure_rows(kind, parameters, "killed" if ended else "ok", "")
    for row in [] if ended else tables[f"{kind}s"]:
        row["step_ms_p50" if kind == "step" else "time_ms_p50"] = 1.0
    return with_provenance(tables, parameters["device_slug"], None)
"""
FAKE_GATE = """
def run(gate, device, slug, definitions, timeout_s, unfinished, say, n_shares):
    import os
    with open("calls", "a") as calls:
        print("gate", gate, file=calls)
    if gate in os.environ.get("FAKE_KILLED", "").split(","):
        rows = [ended(gate, "timeout", "no progress in 120 s, 1 of 2 cases")]
        return {"environments": [], "gates": rows, "kernels": [], "code": []}
    row = {"gate": gate, "phase": 0, "implementation": "", "check": "fake", "metric": "error",
           "value": 2.0 if gate in os.environ.get("FAKE_RED", "") else 0.5, "bound": 1.0,
           "mode": "cpu", "status": "ok", "reason": ""}
    row["passed"] = row["value"] <= row["bound"]
    return {"environments": [], "gates": [row], "kernels": [], "code": []}
"""
# No source is read for what depends on it: measurements and gates, which are replaced, have no use
# for it, and a plan spends most of its time on it.
FAKE_DEFINITIONS = """
def of_gate(gate):
    return {}

def reached(start, without=()):
    return {}

def of_operator(op, name, use, slug, without=()):
    return {}
"""
IN_JOBS = f"""
import sys
if "snakemake.workflow" not in sys.modules:
{textwrap.indent(FAKE_DEFINITIONS, "    ")}
"""
FAKE_FIGURES = """
import os
from pathlib import Path

FIGURES = ("speedup", "memory", "matrix")

def finding(name, database):
    return f"what {name} found"

def render_index(path, findings):
    path.write_text("; ".join(findings.values()))

def render(name, database, html_path, image_path):
    if name in os.environ.get("FAKE_BROKEN", ""):
        raise ValueError("nothing to draw")
    html_path.parent.mkdir(parents=True, exist_ok=True)
    for path in (html_path, image_path):
        path.write_text(name)
    return f"what {name} found"
"""
# Without the GPU, profiles are taken in the script's own process, with a false `ncu`.
FAKE_GPU = {
    "tnp/bench/provenance.py": """
def device_slug():
    return "nvidia-h200"
""",
    "tnp/bench/isolate.py": """
def run_isolated(kind, parameters, timeout_s):
    from tnp.bench.profiles import measure_profiles
    tables = {"profiles": measure_profiles(parameters)}
    return with_provenance(tables, parameters["device_slug"], None)
""",
}
FAKE_TRAINING = """
def run(parameters, device, checkpoint_dir, on_row):
    on_row({"run": parameters["run"], "step": 1, "heldout_log_likelihood": 0.0})
"""


STARTED: list[Run] = []  # by the test that runs


def configuration() -> dict:
    return yaml.safe_load((HERE / "config.yaml").read_text())


def small() -> dict:
    """Returns the configuration of two steps and an operator: one of them has a kernel of ours."""
    config = configuration()
    config["variants"] = {name: {"attention": name} for name in ("sdpa_flash", "separate")}
    one = {"variants": ["sdpa_flash", "separate"], "checkpoint": [False], "replicates": 1}
    config["steps"]["cpu"] |= one
    config["gates"] = ["baseline", "checkpointing", "kernels", "op--attention--separate"]
    return config | {"training": {}}


def changed(config: dict, path: str | Sequence[str | int], value: object) -> dict:
    """Returns a copy of a configuration with `value` at `path`, keys or text with points between.

    The empty path stands for the whole.
    """
    made = {"": copy.deepcopy(config)}
    *parents, last = ["", *(path.split(".") if isinstance(path, str) else path)]
    place = made
    for parent in parents:
        place = place[parent]
    place[last] = value
    return made[""]


class Checkout:
    """A working copy of the workflow to run, break and edit: two steps and an operator, and the
    gates that they wait for.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("workflow", "profiles", "tnp"):
            shutil.copytree(
                ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        shutil.copy(ROOT / "Snakefile", folder)
        self.config = small()
        self.append("tnp/bench/isolate.py", FAKE_BENCHMARK)
        self.append("workflow/gate_process.py", FAKE_GATE)
        self.append("workflow/sources.py", IN_JOBS)
        (folder / "tnp/figures/__init__.py").write_text(FAKE_FIGURES)
        (folder / "tnp/train/recorded_runs.py").write_text(FAKE_TRAINING)

    def append(self, file: str, text: str) -> None:
        with open(self.folder / file, "a") as stream:
            stream.write(text)

    def edit(self, file: str, definition: str) -> None:
        """One statement more in a function or class: what is not reached voids nothing."""
        path = self.folder / file
        lines = path.read_text().splitlines(keepends=True)
        body = next(
            node.body
            for node in ast.parse("".join(lines)).body
            if getattr(node, "name", None) == definition
        )
        lines.insert(body[-1].end_lineno, " " * body[-1].col_offset + "EDITED = True\n")
        path.write_text("".join(lines))

    @property
    def temporary(self) -> Path:
        """TMPDIR of its processes, whose locks are then nobody else's."""
        folder = self.folder.parent / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its processes, which share what Python compiled."""
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return inherited | {"TMPDIR": str(self.temporary)}

    def start(self, *arguments: str, **environment: str) -> Run:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(self.config))
        STARTED.append(Run(self.folder, arguments, self.environment | environment))
        return STARTED[-1]

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Returns exit status and everything printed."""
        return self.start(*arguments, **environment).end()

    def calls(self) -> list[str]:
        file = self.folder / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def measured(self) -> list[str]:
        start = "measured "
        return [call.removeprefix(start) for call in self.calls() if call.startswith(start)]

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink(missing_ok=True)

    def files(self, table: str, stem: str) -> list[Path]:
        """Returns the results of a job on the CPU."""
        return sorted(self.folder.glob(f"data/runs/cpu/{table}/{stem}--*-*.parquet"))

    def rows(self, table: str, device: str = "cpu") -> list[dict]:
        import pyarrow.parquet as pq

        files = sorted(self.folder.glob(f"data/runs/{device}/{table}/*.parquet"))
        return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]

    def store(self, sql: str) -> list[tuple]:
        """Returns the rows of a query of the built store."""
        import duckdb

        with duckdb.connect(str(self.folder / "data/results.duckdb"), read_only=True) as store:
            return store.execute(sql).fetchall()


@pytest.fixture(autouse=True)
def _nothing_outlives_its_test() -> Iterator[None]:
    yield
    while STARTED:
        STARTED.pop().kill()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """One in which nothing has run. Its plan reads no source either: what an edit voids is asked of
    `finished`.
    """
    made = Checkout(tmp_path / "checkout")
    made.append("workflow/sources.py", FAKE_DEFINITIONS)
    return made


@pytest.fixture(scope="session")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkout in which everything has run once, for all processes of the tests."""

    def run_once(folder: Path) -> None:
        status, output = everything(Checkout(folder / "checkout")).run("all", "gates")
        assert status == 0, output

    return made_once(tmp_path_factory, "finished", run_once) / "checkout"


def everything(checkout: Checkout) -> Checkout:
    """With training; nothing waits for gate `kernels`."""
    checkout.config["steps"]["cpu"]["checkpoint"] = [False, True]
    checkout.config["training"] = configuration()["training"]
    return checkout


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Checkout:
    """Returns a copy of the finished checkout, at the same modification times."""
    folder = tmp_path / "checkout"
    shutil.copytree(_finished, folder, copy_function=shutil.copy2)
    copy = Checkout.__new__(Checkout)
    copy.folder = folder
    copy.config = yaml.safe_load((folder / "config.yaml").read_text())
    copy.forget_calls()
    return copy
