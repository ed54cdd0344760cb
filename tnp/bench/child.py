"""The process a measurement runs in: `python -m tnp.bench.child KIND PARAMETERS RESULT PARENT`.

Writes to RESULT what is known so far, so that it outlives the process: "environment", a row;
"suspects", the implementations of an operator to blame should this process end now; and "tables",
table → rows, or "failure", status and reason of what the measurement as a whole raised.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tnp.bench.isolate import die_with_parent
from tnp.bench.outcome import Unsupported, classify


def main(kind: str, parameters_path: str, result_path: str, parent: str) -> None:
    started = time.perf_counter()
    with reporting(parameters_path, result_path, parent) as (parameters, note):
        if kind == "step":
            from tnp.bench.steps import measure_step

            note(tables=measure_step(parameters, started))
        else:
            from tnp.bench.operators import measure_op

            note(tables=measure_op(parameters, started, lambda names: note(suspects=names)))


@contextmanager
def reporting(
    parameters_path: str, result_path: str, parent: str
) -> Iterator[tuple[dict, Callable[..., None]]]:
    """What a child was asked for, and `note(**known)`, which writes to its report at once.

    "environment" is noted first, and as "failure" whatever is raised inside.
    """
    die_with_parent(int(parent))
    parameters = json.loads(Path(parameters_path).read_text())
    report: dict[str, object] = {}

    def note(**known: object) -> None:
        report.update(known)
        _write(Path(result_path), report)

    try:
        require_device(parameters["device"])
        from tnp.bench.provenance import environment

        note(environment=environment(parameters["device"]))
        yield parameters, note
    except Exception as error:  # whatever it was, it is this configuration's result
        traceback.print_exc()
        note(failure=classify(error))


def require_device(device: str) -> None:
    """Raises Unsupported if PyTorch cannot use `device` ("cuda" or "cpu") here."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Unsupported(f"no CUDA device is visible to PyTorch {torch.__version__}")


def _write(path: Path, report: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report))
    os.replace(temporary, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
