"""Enters what won on this device in its tuned table: kernels by their trials, implementations by
the operator benchmarks.
"""

from pathlib import Path

from tnp.dispatch import tuned_tables
from tnp.dispatch.devices import Target
from tnp.store.files import read_table
from tnp.tuning import entries
from workflow.jobs import job

device = snakemake.params.device


def rows(files: list[str], table: str) -> list[dict]:
    return [row for file in files for row in read_table(Path(file), table).to_pylist()]


def capability(environments: list[str]) -> int:
    """Returns the compute capability of the GPU that was measured: 90 for "9.0"."""
    found = {row["compute_capability"] for row in rows(environments, "environments")} - {None}
    if len(found) != 1:
        raise ValueError(f"rows of {device} are of compute capability {found}: it must be one")
    return int(found.pop().replace(".", ""))


with job("tune", snakemake.log[0]) as say:
    trials, timed = rows(snakemake.input.trials, "ops"), rows(snakemake.input.ops, "ops")
    kernels = entries.of_operations(trials)
    implementations = entries.of_operators(timed)
    if not kernels and not implementations:
        say("nothing to do: tuning needs an NVIDIA GPU and what config.yaml's `tuning` names")
    else:
        target = Target("cuda", device, capability(snakemake.input.environments))
        path = tuned_tables.write(target, [*kernels, *implementations], tuned_tables.COMMITTED)
        say(
            f"{len(kernels)} kernels and {len(implementations)} implementations: {path}; "
            "implementations were timed with the kernels of the table before: `snakemake tune` "
            "once more times those again whose kernels changed"
        )
