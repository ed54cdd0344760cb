"""What `snakemake tune` has to time, and what that depends on."""

from itertools import product

from workflow import sources
from workflow.plan import operator_sizes


def problems(config: dict, device: str, slug: str) -> dict[str, dict]:
    """{readable id: parameters} of every operation at every shape of section `tuning`.

    None without a GPU.
    """
    tuning = config.get("tuning", {"shapes": [], "operations": []})
    if device != "cuda":
        return {}
    return {
        f"{operation}--{shape}": {
            "operation": operation,
            **operator_sizes(config, "attention", shape),
            "dtype": tuning["dtype"],
            "timing": config["timing"],
            "device": device,
            "device_slug": slug,
        }
        for shape, operation in product(tuning["shapes"], tuning["operations"])
    }


def operator_jobs(config: dict, ops: dict[str, dict]) -> list[tuple[str, int]]:
    """(id, replicate) of those operator benchmarks that implementations are chosen by.

    `ops` are the benchmarks of this device; those of a shape of section `tuning` count, and the
    other shapes tell how good the choice is where nothing was tuned.
    """
    shapes = config.get("tuning", {"shapes": []})["shapes"]
    return [
        (config_id, replicate)
        for config_id, parameters in ops.items()
        if parameters.get("shape") in shapes and "auto" in parameters["implementations"]
        for replicate in range(1, parameters["replicates"] + 1)
    ]


def code() -> dict[str, str]:
    """Of our kernels and of what times them; not of the table, which voids no trial."""
    ours = [{"op": "attention", "implementation": name} for name in ("separate", "fused")]
    return sources.of_trials(ours)
