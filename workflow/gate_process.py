"""Gates, each in a process of its own: `python -m workflow.gate_process PARENT REPORT`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tnp.bench.process import run_child
from tnp.gates import blocking_reason
from tnp.gates import gate as about


def run(
    gate: str, device: str, slug: str, definitions: dict[str, str], timeout_s: float
) -> dict[str, list[dict]]:
    """Table → rows of `gate` on `device`, provenance not yet added.

    `definitions` are the hashes of what it tests, by name, for table `code`.
    A gate whose process crashes, is killed or takes longer than `timeout_s` seconds is a row that
    says so. Raises DeviceMissing where the device `slug` is not here. The caller holds its lock.
    """
    parameters = {"gate": gate, "device": device, "device_slug": slug}
    parameters["definitions"] = definitions
    # Triton reads the switch when it is imported: on the CPU, kernels run in its interpreter.
    interpret = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    report = run_child([__name__], parameters, timeout_s, interpret)
    tables = report.get("tables") or _not_finished(gate, *report["failure"])
    return {"environments": [report["environment"]] if "environment" in report else []} | tables


def red(files: Sequence[Path], implementations: Mapping[str, str]) -> str | None:
    """Why the gates recorded in `files` forbid these implementations (operator → name), or None."""
    from tnp.store import read_table

    missing = [file for file in files if not file.is_file()]
    if missing:
        raise RuntimeError(f"gate {missing[0].stem} has no result: snakemake gates")
    rows = [row for file in files for row in read_table(file, "gates").to_pylist()]
    return blocking_reason(rows, implementations)


def _not_finished(gate: str, status: str, reason: str) -> dict[str, list[dict]]:
    row = {
        "gate": gate,
        "phase": about(gate).phase,
        "op": about(gate).op,
        "implementation": "",
        "check": status,
        "metric": "",
        "status": status,
        "reason": reason,
    }
    return {"gates": [row], "kernels": [], "code": []}


def main(parent: str, report: str) -> None:
    from tnp.bench.child import reporting

    with reporting(parent, report) as (parameters, note):
        from tnp.bench.evidence import Code, packages
        from tnp.bench.kernel_code import launches
        from tnp.gates import run_gate

        code = Code(packages=packages(), definitions=parameters["definitions"])
        with launches() as code.kernels:
            tables = run_gate(parameters["gate"], parameters["device"])
        note(tables=tables | {"code": code.rows()})


if __name__ == "__main__":
    from tnp.bench.child import started_by_snakemake

    main(*started_by_snakemake(sys.argv[1:]))
