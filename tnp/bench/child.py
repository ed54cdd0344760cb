"""Runs one measurement in its own process: `python -m tnp.bench.child KIND PARENT REPORT`.

`reporting` is the child's side of `tnp.bench.process.run_child`, for every kind of measurement. A
measurement reports "tables" (table → rows), or rows without a table, "timed" or "compared".
Operators also report "suspects", the contenders to blame if the process dies now, and "listed", the
contenders that a job of all trials has.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tnp.bench.outcome import JOINT
from tnp.bench.process import DeviceMissing, die_with_parent
from tnp.dispatch import devices
from tnp.dispatch.devices import Target
from tnp.experiment.failures import classify
from tnp.experiment.gpu_memory import apply_limit


def main(kind: str, parent: str, report: str) -> None:
    started = time.perf_counter()
    with reporting(parent, report) as (parameters, note):
        if kind == "step":
            from tnp.bench.steps import measure_step

            note(tables=measure_step(parameters, started, lambda tables: note(tables=tables)))
        elif kind == "prediction" and parameters["study"] == JOINT:
            from tnp.bench.joint import measure_joint

            note(tables=measure_joint(parameters, started))
        elif kind == "prediction":
            from tnp.bench.predictions import measure_predictions

            note(tables=measure_predictions(parameters, started))
        elif kind == "generation":
            from tnp.bench.language import measure_language

            note(tables=measure_language(parameters, started, lambda doing: note(doing=doing)))
        elif kind == "host":
            from tnp.bench.host import measure_host

            note(tables={"host_calls": measure_host(parameters)})
        elif kind == "host_step":
            from tnp.bench.host_steps import measure_host_steps

            rows = measure_host_steps(parameters, lambda doing: note(doing=doing))
            note(tables={"host_steps": rows})
        elif kind == "profile":
            from tnp.bench.profiles import measure_profiles

            note(tables={"profiles": measure_profiles(parameters)})
        elif kind == "costs":
            from tnp.bench.costs import measure_costs

            note(timed=measure_costs(parameters))
        elif kind == "closeness":
            from tnp.bench.closeness import measure_closeness

            note(compared=measure_closeness(parameters))
        else:
            from tnp.bench.contenders import listed
            from tnp.bench.measure import measure_op

            if changes := listed(parameters):
                parameters |= changes
                note(listed=changes)
            note(tables=measure_op(parameters, started, lambda names: note(suspects=names)))


@contextmanager
def reporting(parent: str, report: str) -> Iterator[tuple[dict, Callable[..., None]]]:
    """Yields the child's parameters and `note(**known)`, which reports at once.

    It first notes "environment", a row. If the block raises, it notes "failure", status and reason.
    If the device is not here, it notes "missing", and the block does not run.
    """
    die_with_parent(int(parent))
    parameters = json.load(sys.stdin)

    def note(**known: object) -> None:
        os.write(int(report), f"{json.dumps(known)}\n".encode())

    try:
        require_device(parameters["device_slug"])
        from tnp.bench.provenance import environment

        note(environment=environment(parameters["device"]))
        yield parameters, note
    except DeviceMissing as error:
        note(missing=str(error))
    except Exception as error:  # any failure is this configuration's result
        traceback.print_exc()
        note(failure=classify(error))


def require_device(slug: str) -> None:
    """Raises DeviceMissing unless PyTorch can use the device `slug`: "cpu" or a GPU's.

    Afterwards this process takes no more GPU memory than TNP_GPU_GB allows.
    """
    require_visible(slug)
    import torch

    if slug != "cpu" and not torch.cuda.is_available():
        raise DeviceMissing(
            f"device {slug!r} is here, but PyTorch {torch.__version__} cannot use it: install a "
            "PyTorch built for CUDA, and the driver that it needs"
        )
    if slug != "cpu":
        apply_limit()


def require_gpu() -> Target:
    """Returns the first GPU. Raises DeviceMissing without a GPU that PyTorch can use."""
    from tnp.bench.provenance import device_slug

    slug = device_slug()
    if slug == "cpu":
        raise DeviceMissing("none is visible here")
    require_device(slug)
    import torch

    return devices.of_device(torch.device("cuda"))


def require_visible(slug: str) -> None:
    """Raises DeviceMissing unless `slug` is "cpu" or the first GPU's. Imports no torch."""
    if slug == "cpu":
        return
    from tnp.bench.provenance import device_slug

    found = device_slug()
    if found != slug:
        here = "no NVIDIA GPU is visible" if found == "cpu" else f"the first GPU is {found!r}"
        raise DeviceMissing(f"device {slug!r} is not here: {here}")


def started_by_snakemake(arguments: list[str]) -> list[str]:
    """Returns the arguments. Without any, or with an option, explains usage and exits."""
    if arguments and not arguments[0].startswith("-"):
        return arguments
    print("usage: `snakemake` starts this process and says what it is to run")
    raise SystemExit(0 if "--help" in arguments else 2)


if __name__ == "__main__":
    main(*started_by_snakemake(sys.argv[1:]))
