"""Profiles one implementation of an operator: Nsight Compute counts what each kernel does.

Each pass is launched once in a process of its own (`tnp.bench.profile_launch`), under Nsight
Compute. Its times are no benchmark: kernels run one by one with empty caches. Profiles say what
limits a kernel.
"""

import json
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from tnp.bench import ncu
from tnp.bench.outcome import of_profile, passes
from tnp.experiment.failures import classify


class NotLaunched(RuntimeError):
    """Says that the pass did not run: status and reason."""


def measure_profiles(parameters: dict) -> list[dict[str, object]]:
    """Returns rows of table "profiles" without provenance: one a kernel of each pass.

    A pass without a profile has one row that says why. Its status is "unsupported" if Nsight
    Compute is missing, the driver withholds its counters, or the implementation does not run here.

    Args:
        parameters: what `tnp.bench.outcome.op_job` gives, with `implementation`, `sections` and
            `reports`, the folder that keeps what Nsight Compute's own window opens.
    """
    return [row for pass_ in passes(parameters) for row in _of_pass(parameters, pass_)]


def _of_pass(parameters: dict, pass_: str) -> list[dict[str, object]]:
    known = of_profile(parameters, pass_)
    try:
        program = ncu.executable()
        kernels = _profiled(program, parameters, pass_)
    except Exception as error:  # any failure is this pass's result
        status, reason = error.args if isinstance(error, NotLaunched) else classify(error)
        if status != "unsupported":
            traceback.print_exc()
        return [known | {"status": status, "reason": reason}]
    outcome = {"status": "ok", "reason": None, "ncu": ncu.version(program)}
    return [known | outcome | kernel for kernel in kernels]


def _profiled(program: str, parameters: dict, pass_: str) -> list[dict]:
    """Returns rows of the kernels of one pass."""
    report = Path(parameters["reports"], f"{pass_}.ncu-rep").absolute()
    with TemporaryDirectory() as folder:
        asked, failure = Path(folder, "asked.json"), Path(folder, "failure.json")
        asked.write_text(json.dumps(parameters | {"pass": pass_}))
        launch = (sys.executable, "-m", "tnp.bench.profile_launch", str(asked), str(failure))
        try:
            return ncu.profile(program, parameters["sections"], report, launch)
        except ncu.Failed:
            # Nsight Compute saw that nothing was launched, and the launch knows why.
            if failure.exists():
                raise NotLaunched(*json.loads(failure.read_text())) from None
            raise
