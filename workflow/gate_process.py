"""A gate's own process: `python -m workflow.gate_process GATE DEVICE RESULT PARENT`.

A kernel that crashes the process, or never ends, is this gate's result and nobody else's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tnp.bench.isolate import device_lock, die_with_parent
from tnp.gates import GATES, blocking_reason


def run(gate: str, device: str, slug: str, timeout_s: float) -> dict[str, list[dict]]:
    """Table → rows of `gate` on `device`, provenance not yet added."""
    # Triton reads the switch when it is imported: on the CPU, kernels run in its interpreter.
    interpret = {"TRITON_INTERPRET": "1"} if device == "cpu" else {}
    with tempfile.TemporaryDirectory(prefix="tnp-gate-") as folder, device_lock(slug, shared=True):
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", __name__, gate, device, result, str(os.getpid())]
        try:
            code = subprocess.run(command, env=os.environ | interpret, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            return _not_finished(gate, f"not finished after {timeout_s:g} s")
        if not result.exists():
            return _not_finished(gate, f"its process ended with exit code {code}")
        return json.loads(result.read_text())


def red(files: Iterable[str], implementations: Mapping[str, str]) -> str | None:
    """Why the gates recorded in `files` forbid these implementations (operator → name), or None."""
    from tnp.store import read_table

    rows = [row for file in files for row in read_table(Path(file), "gates").to_pylist()]
    return blocking_reason(rows, implementations)


def _not_finished(gate: str, reason: str) -> dict[str, list[dict]]:
    row = {
        "gate": gate,
        "phase": GATES[gate].phase,
        "op": GATES[gate].op,
        "implementation": "",
        "check": "error",
        "metric": "",
        "status": "error",
        "reason": reason,
    }
    return {"environments": [], "gates": [row], "kernels": []}


def main(gate: str, device: str, result: str, parent: str) -> None:
    die_with_parent(int(parent))
    from tnp.bench.child import require_device
    from tnp.bench.provenance import environment
    from tnp.gates import run_gate

    require_device(device)
    report = {"environments": [environment(device)]} | run_gate(gate, device)
    temporary = Path(f"{result}.tmp")
    temporary.write_text(json.dumps(report))
    os.replace(temporary, result)


if __name__ == "__main__":
    main(*sys.argv[1:])
