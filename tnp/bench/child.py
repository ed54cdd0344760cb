"""The process a measurement runs in: `python -m tnp.bench.child KIND PARAMETERS RESULT PARENT`.

Writes {"environment": row, "tables": {table: rows}} to RESULT: the environment before anything
that can end the process, the tables when they are known.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

from tnp.bench.isolate import die_with_parent
from tnp.bench.outcome import Unsupported, classify, failure_rows


def main(kind: str, parameters_path: str, result_path: str, parent: str) -> None:
    started = time.perf_counter()
    die_with_parent(int(parent))
    parameters = json.loads(Path(parameters_path).read_text())
    report: dict[str, object] = {}
    try:
        require_device(parameters["device"])
        from tnp.bench.provenance import environment

        report["environment"] = environment(parameters["device"])
        _write(Path(result_path), report)
        report["tables"] = _measure(kind, parameters, started)
    except Exception as error:  # whatever it was, it is this configuration's result
        traceback.print_exc()
        status, reason = classify(error)
        report["tables"] = failure_rows(kind, parameters, status, reason)
    _write(Path(result_path), report)


def require_device(device: str) -> None:
    """Raises Unsupported if PyTorch cannot use `device` ("cuda" or "cpu") here."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"no CUDA device is visible to PyTorch {torch.__version__}")


def _measure(kind: str, parameters: dict, started: float) -> dict[str, list[dict]]:
    if kind == "step":
        from tnp.bench.steps import measure_step as measure
    else:
        from tnp.bench.operators import measure_op as measure
    return measure(parameters, started)


def _write(path: Path, report: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report))
    os.replace(temporary, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
