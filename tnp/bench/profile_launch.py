"""The process that is profiled: `python -m tnp.bench.profile_launch ASKED FAILURE`, under `ncu`.

ASKED is a file with a job's parameters as JSON, among them `implementation` and `pass`. Inputs are
drawn and the pass runs once before the profiler is switched on, so that kernels are compiled and
libraries have chosen, and then once for it. FAILURE, a file, gets status and reason as JSON where
that could not be done.
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
    """Exit code 1 where the pass did not run."""
    try:
        launch(json.loads(Path(asked).read_text()))
    except Exception as error:  # whatever it was, it is this pass's result
        status, reason = classify(error)
        if status != "unsupported":
            traceback.print_exc()
        Path(failure).write_text(json.dumps([status, reason]))
        sys.exit(1)


def launch(parameters: dict) -> None:
    """One launch of a pass between the profiler's start and stop, after one that compiles.

    Of inputs there is one set: the profiler empties the caches before each kernel.
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
