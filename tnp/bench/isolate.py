"""Runs each measurement in its own process, so that a crash or a compiled state stays there."""

import uuid
from datetime import UTC, datetime

from tnp.bench.outcome import Rows, failure_rows, only, together
from tnp.bench.process import run_child
from tnp.store.schemas import TABLES


def run_isolated(kind: str, parameters: dict, timeout_s: float) -> Rows:
    """Measures one configuration in a child process. Returns {table: rows}, provenance included.

    A failed measurement does not raise. Running out of memory, missing support, a crash, a kill and
    the time limit give rows with a status and a reason. The caller holds the device's lock.

    If one of an operator's implementations ends the process, its row says so, and the others are
    measured together without it. If nobody knows which one it was, each is measured alone.

    Args:
        kind: "step" (`tnp.bench.steps.measure_step`), "op" (`tnp.bench.measure.measure_op`),
            "prediction" (`tnp.bench.predictions.measure_predictions`), "generation"
            (`tnp.bench.language.measure_language`), "profile"
            (`tnp.bench.profiles.measure_profiles`), "host" (`tnp.bench.host.measure_host`) or
            "host_step" (`tnp.bench.host_steps.measure_host_steps`).
        parameters: the configuration, as JSON can hold it.
        timeout_s: seconds until a child is killed.

    Raises:
        DeviceMissing: the device of the parameters is not here.
    """
    tables, suspects, parameters = _run_once(kind, parameters, timeout_s)
    names = list(parameters.get("implementations", []))
    if not suspects or len(names) == 1:
        return tables
    if len(suspects) == 1:
        groups = [[name for name in names if name not in suspects]]
        theirs = {parameters["implementations"][name] for name in suspects}
        tables["ops"] = [row for row in tables["ops"] if row["config_id"] in theirs]
    else:
        groups, tables = [[name] for name in names], {}
    rest = (run_isolated(kind, only(parameters, group), timeout_s) for group in groups)
    return together([tables, *rest])


def _run_once(kind: str, parameters: dict, timeout_s: float) -> tuple[Rows, list[str], dict]:
    """Runs one child. Returns its tables, the contenders to blame, and its parameters."""
    report = run_child(["tnp.bench.child", kind], parameters, timeout_s)
    parameters = parameters | report.get("listed", {})
    # A process that dies while it shuts down has measured all the same.
    measured = "tables" in report
    tables: Rows = (
        report["tables"] if measured else failure_rows(kind, parameters, *report["failure"])
    )
    environment = report.get("environment")  # missing if the child died early
    if environment is not None:
        tables["environments"] = [environment]
    identity = environment and environment["environment_id"]
    suspects = [] if measured else report.get("suspects", [])
    return with_provenance(tables, parameters["device_slug"], identity), suspects, parameters


def with_provenance(tables: Rows, device: str, environment_id: str | None) -> Rows:
    """Returns the rows of one process with device, environment, time and a new run id."""
    provenance = {
        "device": device,
        "environment_id": environment_id,
        "recorded_at": datetime.now(UTC),
    }
    run = {"run_id": uuid.uuid4().hex[:16]}
    return {
        table: [row | provenance | (run if "run_id" in TABLES[table].names else {}) for row in rows]
        for table, rows in tables.items()
    }
