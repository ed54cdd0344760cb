"""Writes this device's fastest kernels and implementations into its tuned table.

Kernels are judged by their trials, implementations by the operator benchmarks.
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
        named = ", ".join(sorted(found)) or "none"
        raise ValueError(f"rows of {device} name compute capability {named}: one is expected")
    return int(found.pop().replace(".", ""))


with job("tune", snakemake.log[0]) as say:
    trials, timed = rows(snakemake.input.trials, "ops"), rows(snakemake.input.ops, "ops")
    kernels = entries.of_operations(trials)
    implementations = entries.of_operators(timed)
    if not kernels and not implementations:
        say("no timed rows: tuning needs an NVIDIA GPU, and entries under `tuning` in config.yaml")
    else:
        target = Target("cuda", device, capability(snakemake.input.environments))
        path = tuned_tables.write(target, [*kernels, *implementations], tuned_tables.COMMITTED)
        say(
            f"{len(kernels)} kernels and {len(implementations)} implementations: {path}; "
            "implementations ran with the earlier table's kernels, so run `snakemake tune` again "
            "to time those whose kernels changed"
        )
