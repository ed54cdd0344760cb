"""Runs the profiled process: `python -m tnp.bench.profile_launch ASKED FAILURE`, under `ncu`.

The file ASKED has a job's parameters as JSON, with `implementation` and `pass`. The pass runs once
before the profiler is on, so that kernels are compiled, and then once for the profiler. If that
fails, the file FAILURE gets status and reason as JSON.
"""

import json
import sys
import traceback
from pathlib import Path

import torch

from tnp.bench.child import started_by_snakemake
from tnp.bench.contenders import Contenders
from tnp.experiment.failures import classify


def main(asked: str, failure: str) -> None:
    """Exits with code 1 if the pass did not run."""
    try:
        launch(json.loads(Path(asked).read_text()))
    except Exception as error:  # any failure is this pass's result
        status, reason = classify(error)
        if status != "unsupported":
            traceback.print_exc()
        Path(failure).write_text(json.dumps([status, reason]))
        sys.exit(1)


def launch(parameters: dict) -> None:
    """Launches a pass once to compile, and once between the profiler's start and stop.

    It has one set of inputs: the profiler empties the caches before each kernel.
    """
    name = parameters["implementation"]
    device = torch.device(parameters["device"])
    workload = Contenders(parameters, parameters["pass"], device, n_sets=1)
    workload.require_supported(name)
    (call,) = workload.calls(name)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(*started_by_snakemake(sys.argv[1:]))
