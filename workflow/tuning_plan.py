"""What `snakemake tune` has to time, and what that depends on."""

import os
from itertools import product

from workflow import sources
from workflow.plan import attention_sizes


def problems(config: dict, device: str, slug: str) -> dict[str, dict]:
    """{readable id: parameters} of every operation at every shape of section `tuning`.

    None without a GPU. Raises ValueError for a shape that config.yaml does not define.
    """
    tuning = config.get("tuning", {"shapes": [], "operations": []})
    for shape in tuning["shapes"]:
        if shape not in config["shapes"]:
            known = ", ".join(config["shapes"])
            raise ValueError(
                f"config.yaml: tuning.shapes: unknown shape {shape!r}: choose from {known}"
            )
    if device != "cuda":
        return {}
    return {
        f"{operation}--{shape}": {
            "operation": operation,
            **attention_sizes(config, shape),
            "dtype": tuning["dtype"],
            "timing": config["timing"],
            "device": device,
            "device_slug": slug,
        }
        for shape, operation in product(tuning["shapes"], tuning["operations"])
    }


def source_files() -> list[str]:
    """Files of our kernels and of what times them; not the table, which voids no trial."""
    ours = (
        sources.of_op({"op": "attention", "implementation": name}) for name in ("separate", "fused")
    )
    files = {os.path.relpath(sources.ROOT / "tnp/bench/tuning.py")}.union(*ours)
    return sorted(file for file in files if file.endswith(".py"))
