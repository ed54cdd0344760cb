"""Runs each gate in a process of its own: `python -m workflow.gate_process PARENT REPORT`."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tnp.bench.evidence import Code
from tnp.bench.process import run_child
from tnp.experiment.code_hash import digest
from tnp.gates import NOT_FINISHED, Blocked, blocked, ended
from tnp.gates.progress import Progress

SAID_EVERY_S = 30.0  # a long gate reports its progress this often


def run(
    gate: str,
    device: str,
    slug: str,
    definitions: dict[str, str],
    timeout_s: float,
    unfinished: Path,
    say: Callable[[str], None],
    n_shares: int = 1,
) -> dict[str, list[dict]]:
    """Runs `gate` on `device` and returns table → rows, without provenance.

    A gate with several shares first runs each in a process of its own, side by side. The last
    process takes the parts that these have finished, and does what is left.

    A gate's process may crash, be killed, or make no check for `timeout_s` seconds. Then its checks
    are kept, and one more row says so. The caller holds the device's lock.

    Args:
        gate: name of the gate.
        device: "cuda" or "cpu".
        slug: name of the device.
        definitions: name → hash of the code that the gate tests, for table `code`.
        timeout_s: seconds without a check after which the gate is ended.
        unfinished: the gate's progress file. It exists already if an earlier run was ended, and it
            stays if this run is ended.
        say: called with the gate's progress every half a minute.
        n_shares: number of processes that share the gate's cases.

    Raises:
        DeviceMissing: the device `slug` is not here.
    """
    parameters = {"gate": gate, "device": device, "device_slug": slug}
    parameters |= {"definitions": definitions, "unfinished": str(unfinished.absolute())}
    # On the CPU, kernels run in Triton's interpreter. Triton reads the switch when it is imported.
    interpret = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    if n_shares > 1:
        _run_shares(parameters, timeout_s, interpret, say, n_shares)
    report = run_child([__name__], parameters, timeout_s, interpret, _now_and_then(say))
    tables = report.get("tables")
    if tables is None:
        status, reason = report["failure"]
        kept = Progress.read(unfinished)
        rows = [*kept.rows, ended(gate, status, f"{reason}, {kept}" if kept.rows else reason)]
        code = Code(kept.kernels, report.get("packages", {}), definitions)
        tables = {"gates": rows, "kernels": [], "code": code.rows()}
    if not any(row["status"] in NOT_FINISHED for row in tables["gates"]):
        unfinished.unlink(missing_ok=True)
    return {"environments": [report["environment"]] if "environment" in report else []} | tables


def _run_shares(
    parameters: dict, timeout_s: float, environment: dict[str, str], say: Callable, n_shares: int
) -> None:
    """Runs a gate's shares side by side, and merges their parts into its progress file.

    A share that fails leaves its parts to the gate's last process, which reports the failure.
    """
    unfinished, ended = Path(parameters["unfinished"]), threading.Event()

    def run_share(number: int) -> None:
        file = unfinished.with_suffix(f".{number}.jsonl")
        if unfinished.exists():
            shutil.copy(unfinished, file)
        of = parameters | {"unfinished": str(file), "share": (number, n_shares)}
        report = _now_and_then(lambda text: say(f"share {number + 1} of {n_shares}: {text}"))

        def heard(known: dict) -> None:
            if ended.is_set():
                raise InterruptedError("another share or the workflow has ended")
            report(known)

        run_child([__name__], of, timeout_s, environment, heard)

    def merge() -> None:
        Progress.merge(unfinished, sorted(unfinished.parent.glob(f"{unfinished.stem}.*.jsonl")))

    merge()  # what a run that was killed left behind
    with ThreadPoolExecutor(n_shares) as pool:
        shares = [pool.submit(run_share, number) for number in range(n_shares)]
        try:
            for share in shares:
                share.result()
        finally:  # an interrupt, or a share without its device, ends the others
            ended.set()
    merge()


def _now_and_then(say: Callable[[str], None]) -> Callable[[dict], None]:
    """Returns a function that takes a gate's notes, and reports progress every half a minute."""
    last = time.monotonic()

    def heard(known: dict) -> None:
        nonlocal last
        if time.monotonic() - last >= SAID_EVERY_S:
            last = time.monotonic()
            say(known.get("progress", "starting"))

    return heard


def stopped(files: Sequence[Path], implementations: Mapping[str, str]) -> Blocked | None:
    """Returns why the gates in `files` stop these implementations (operator → name), or None."""
    from tnp.store.files import read_table

    rows = [row for file in files for row in read_table(file, "gates").to_pylist()]
    return blocked(rows, implementations)


def main(parent: str, report: str) -> None:
    from tnp.bench.child import reporting

    with reporting(parent, report) as (parameters, note):
        from tnp.bench.evidence import packages
        from tnp.dispatch.private import prepare_interpreter_once
        from tnp.experiment.gpu_memory import limit_gb
        from tnp.experiment.kernel_code import launches
        from tnp.gates import Share, run_gate

        if parameters["device"] == "cpu":
            prepare_interpreter_once()
        code = Code(packages=packages(), definitions=parameters["definitions"])
        note(packages=code.packages)
        of = [code.packages, code.definitions, parameters["device_slug"], limit_gb()]
        progress = Progress(
            Path(parameters["unfinished"]),
            digest(json.dumps(of, sort_keys=True)),
            lambda progress: note(progress=str(progress)),
        )
        with launches() as progress.launched:
            share = [Share(*parameters["share"])] if "share" in parameters else []
            tables = run_gate(parameters["gate"], parameters["device"], progress, *share)
        code.kernels = progress.kernels | progress.launched
        note(tables=tables | {"code": code.rows()})


if __name__ == "__main__":
    from tnp.bench.child import started_by_snakemake

    main(*started_by_snakemake(sys.argv[1:]))
